"""Hard routing: samples 0-5 go to expert A, 6-11 to expert B, so with two ranks each rank runs another expert (and a third expert is idle everywhere)."""

import torch
from torch import nn

ID, KIND, ORACLE = "023", "ranks execute different modules", "either"
ERROR = ["rank", "order", "different", "timeout", "collective", "unused"]
REFS = [
    "deepspeedai/DeepSpeed#7998",
    "deepspeedai/DeepSpeed#4966",
    "deepspeedai/DeepSpeed#4808",
    "hpcaitech/ColossalAI#3682",
    "deepspeedai/DeepSpeed#7525",
]
NOTE = "stages 0-2: plain result. Stage 3: plain result (leaf-module gather) or a clear error within the time-out; a hang is the bug"
CONFIG = {"find_unused": True}
OPT = ("sgd", dict(lr=0.1))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x, route):
        h = torch.tanh(self.inp(x))
        y = torch.zeros_like(h)
        for e in route.unique().tolist():
            idx = (route == e).nonzero().squeeze(1)
            y = y.index_add(0, idx, self.experts[e](h[idx]))
        return self.out(y)


def make_case():
    torch.manual_seed(26)
    route = torch.tensor([0] * 6 + [1] * 6)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 5), route), "target": rnd(125 + s, 12, 2)}] for s in range(3)
            ],
        },
        NOTE,
    )
