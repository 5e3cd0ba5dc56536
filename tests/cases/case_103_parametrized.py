"""Weights computed from other parameters (weight norm, a symmetric matrix) at every access."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

ID, KIND, ORACLE = "103", "parametrizations", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for block in self.blocks:
            parametrizations.weight_norm(block)
        self.mix = nn.Linear(6, 6)
        parametrize.register_parametrization(self.mix, "weight", Symmetric())

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.mix(x)


def make_case():
    torch.manual_seed(103)
    steps = [[{"args": (rnd(s, 12, 6),), "target": rnd(400 + s, 12, 6)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
