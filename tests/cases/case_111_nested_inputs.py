"""Tensors arrive inside dicts, lists and keyword arguments; some hold no gradient."""

import torch
from torch import nn

ID, KIND, ORACLE = "111", "nested inputs and keyword arguments", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(2))

    def forward(self, batch, *, scale=None, names=()):
        a, (b,) = batch["a"], batch["rest"]
        for block in self.blocks:
            a = torch.tanh(block(input1=a, input2=b))
        return a if scale is None else a * scale


def make_case():
    torch.manual_seed(111)
    steps = [
        [
            {
                "args": ({"a": rnd(s, 12, 4), "rest": [rnd(50 + s, 12, 4)]},),
                "kwargs": {"scale": rnd(80 + s, 12, 1), "names": ("x", "y")},
                "target": rnd(400 + s, 12, 4),
            }
        ]
        for s in range(3)
    ]
    return Net(), {"B": 12, "steps": steps}, ""
