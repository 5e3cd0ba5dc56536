"""nn.Embedding(sparse=True) gives a sparse gradient with repeated rows, some summing to zero; plus a dense layer."""

import torch
from torch import nn

ID, KIND, ORACLE = "063", "sparse embedding gradients", "either"
ERROR = ["sparse"]
REFS = [
    "deepspeedai/DeepSpeed#1416",
    "deepspeedai/DeepSpeed#8504",
    "deepspeedai/DeepSpeed#1562",
    "pytorch/pytorch#82486",
]
NOTE = "dense-equivalent result or a clear 'sparse gradients not supported' at initialize/backward; silently skipping them is the bug"
OPT = ("sgd", dict(lr=0.5))


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 4, sparse=True)
        self.l = nn.Linear(4, 2)

    def forward(self, ids):
        return self.l(self.e(ids).sum(1))


def make_case():
    torch.manual_seed(43)
    steps = []
    for s in range(3):
        g = torch.Generator().manual_seed(s)
        steps.append(
            [{"args": (torch.randint(0, 6, (12, 5), generator=g),), "target": rnd(285 + s, 12, 2)}]
        )
    return Net(), {"B": 12, "steps": steps}, NOTE
