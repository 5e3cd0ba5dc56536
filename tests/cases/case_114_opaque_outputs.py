"""Blocks that pass an object of the user's own along: returned in one block, changed in place in the next, which returns nothing."""

import torch
from torch import nn

ID, KIND, ORACLE = "114", "outputs that no tree of tensors shows", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class State:
    def __init__(self, h):
        self.h = h


class Slotted:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 6)

    def forward(self, state):
        h = state.h + torch.tanh(self.linear(state.h))
        if self.kind is None:
            state.h = h
            return None
        return self.kind(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(kind) for kind in (State, None, Slotted, State))
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        state = State(self.inp(x))
        for block in self.blocks:
            state = block(state) or state
        return self.out(state.h)


def make_case():
    torch.manual_seed(114)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
