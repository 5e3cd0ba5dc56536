"""The model calls a method of its blocks that is not forward, and reads a weight of one."""

import torch
from torch import nn

ID, KIND, ORACLE = "110", "units used without being called", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def encode(self, x):
        return torch.tanh(self.lin(x))

    def forward(self, x):
        return x + self.encode(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        early = self.blocks[0].lin.weight
        for block in self.blocks[:2]:
            x = block(x)
        x = self.blocks[2].encode(x)
        return nn.functional.linear(x, early)


def make_case():
    torch.manual_seed(110)
    steps = [[{"args": (rnd(s, 12, 6),), "target": rnd(400 + s, 12, 6)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
