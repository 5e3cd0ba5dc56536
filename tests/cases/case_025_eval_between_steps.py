"""train step, eval()+no_grad, train()+no_grad, inference_mode, a forward that raises, train step ... the training result must not notice."""

import torch
from torch import nn

ID, KIND, ORACLE = "025", "evaluation forwards between training steps", "plain"
REFS = [
    "deepspeedai/DeepSpeed#860",
    "deepspeedai/DeepSpeed#4922",
    "deepspeedai/DeepSpeed#3068",
    "snowflakedb/ArcticTraining#265",
    "pytorch/pytorch#105371",
]
NOTE = "parameters re-partitioned after every forward (also after an exception in forward); eval result equals plain; no growth of memory or traces"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.drop = nn.Dropout(0.0)
        self.b = nn.Linear(8, 2)

    def forward(self, x, boom=False):
        h = self.drop(torch.tanh(self.a(x)))
        if boom:
            raise ValueError("user error in forward")
        return self.b(h)


def make_case():
    torch.manual_seed(28)
    return (
        Net(),
        {
            "B": 12,
            "steps": [
                [{"args": (rnd(s, 12, 5),), "target": rnd(145 + s, 12, 2)}] for s in range(4)
            ],
        },
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, ("adamw", dict(lr=1e-2, eps=1e-5)), list(model.parameters()))
    losses, ev = [], []
    for (m,) in inputs["steps"]:
        m = api.local(m, 12)
        x = m["args"][0]
        api.train()
        l = (api(x) - m["target"]).pow(2).mean()
        losses.append(api.mean(l.detach()))
        api.backward(l)
        api.step()
        api.eval()
        with torch.no_grad():
            ev.append(api.mean(api(x).mean()))
        api.train()
        with torch.no_grad():
            ev.append(api.mean(api(x * 2).mean()))
        with torch.inference_mode():
            ev.append(api.mean(api(x).mean()))
        try:
            with torch.no_grad():
                api(x, boom=True)
        except ValueError:
            pass
    return api.result(losses + ev)
