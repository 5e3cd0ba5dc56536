"""Padding makes token counts unequal over micro-batches and ranks. With a sum loss divided by the window's token count the big-batch gradient is exact."""

import torch, torch.nn.functional as F
from torch import nn

ID, KIND, ORACLE = "066", "token-weighted loss over micro-batches and ranks", "plain"
REFS = [
    "karpathy/nanochat#59",
    "ml-explore/mlx-lm#1413",
    "PrimeIntellect-ai/prime-rl#583",
    "huggingface/blog#2414",
    "huggingface/transformers#35808",
]
NOTE = "loss = sum_of_token_losses / window_tokens * G * world; engine's own 1/G and 1/world then cancel; documents what engine.backward divides by"


def build():
    torch.manual_seed(45)
    return nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 13))


def make_case():
    steps = []
    for s in range(3):
        ms = []
        for k in range(2):
            g = torch.Generator().manual_seed(10 * s + k)
            ids = torch.randint(1, 13, (12, 8), generator=g)
            n = torch.randint(1, 9, (12,), generator=g)
            n[:6] = (n[:6] // 3).clamp(min=1)
            y = ids.roll(-1, 1).masked_fill(torch.arange(8)[None] >= n[:, None], -100)
            ms.append({"args": (ids,), "target": y})
        T = sum(int((m["target"] != -100).sum()) for m in ms)
        for m in ms:
            m["T"] = T
        steps.append(ms)
    return build(), {"B": 12, "steps": steps}, NOTE


def run(api, model, inputs):
    api.setup(model, ("sgd", dict(lr=0.5)), list(model.parameters()), {"gas": 2})
    losses = []
    for ms in inputs["steps"]:
        tot = 0.0
        for m in ms:
            m = api.local(m, 12)
            l = (
                F.cross_entropy(
                    api(*m["args"]).reshape(-1, 13),
                    m["target"].reshape(-1),
                    ignore_index=-100,
                    reduction="sum",
                )
                / m["T"]
                * 2
                * api.world
            )
            tot += api.mean(l.detach()) / 2
            api.backward(l)
            api.step()
        losses.append(tot)
    return api.result(losses)


def check(res):
    # independent big-batch reference: one backward over the whole window
    model, inputs, _ = make_case()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for ms in inputs["steps"]:
        ids = torch.cat([m["args"][0] for m in ms])
        y = torch.cat([m["target"] for m in ms])
        opt.zero_grad()
        F.cross_entropy(model(ids).reshape(-1, 13), y.reshape(-1), ignore_index=-100).backward()
        opt.step()
    assert all(torch.allclose(p, res["params"][n], atol=1e-5) for n, p in model.named_parameters())
