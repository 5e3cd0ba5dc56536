"""Activation checkpointing around blocks whose LayerNorm is frozen and whose Linear has a trainable low-rank adapter."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ID, KIND, ORACLE = "015", "activation checkpointing with frozen parameters inside", "plain"
REFS = [
    "deepspeedai/DeepSpeed#8130",
    "deepspeedai/DeepSpeed#8148",
    "huggingface/transformers#47254",
    "huggingface/trl#2514",
]
NOTE = "recompute must see gathered frozen parameters (stage 3); frozen bytes unchanged; adapters (2 x 6 numbers) updated"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.lin = nn.Linear(6, 6)
        self.A = nn.Parameter(rnd(1, 6, 1) * 0.3)
        self.B = nn.Parameter(torch.zeros(1, 6))
        for p in [*self.norm.parameters(), *self.lin.parameters()]:
            p.requires_grad_(False)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.lin(h) + h @ self.A @ self.B)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.ckpt_fn = lambda f, *a: checkpoint(f, *a, use_reentrant=False)

    def forward(self, x):
        for b in self.blocks:
            x = self.ckpt_fn(b, x)
        return self.head(x)


def make_case():
    torch.manual_seed(18)
    return (
        Net(),
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 6),), "target": rnd(45 + s, 12, 2)}] for s in range(3)],
        },
        NOTE,
    )


def param_groups(model):
    return [p for p in model.parameters() if p.requires_grad]
