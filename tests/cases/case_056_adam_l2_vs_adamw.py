"""Same model under Adam with L2 decay: an offloaded/fused optimizer that always decouples the decay gives other numbers."""

import torch
from torch import nn

ID, KIND, ORACLE = (
    "056",
    "optimizer flavour kept under sharding/offload (Adam+L2, AdamW, amsgrad)",
    "plain",
)
REFS = [
    "deepspeedai/DeepSpeed#482",
    "deepspeedai/DeepSpeed#8307",
    "deepspeedai/DeepSpeed#493",
    "deepspeedai/DeepSpeed#5214",
]
NOTE = "config optimizer types Adam / AdamW mean what torch means; bias correction and eps placement equal to torch; run with CPU and NVMe offload"
OPT = ("adam", dict(lr=2e-2, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.4, amsgrad=True))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    return (
        model,
        {
            "B": 12,
            "steps": [
                [
                    {
                        "args": (rnd(s, 12, 5, scale=1.0 + (s == 2) * 9),),
                        "target": rnd(275 + s, 12, 2),
                    }
                ]
                for s in range(5)
            ],
        },
        NOTE,
    )
