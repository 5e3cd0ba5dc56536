"""Sub-modules return dict, list, namedtuple, dataclass, None and non-tensors; root returns a dict with a detached metric."""

import torch, dataclasses, collections
from torch import nn

ID, KIND, ORACLE = "034a", "modules returning nested structures", "plain"
REFS = [
    "pytorch/pytorch#87540",
    "pytorch/pytorch#124725",
    "EleutherAI/gpt-neox#171",
    "pytorch/pytorch#87547",
]
NOTE = "pre-backward gather fires for tensors inside any structure; None/strings/ints pass through; types are preserved"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


@dataclasses.dataclass
class Out:
    h: torch.Tensor
    aux: object = None


NT = collections.namedtuple("NT", "h cache")


class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x):
        return {"h": torch.tanh(self.l(x)), "name": "a", "cache": None}


class B(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, d):
        return Out(torch.tanh(self.l(d["h"])), aux=[d["h"], {"deep": (d["h"] * 2,)}])


class C(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, o):
        return NT(self.l(o.h) + o.aux[1]["deep"][0], None)


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 1)

    def forward(self, h):
        self.seen = float(self.l(h).mean().detach())
        return None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.n = A(), B(), C(), Nothing()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        t = self.c(self.b(self.a(x)))
        self.n(t.h)
        y = self.head(t.h)
        return {"logits": y, "metric": y.detach().mean(), "info": ("v1", 3)}


CONFIG = {"find_unused": True}
OPT = ("sgd", dict(lr=0.1))


def make_case():
    torch.manual_seed(38)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 4),), "target": rnd(235 + s, 12, 2)}] for s in range(3)
            ],
        },
        NOTE,
    )


def loss_fn(out, m):
    assert out["info"] == ("v1", 3)
    return (out["logits"] - m["target"]).pow(2).mean()
