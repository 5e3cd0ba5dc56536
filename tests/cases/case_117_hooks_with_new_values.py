"""Hooks that return new values: on gradients of parameters, on a module's backward, on a block's inputs and outputs, with weights read inside the hook."""

import torch
from torch import nn

ID, KIND, ORACLE = "117", "hooks that return new values", "plain"


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
        self.inp.weight.register_hook(lambda grad: 2 * grad)
        self.out.bias.register_hook(lambda grad: torch.zeros_like(grad))
        self.blocks[0].register_full_backward_hook(lambda m, given, taken: (0.5 * given[0],))
        self.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * m[0].weight.mean(),))
        self.blocks[1].register_forward_hook(lambda m, args, out: out + 0.1 * m[1].weight.sum())
        self.blocks[2].register_full_backward_pre_hook(lambda m, taken: (taken[0].clamp(-1, 1),))

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.out(h)


def make_case():
    torch.manual_seed(117)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
