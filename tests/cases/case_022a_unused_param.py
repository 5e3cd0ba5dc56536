"""A layer that forward never touches. Plain torch leaves it alone completely (no weight decay, no optimizer state)."""

import torch
from torch import nn

ID, KIND, ORACLE = "022a", "parameter never used in forward", "plain"
REFS = [
    "deepspeedai/DeepSpeed#945",
    "deepspeedai/DeepSpeed#707",
    "huggingface/accelerate#2017",
    "deepspeedai/DeepSpeed#5241",
]
NOTE = "no crash, no hang; unused layer bitwise unchanged. Treating it as zero gradient (then AdamW shrinks it) is a documented deviation at best"
CONFIG = {"find_unused": True, "clip": 1.0}
OPT = ("adamw", dict(lr=1e-1, eps=1e-5, weight_decay=0.5))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.never = nn.Linear(6, 6)
        self.b = nn.Linear(6, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make_case():
    torch.manual_seed(24)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 5),), "target": rnd(105 + s, 12, 2)}] for s in range(3)
            ],
        },
        NOTE,
    )
