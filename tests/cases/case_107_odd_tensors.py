"""Parameters of no elements, of no dimensions, transposed and channels-last in memory."""

import torch
from torch import nn

ID, KIND, ORACLE = "107", "zero-element, 0-dim and non-contiguous parameters", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.turned = nn.Parameter(rnd(1, 6, 4).t())
        image = rnd(2, 2, 3, 2, 2) * 0.3
        self.filters = nn.Parameter(image.to(memory_format=torch.channels_last))

    def forward(self, x):
        picture = nn.functional.conv2d(x.view(-1, 3, 2, 2), self.filters, padding=1)
        h = nn.functional.linear(picture.flatten(1)[:, :6], self.turned)
        return h * self.gain + self.empty.sum()


def make_case():
    steps = [[{"args": (rnd(s, 12, 12),), "target": rnd(400 + s, 12, 4)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
