"""Frozen trunk (one whole module, one single bias). After save -> fresh model with other random weights -> load, frozen values must be back bit for bit."""

import torch
from torch import nn

ID, KIND, ORACLE = "003", "frozen parameters survive training and checkpoints", "plain"
REFS = [
    "deepspeedai/DeepSpeed#3090",
    "deepspeedai/DeepSpeed#5439",
    "deepspeedai/DeepSpeed#6771",
    "deepspeedai/DeepSpeed#4055",
    "deepspeedai/DeepSpeed#4776",
]
NOTE = "frozen values untouched by steps/decay; no optimizer state for them; checkpoint contains them; loads into a differently initialised model"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def build(seed):
    torch.manual_seed(seed)
    m = nn.ModuleDict(dict(trunk=nn.Linear(5, 8), mid=nn.Linear(8, 8), head=nn.Linear(8, 2)))
    for p in m["trunk"].parameters():
        p.requires_grad_(False)
    m["mid"].bias.requires_grad_(False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            return self.m["head"](torch.tanh(self.m["mid"](torch.tanh(self.m["trunk"](x)))))

    return Net()


def make_case():
    return (
        build(5),
        {
            "B": 12,
            "steps": [[{"args": (rnd(s, 12, 5),), "target": rnd(30 + s, 12, 2)}] for s in range(4)],
        },
        NOTE,
    )


def run(api, model, inputs):
    opt = ("adamw", dict(lr=1e-2, eps=1e-5, weight_decay=0.1))
    frozen0 = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}

    def go(a, steps):
        out = []
        for (m,) in steps:
            m = a.local(m, 12)
            l = (a(*m["args"]) - m["target"]).pow(2).mean()
            out.append(a.mean(l.detach()))
            a.backward(l)
            a.step()
        return out

    api.setup(model, opt, [p for p in model.parameters() if p.requires_grad])
    losses = go(api, inputs["steps"][:2])
    st = api.state()
    other = build(999)
    api2 = type(api)(api.config)
    api2.setup(other, opt, [p for p in other.parameters() if p.requires_grad])
    api2.load(st)
    losses += go(api2, inputs["steps"][2:])
    res = api2.result(losses)
    res["extra"]["frozen_equal"] = all(
        torch.equal(res["params"][n].cpu(), v) for n, v in frozen0.items()
    )
    return res


def check(res):
    assert res["extra"]["frozen_equal"]
