"""Reentrant checkpointing of a layer that some samples go through twice: only their rank gets a second gradient, after the bucket has left."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ID, KIND, ORACLE = "113", "a gradient that comes late on one rank only", "plain"
CONFIG = {"find_unused": True, "gas": 2, "clip": 0.5}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def piece(self, h):
        return torch.tanh(self.norm(self.twice(h)))

    def forward(self, x, again):
        h = checkpoint(self.piece, self.inp(x), use_reentrant=True)
        (rows,) = again.nonzero(as_tuple=True)
        if len(rows):
            h = h.index_add(0, rows, checkpoint(self.piece, h[rows], use_reentrant=True))
        return self.out(h)


def make_case():
    torch.manual_seed(113)
    again = torch.tensor([0.0] * 9 + [1.0] * 3)
    steps = [
        [{"args": (rnd(s, 12, 5), again * on), "target": rnd(40 + s, 12, 2)} for on in micros]
        for s, micros in enumerate([(1, 0), (0, 1), (0, 0), (1, 1)])
    ]
    return Net(), {"B": 12, "steps": steps}, ""
