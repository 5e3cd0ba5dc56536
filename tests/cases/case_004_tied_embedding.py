"""Tiny language model, lm_head.weight is embed.weight. Both names must show the same updated values; gradient is the sum of both uses."""

import torch, torch.nn.functional as F
from torch import nn

ID, KIND, ORACLE = "004", "tied weights (embedding = lm_head)", "plain"
REFS = [
    "deepspeedai/DeepSpeed#3824",
    "deepspeedai/DeepSpeed#1896",
    "EleutherAI/gpt-neox#171",
    "pytorch/pytorch#81296",
]
NOTE = "one optimizer state, one count in norm and memory estimate; consolidated checkpoint lists both names; still tied (same storage) after load"
CONFIG = {"clip": 0.5}


class LM(nn.Module):
    def __init__(self, V=17, D=6):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mix(self.embed(ids))))


def make_case():
    torch.manual_seed(6)
    model = LM()
    steps = []
    for s in range(3):
        g = torch.Generator().manual_seed(s)
        ids = torch.randint(0, 17, (12, 4), generator=g)
        steps.append([{"args": (ids,), "target": ids.roll(-1, 1)}])
    return model, {"B": 12, "steps": steps}, NOTE


def loss_fn(out, m):
    return F.cross_entropy(out.reshape(-1, 17), m["target"].reshape(-1))


def check(res):
    assert torch.equal(res["params"]["embed.weight"], res["params"]["lm_head.weight"])
