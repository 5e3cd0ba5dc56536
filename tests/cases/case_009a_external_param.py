"""The parent reads a child's weight without calling the child (and once after the child has already been released)."""

import torch, torch.nn.functional as F
from torch import nn

ID, KIND, ORACLE = "009a", "parameter used outside its own module's forward", "either"
ERROR = ["external", "partition", "gather", "not available"]
REFS = [
    "deepspeedai/DeepSpeed#930",
    "deepspeedai/DeepSpeed#876",
    "deepspeedai/DeepSpeed#1048",
    "deepspeedai/DeepSpeed#981",
]
NOTE = "stages 0-2: plain result. Stage 3: plain result or an error naming the parameter; a size-1/size-0 placeholder that broadcasts silently is the bug"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(5, 7)
        self.gate = nn.Linear(7, 7)
        self.dec = nn.Linear(7, 5)

    def forward(self, x):
        h = torch.tanh(self.enc(x))
        h = h * self.gate.bias + F.linear(h, self.gate.weight)  # gate is never called
        return F.linear(
            self.dec(h), self.enc.weight.t() @ self.enc.weight
        )  # enc.weight re-used later


def make_case():
    torch.manual_seed(10)
    return (
        Net(),
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 5),), "target": rnd(60 + s, 12, 5)}] for s in range(3)],
        },
        NOTE,
    )
