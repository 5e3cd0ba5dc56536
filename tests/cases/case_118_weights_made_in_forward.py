"""Weights that forward makes from parameters: functional_call with a changed weight, weight_norm of the old kind, a block that stands in the list twice, a convolution in channels_last."""

import warnings

import torch
from torch import nn

ID, KIND, ORACLE = "118", "weights that are made in forward", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 6, 1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.blocks[1])
        self.blocks.append(self.blocks[0])
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        h = self.conv(x[:, :, None, None]).flatten(1)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        made = {"weight": 2 * self.out.weight, "bias": self.out.bias}
        return torch.func.functional_call(self.out, made, h)


def make_case():
    torch.manual_seed(118)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
