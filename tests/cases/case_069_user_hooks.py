"""User hooks: gradient scaling tensor hook, post-accumulate counter, forward pre/post hooks, a full backward hook on a submodule."""

import torch
from torch import nn

ID, KIND, ORACLE = "069", "user-registered hooks keep working and fire once", "plain"
REFS = ["pytorch/pytorch#81296", "deepspeedai/DeepSpeed#4237", "pytorch/pytorch#46163"]
NOTE = "tensor hook (x0.25) acts on the local gradient before reduction; forward hooks see full (gathered) weights; counts equal to plain"
OPT = ("sgd", dict(lr=0.2))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 2)
        self.counts = dict(pre=0, post=0, bwd=0, tensor=0, shapes=set())
        self.a.weight.register_hook(self._t)
        self.b.register_forward_pre_hook(self._pre)
        self.a.register_forward_hook(self._post)
        self.b.register_full_backward_hook(self._bwd)

    def _t(self, g):
        self.counts["tensor"] += 1
        return g * 0.25

    def _pre(self, m, a):
        self.counts["pre"] += 1
        self.counts["shapes"].add(tuple(m.weight.shape))
        return (a[0] * 2,)

    def _post(self, m, a, o):
        self.counts["post"] += 1
        return o + 0.1

    def _bwd(self, m, gi, go):
        self.counts["bwd"] += 1

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make_case():
    torch.manual_seed(48)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 4),), "target": rnd(315 + s, 12, 2)}] for s in range(3)
            ],
        },
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, OPT, list(model.parameters()))
    losses = []
    for (m,) in inputs["steps"]:
        m = api.local(m, 12)
        l = (api(*m["args"]) - m["target"]).pow(2).mean()
        losses.append(api.mean(l.detach()))
        api.backward(l)
        api.step()
    return api.result(
        losses,
        counts={k: (sorted(v) if isinstance(v, set) else v) for k, v in model.counts.items()},
    )


def check(res):
    c = res["extra"]["counts"]
    assert (c["pre"], c["post"], c["bwd"], c["tensor"]) == (3, 3, 3, 3), c
