"""Between the micro-steps of one step: evaluation before and after backward, a block frozen and unfrozen, another learning rate, gradients set to zero in vain."""

import torch
from torch import nn

ID, KIND, ORACLE = "116", "what scripts do in the middle of accumulation", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3)
        )
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.out(h)


def make_case():
    torch.manual_seed(116)
    steps = [[{"args": (rnd(s, 12, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(8)]
    return Net(), {"B": 12, "steps": steps}, ""


def look(api, x, seen):
    api.eval()
    with torch.no_grad():
        seen.append(api.mean(api(2 * x).mean()))
    api.train()


def run(api, model, inputs):
    groups = [
        {"params": list(model.inp.parameters()), "lr": 0.0},
        {"params": [*model.blocks.parameters(), *model.out.parameters()]},
    ]
    api.setup(model, ("adamw", dict(lr=1e-2, eps=1e-5)), groups, {"gas": 2})
    seen = []
    for number, (micro,) in enumerate(inputs["steps"]):
        mine = api.local(micro, 12)
        x = mine["args"][0]
        model.blocks[1].requires_grad_(number not in (1, 4, 5))
        out = api(x)
        look(api, x, seen)
        api.backward((out - mine["target"]).pow(2).mean())
        look(api, x, seen)
        api.step()
        if number % 2:
            api.opt.zero_grad()
            api.opt.param_groups[0]["lr"] += 1e-3
    return api.result(seen)
