"""The loss holds the gradient of the output with respect to the input: backward through backward."""

import torch
from torch import nn

ID, KIND, ORACLE = "105", "double backward", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def make_case():
    torch.manual_seed(105)
    return Net(), {"B": 12, "steps": [[{"args": (rnd(s, 12, 6),)}] for s in range(3)]}, ""


def run(api, model, inputs):
    api.setup(model, ("sgd", dict(lr=0.1)), list(model.parameters()))
    losses = []
    for (micro,) in inputs["steps"]:
        (x,) = api.local(micro, 12)["args"]
        x.requires_grad_()
        y = api(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
        losses.append(api.mean(loss.detach()))
        api.backward(loss)
        api.step()
    return api.result(losses)
