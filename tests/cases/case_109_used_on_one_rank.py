"""A layer runs only for samples of the first rank; the others give it no gradient."""

import torch
from torch import nn

ID, KIND, ORACLE = "109", "parameter unused on some ranks", "plain"
CONFIG = {"find_unused": True}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.rare = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x, first):
        h = torch.tanh(self.inp(x))
        if bool(first.any()):
            h = h + self.rare(h) * first[:, None]
        return self.out(h)


def make_case():
    torch.manual_seed(109)
    first = torch.tensor([1.0] * 3 + [0.0] * 9)
    steps = [[{"args": (rnd(s, 12, 5), first), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
