"""MultiheadAttention reads out_proj.weight without calling out_proj."""

import torch
from torch import nn

ID, KIND, ORACLE = "102", "nn.MultiheadAttention in repeated blocks", "plain"
OPT = ("sgd", dict(lr=0.1))  # the bias of keys has no gradient but noise, which Adam would scale up


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


def make_case():
    torch.manual_seed(102)
    steps = [[{"args": (rnd(s, 12, 4, 8),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
