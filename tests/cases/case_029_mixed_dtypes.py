"""fp32, bf16 and fp64 layers in one model (fp32 engine, no global cast)."""

import torch
from torch import nn

ID, KIND, ORACLE = "029", "parameters of mixed dtypes", "either"
ERROR = ["dtype", "uniform", "float64", "bfloat16"]
REFS = [
    "huggingface/trl#1723",
    "huggingface/peft#484",
    "pytorch/pytorch#156784",
    "huggingface/peft#1702",
]
NOTE = "keep each dtype through step/save/load (flat buffers per dtype), or an error at initialize() that names the parameters; never a silent cast"
OPT = ("sgd", dict(lr=0.1))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.h = nn.Linear(6, 6).to(torch.bfloat16)
        self.d = nn.Linear(6, 2).double()

    def forward(self, x):
        return self.d(self.h(torch.tanh(self.a(x)).to(torch.bfloat16)).double()).float()


def make_case():
    torch.manual_seed(33)
    return (
        Net(),
        {
            "B": 12,
            "tol": 2e-2,
            "steps": [
                [{"args": (rnd(s, 12, 5),), "target": rnd(195 + s, 12, 2)}] for s in range(2)
            ],
        },
        NOTE,
    )


def check(res):
    assert res["params"]["d.weight"].dtype == torch.float64
