"""Two engines, one loss through both: the generator's step must not see the discriminator's gradients."""

import torch
from torch import nn

ID, KIND, ORACLE = "108", "two engines in one loss (GAN)", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        self.judge = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def make_case():
    torch.manual_seed(108)
    steps = [[{"args": (rnd(s, 12, 4), rnd(400 + s, 12, 5))}] for s in range(4)]
    return Pair(), {"B": 12, "steps": steps}, ""


def run(api, model, inputs):
    other = type(api)()
    api.setup(model.maker, ("sgd", dict(lr=0.2)), list(model.maker.parameters()))
    other.setup(model.judge, ("sgd", dict(lr=0.1)), list(model.judge.parameters()))
    losses = []
    for (micro,) in inputs["steps"]:
        noise, real = api.local(micro, 12)["args"]
        fake = api(noise)
        loss = (other(fake.detach()) + 1).pow(2).mean() + (other(real) - 1).pow(2).mean()
        losses.append(api.mean(loss.detach()))
        other.backward(loss)
        other.step()
        for param in model.judge.parameters():
            param.requires_grad_(False)
        loss = (other(fake) - 1).pow(2).mean()
        losses.append(api.mean(loss.detach()))
        api.backward(loss)
        api.step()
        for param in model.judge.parameters():
            param.requires_grad_(True)
    first, second = api.result(losses), other.result()
    first["params"].update({f"judge.{k}": v for k, v in second["params"].items()})
    return first
