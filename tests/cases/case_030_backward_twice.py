"""Two losses from one forward, two backward calls (first with retain_graph), one step."""

import torch
from torch import nn

ID, KIND, ORACLE = "030", "backward twice on one graph", "either"
ERROR = ["backward", "twice", "retain", "once"]
REFS = [
    "deepspeedai/DeepSpeed#3539",
    "deepspeedai/DeepSpeed#329",
    "deepspeedai/DeepSpeed#8135",
    "deepspeedai/DeepSpeed#7665",
    "fidelity/stoke#4",
]
NOTE = "gradient of loss1+loss2, or a clear error at the second backward; dropping or double-counting one loss is the bug"
OPT = ("sgd", dict(lr=0.1))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return (
        model,
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 5),), "target": rnd(205 + s, 12, 3)}] for s in range(3)
            ],
        },
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, OPT, list(model.parameters()))
    losses = []
    for (m,) in inputs["steps"]:
        m = api.local(m, 12)
        y = api(*m["args"])
        l1 = (y - m["target"]).pow(2).mean()
        l2 = 0.3 * y.abs().mean()
        losses.append(api.mean((l1 + l2).detach()))
        api.backward(l1, retain_graph=True)
        api.backward(l2)
        api.step()
    return api.result(losses)
