"""A buffer that forward multiplies with, two forwards before backward: buffer broadcasts in place break autograd."""

import torch
from torch import nn

ID, KIND, ORACLE = "035a", "buffer synchronisation between two forwards", "plain"
REFS = [
    "pytorch/pytorch#22095",
    "pytorch/pytorch#65907",
    "pytorch/pytorch#70260",
    "huggingface/transformers#24996",
]
NOTE = "no in-place write to a buffer that autograd saved; DDP itself fails here unless broadcast_buffers=False (the harness sets that)"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 6)
        self.register_buffer("buf", torch.linspace(0.5, 1.5, 6)[None])

    def forward(self, x):
        return self.l(x) * self.buf


def make_case():
    torch.manual_seed(40)
    return (
        Net(),
        {"B": 12, "steps": [[{"args": (rnd(s, 12, 4), rnd(255 + s, 12, 4))}] for s in range(3)]},
        NOTE,
    )


def run(api, model, inputs):
    api.setup(model, ("sgd", dict(lr=0.05)), list(model.parameters()), {"broadcast_buffers": False})
    losses = []
    for (m,) in inputs["steps"]:
        a, b = api.local(m, 12)["args"]
        l = (api(a) * api(b)).pow(2).mean()
        losses.append(api.mean(l.detach()))
        api.backward(l)
        api.step()
    return api.result(losses)
