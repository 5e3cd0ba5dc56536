"""Three interleaved groups with their own lr and weight decay (weights / biases / last layer)."""

import torch
from torch import nn

ID, KIND, ORACLE = "018a", "several parameter groups", "plain"
REFS = [
    "deepspeedai/DeepSpeed#6873",
    "deepspeedai/DeepSpeed#6878",
    "deepspeedai/DeepSpeed#5063",
    "deepspeedai/DeepSpeed#7713",
]
NOTE = "each parameter keeps the hyper-parameters of its own group; splitting into groups must not change gradients; norm is over all groups"
OPT = ("adamw", dict(lr=1e-2, eps=1e-3))
CONFIG = {"clip": 0.3}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    return (
        model,
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 5),), "target": rnd(75 + s, 12, 3)}] for s in range(4)],
        },
        NOTE,
    )


def param_groups(model):
    n = dict(model.named_parameters())
    last = [p for k, p in n.items() if k.startswith("4.")]
    return [
        dict(
            params=[p for k, p in n.items() if k.endswith("weight") and k[0] != "4"],
            weight_decay=0.3,
            lr=3e-2,
        ),
        dict(
            params=[p for k, p in n.items() if k.endswith("bias") and k[0] != "4"],
            weight_decay=0.0,
            lr=1e-3,
        ),
        dict(params=last, weight_decay=0.01, lr=1e-1),
    ]
