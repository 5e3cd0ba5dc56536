"""Parameters owned by the root and by ParameterList/ParameterDict; several have size 1 and are used element-wise (placeholders would broadcast)."""

import torch
from torch import nn

ID, KIND, ORACLE = "009c", "root-level and container parameters", "plain"
REFS = ["deepspeedai/DeepSpeed#5539", "deepspeedai/DeepSpeed#930", "deepspeedai/DeepSpeed#981"]
NOTE = "pos_embed, scale (shape (1,)), (1, 1) temperature, ParameterList entries: all gathered for the root forward and all updated"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(rnd(1, 1, 3, 5) * 0.1)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.temp = nn.Parameter(torch.full((1, 1), 0.7))
        self.ws = nn.ParameterList([nn.Parameter(rnd(i, 5, 5) * 0.3) for i in range(3)])
        self.d = nn.ParameterDict(
            {"b": nn.Parameter(torch.zeros(5)), "a": nn.Parameter(torch.ones(5))}
        )

    def forward(self, x):
        x = (x + self.pos_embed) * self.scale
        for w in self.ws:
            x = torch.tanh(x @ w)
        return (x * self.d["a"] + self.d["b"]) / self.temp


def make_case():
    torch.manual_seed(12)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 3, 5),), "target": rnd(90 + s, 12, 3, 5)}] for s in range(3)
            ],
        },
        NOTE,
    )
