"""Last batch has 5 samples: ranks get 3 and 2 (or 2,2,1; with 6 ranks one gets none)."""

import torch
from torch import nn

ID, KIND, ORACLE = "024", "uneven last batch", "ddp"
REFS = [
    "pytorch/pytorch#38174",
    "pytorch/pytorch#42577",
    "microsoft/PyMarlin#80",
    "huggingface/accelerate#820",
    "horovod/horovod#3980",
]
NOTE = "no hang; result equals DDP (mean of rank means), or sample-weighted mean if documented; empty shard: clear error or zero contribution, never NaN"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(27)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return (
        model,
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, n, 4),), "target": rnd(135 + s, n, 2), "n": n}]
                for s, n in enumerate((12, 12, 5))
            ],
        },
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, ("adamw", dict(lr=1e-2, eps=1e-5)), list(model.parameters()))
    losses = []
    for (m,) in inputs["steps"]:
        m = api.local(m, m["n"])
        l = (api(*m["args"]) - m["target"]).pow(2).mean()
        losses.append(api.mean(l.detach()))
        api.backward(l)
        api.step()
    return api.result(losses)
