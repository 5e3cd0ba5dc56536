"""Four micro-batches of very different size per update: lost, doubled or wrongly averaged micro-batches all show."""

import torch
from torch import nn

ID, KIND, ORACLE = "001a", "gradient accumulation averages G micro-batches", "plain"
REFS = [
    "allenai/open-instruct#1498",
    "huggingface/accelerate#1970",
    "huggingface/accelerate#3877",
    "deepspeedai/DeepSpeed#1488",
    "deepspeedai/DeepSpeed#545",
]
NOTE = "engine.backward divides by G once; update happens on every 4th engine.step only; parameters must not move in between"
CONFIG = {"gas": 4}


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    steps = [
        [
            {
                "args": (rnd(100 * s + m, 12, 5, scale=4.0 ** (m - 2)),),
                "target": rnd(900 + 10 * s + m, 12, 3),
            }
            for m in range(4)
        ]
        for s in range(3)
    ]
    return model, {"B": 12, "steps": steps}, NOTE
