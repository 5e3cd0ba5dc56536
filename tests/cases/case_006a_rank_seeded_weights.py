"""Every rank builds the model with its own seed (as a careless script does). Rank 0's weights must win everywhere."""

import torch
from torch import nn

from zerolab import comm

ID, KIND, ORACLE = "006a", "different initial weights on the ranks", "plain"
REFS = [
    "pytorch/torchtitan#166",
    "pytorch/pytorch#75870",
    "facebookresearch/fairscale#584",
    "allenai/OLMo-core#319",
]
NOTE = "initialize() broadcasts parameters and buffers from rank 0 (all stages) or raises; training on N different models is the silent failure"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def make_case():
    torch.manual_seed(1000 + int(comm.get_rank()))
    return (
        Net(),
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 5),), "target": rnd(40 + s, 12, 3)}] for s in range(3)],
        },
        NOTE,
    )


def check(res):
    assert res["extra"].get("replica_spread", 0.0) == 0.0
