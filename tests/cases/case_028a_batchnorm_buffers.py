"""BatchNorm with local statistics: compare with DDP of the same world size; eval after training must not depend on the rank."""

import torch
from torch import nn

ID, KIND, ORACLE = "028a", "batch-norm running statistics", "ddp"
REFS = [
    "pytorch/pytorch#13711",
    "facebookresearch/fairscale#68",
    "hpcaitech/ColossalAI#291",
    "open-mmlab/mmdetection#2539",
]
NOTE = "a stated buffer policy (rank 0 wins, as DDP); saved once and identical on all ranks in eval; num_batches_tracked stays int64 even in fp16/bf16"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(31)
    model = nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 2),
        nn.BatchNorm1d(2, momentum=None),
    )
    return (
        model,
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 4) + s,), "target": rnd(175 + s, 12, 2)}] for s in range(4)
            ],
        },
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, ("sgd", dict(lr=0.05)), list(model.parameters()))
    losses = []
    for (m,) in inputs["steps"]:
        m = api.local(m, 12)
        l = (api(*m["args"]) - m["target"]).pow(2).mean()
        losses.append(api.mean(l.detach()))
        api.backward(l)
        api.step()
    return api.result(
        losses,
        tracked=int(model[1].num_batches_tracked),
        tracked_dtype=str(model[1].num_batches_tracked.dtype),
    )


def check(res):
    assert res["extra"]["tracked"] == 4 and res["extra"]["tracked_dtype"] == "torch.int64"
