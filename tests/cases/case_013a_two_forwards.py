"""Siamese use: two engine forwards, one loss, one backward."""

import torch
from torch import nn

ID, KIND, ORACLE = "013a", "two forwards before one backward", "plain"
REFS = [
    "deepspeedai/DeepSpeed#988",
    "deepspeedai/DeepSpeed#5321",
    "huggingface/transformers#18330",
    "deepspeedai/DeepSpeedExamples#458",
    "xfactlab/orpo#9",
]
NOTE = "gradient is the sum over both uses, reduced once; no 'computed twice' assertion"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))
    return (
        model,
        {"B": 12, "steps": [[{"args": (rnd(s, 12, 5), rnd(300 + s, 12, 5))}] for s in range(3)]},
        NOTE,
    )


def run(api, model, inputs):
    api.setup(
        model, ("adamw", dict(lr=1e-2, eps=1e-5)), list(model.parameters()), {"static_graph": False}
    )
    losses = []
    for (m,) in inputs["steps"]:
        a, b = api.local(m, 12)["args"]
        ya, yb = api(a), api(b)
        loss = (ya - yb).pow(2).mean() + (ya * yb).mean()
        losses.append(api.mean(loss.detach()))
        api.backward(loss)
        api.step()
    return api.result(losses)
