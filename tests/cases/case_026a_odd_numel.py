"""Parameters with 1,2,3,5,7,11,13,35 numbers (one is 5-dim): padding and empty shards everywhere."""

import torch
from torch import nn

ID, KIND, ORACLE = "026a", "numel not divisible by, or smaller than, the world size", "plain"
REFS = ["deepspeedai/DeepSpeed#129", "deepspeedai/DeepSpeed#1380", "deepspeedai/DeepSpeed#836"]
NOTE = "every shape exact after step, save/load, consolidate; padding is zero and counted nowhere (norm, parameter count, estimator)"
CONFIG = {"clip": 0.7}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.full((1,), 1.1))
        self.one = nn.Parameter(torch.ones(1))
        self.ps = nn.ParameterList([nn.Parameter(rnd(n, n)) for n in (2, 3, 5, 7, 11, 13)])
        self.w = nn.Parameter(rnd(99, 7, 1, 5, 1, 1) * 0.2)

    def forward(self, x):
        y = torch.einsum("bi,oi->bo", x, self.w[:, 0, :, 0, 0]) * self.s + self.one
        for p in self.ps:
            y = y + torch.tanh(p).mean() * 0.5
        return y


def make_case():
    torch.manual_seed(29)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 5),), "target": rnd(155 + s, 12, 7)}] for s in range(3)
            ],
        },
        NOTE,
    )
