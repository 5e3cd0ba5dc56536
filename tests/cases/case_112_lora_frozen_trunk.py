"""A frozen trunk with small trainable adapters, no checkpointing: parameters are needed in backward after every gradient has come."""

import torch
from torch import nn

ID, KIND, ORACLE = "112", "frozen units between trainable ones", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.lin = nn.Linear(6, 6)
        self.down = nn.Parameter(rnd(1, 6, 1) * 0.3)
        self.up = nn.Parameter(rnd(2, 1, 6) * 0.3)
        for param in [*self.norm.parameters(), *self.lin.parameters()]:
            param.requires_grad_(False)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.lin(h) + h @ self.down @ self.up)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        for param in self.trunk.parameters():
            param.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        for block in self.blocks:
            x = block(x)
        return x


def make_case():
    torch.manual_seed(112)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 6)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""


def param_groups(model):
    return [param for param in model.parameters() if param.requires_grad]
