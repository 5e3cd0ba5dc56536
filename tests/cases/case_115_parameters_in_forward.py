"""A forward that goes over self.parameters() itself: a penalty on all weights, and the dtype of the first one."""

import torch
from torch import nn

ID, KIND, ORACLE = "115", "parameters read through parameters() inside forward", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        h = self.inp(x.to(next(self.parameters()).dtype))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        largest = max(float(p.detach().abs().max()) for name, p in self.named_parameters())
        return self.out(h) + 1e-2 * penalty / (1 + largest)


def make_case():
    torch.manual_seed(115)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
