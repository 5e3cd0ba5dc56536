"""An LSTM keeps a list of its weights beside the parameters; two layers, used inside a bigger model."""

import torch
from torch import nn

ID, KIND, ORACLE = "101", "nn.LSTM", "plain"


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        hidden, _ = self.rnn(x)
        return self.out(hidden[:, -1])


def make_case():
    torch.manual_seed(101)
    steps = [[{"args": (rnd(s, 12, 4, 5),), "target": rnd(400 + s, 12, 2)}] for s in range(3)]
    return Net(), {"B": 12, "steps": steps}, ""
