"""Parameters of 64, 64, 1, 63, 4096 elements: run with every bucket size listed in inputs['bucket_sizes']; numbers must not depend on it (0 and negatives: config error)."""

import torch
from torch import nn

ID, KIND, ORACLE = "011", "reduce/all-gather bucket size must not change results", "plain"
REFS = [
    "deepspeedai/DeepSpeed#6351",
    "deepspeedai/DeepSpeed#4321",
    "deepspeedai/DeepSpeed#7415",
    "deepspeedai/DeepSpeed#8260",
    "deepspeedai/DeepSpeed#4875",
    "deepspeedai/DeepSpeed#7710",
]
NOTE = (
    "one parameter larger than the bucket, one exactly equal, one bigger than everything together"
)


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.s = nn.Parameter(torch.ones(1))
        self.c = nn.Linear(8, 7, bias=True)
        self.big = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.c(self.b(torch.tanh(self.a(x)))) * self.s + self.big(x.repeat(1, 8))[:, :7]


def make_case():
    torch.manual_seed(14)
    return (
        Net(),
        {
            "B": 12,
            "bucket_sizes": [1, 2, 63, 64, 65, 4095, 4096, 4097, 10**9],
            "bad_bucket_sizes": [0, -1],
            "steps": [[{"args": (rnd(s, 12, 8),), "target": rnd(25 + s, 12, 7)}] for s in range(3)],
        },
        NOTE,
    )
