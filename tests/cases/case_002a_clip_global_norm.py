"""One layer with big gradients, one with tiny, a size-1 parameter, a tied matrix: local-shard norms and double counting give another clip factor."""

import torch
from torch import nn

ID, KIND, ORACLE = "002a", "gradient clipping by the global norm", "plain"
REFS = [
    "pytorch/pytorch#72548",
    "pytorch/pytorch#88955",
    "pytorch/pytorch#170862",
    "ByteDance-Seed/VeOmni#184",
    "NVIDIA/Megatron-LM#7228",
]
NOTE = "reported norm and clipped update equal to clip_grad_norm_ over the full model; a tied parameter counts once; replicated small parameters count once"
CONFIG = {"clip": 0.05}
OPT = ("sgd", dict(lr=0.5, momentum=0.9))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.inp.weight
        self.big = nn.Linear(6, 9)
        self.tiny = nn.Parameter(torch.full((1,), 1e-3))
        self.head = nn.Linear(9, 1, bias=False)

    def forward(self, x):
        return self.head(self.big(self.out(torch.tanh(self.inp(x)))) * 30) * (1 + self.tiny)


def make_case():
    torch.manual_seed(3)
    return (
        Net(),
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 6),), "target": rnd(70 + s, 12, 1)}] for s in range(4)],
        },
        NOTE,
    )
