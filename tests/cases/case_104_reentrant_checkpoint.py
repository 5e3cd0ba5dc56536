"""Reentrant checkpointing around blocks; one block is used twice, so its gradients arrive in two parts."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ID, KIND, ORACLE = "104", "reentrant checkpointing of a reused block", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3)
        )
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        h = self.inp(x)
        for block in [*self.blocks, self.blocks[1]]:
            h = h + torch.tanh(checkpoint(block, h, use_reentrant=True))
        return self.out(h)


def make_case():
    torch.manual_seed(104)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
