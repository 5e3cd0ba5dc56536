"""Only the last sample of step 1 explodes, so only one rank sees an infinite gradient. All ranks must skip that update and only that update."""

import torch
from torch import nn

ID, KIND, ORACLE = "007", "overflow on one rank only", "plain"
REFS = ["ecmwf/WeatherGenerator#2718", "deepspeedai/DeepSpeed#931", "deepspeedai/DeepSpeed#8415"]
NOTE = "found-inf decision is global (before clipping); moments, step counter, LR schedule untouched by the skipped update; loss scale equal on all ranks"
OPT = ("adamw", dict(lr=1e-2, eps=1e-5, weight_decay=0.1))
CONFIG = {"clip": 1.0, "check_overflow": True}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    steps = [[{"args": (rnd(s, 12, 4),)}] for s in range(4)]
    steps[1][0]["args"][0][-1] = 1e30
    return model, {"B": 12, "steps": steps}, NOTE


def check(res):
    assert all(torch.isfinite(p).all() for p in res["params"].values())
