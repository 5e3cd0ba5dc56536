"""A layer is frozen for the first two steps and trained from the third."""

import torch
from torch import nn

ID, KIND, ORACLE = "106", "unfreezing during training", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


def make_case():
    torch.manual_seed(106)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2))
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(4)]
    return model, {"B": 12, "steps": steps}, ""


def run(api, model, inputs):
    api.setup(model, ("adamw", dict(lr=1e-2, eps=1e-5)), list(model.parameters()))
    losses = []
    for number, (micro,) in enumerate(inputs["steps"]):
        for param in model[2].parameters():
            param.requires_grad_(number >= 2)
        mine = api.local(micro, 12)
        loss = (api(*mine["args"]) - mine["target"]).pow(2).mean()
        losses.append(api.mean(loss.detach()))
        api.backward(loss)
        api.step()
    return api.result(losses)
