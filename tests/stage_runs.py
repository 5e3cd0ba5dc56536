"""Training runs that the tests of the stages share: one SPMD function, small models, real text."""

import torch
from torch import nn

import zerolab
from zerolab import comm, data, gpt

STEPS = 3


class Odd(nn.Module):
    """Sizes that no world size divides, a tied weight, a scalar, a frozen and an unused layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(7, 5, bias=False)
        self.last.weight = nn.Parameter(torch.randn(5, 7) * 0.3)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.last.weight

    def forward(self, x, y):
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = torch.tanh(block(h)) * self.scale
        out = self.last(self.frozen(h)) + self.tied(h)
        return (out.float() - y.float()).pow(2).mean()


def make_model(name):
    torch.manual_seed(3)
    return Odd() if name == "odd" else gpt.GPT(gpt.PRESETS[name])


def make_batches(name, rank, world_size, micro_batch_size, count):
    """The first `count` batches of one rank."""
    if name != "odd":
        seq_len = gpt.PRESETS[name].seq_len
        stream = data.batches(data.load_text(), rank, world_size, micro_batch_size, seq_len, seed=0)
        return [next(stream) for _ in range(count)]
    batches = []
    for step in range(count):
        numbers = torch.Generator().manual_seed(100 + step)
        x = torch.randn(world_size * micro_batch_size, 5, generator=numbers)
        y = torch.randn(world_size * micro_batch_size, 5, generator=numbers)
        mine = slice(rank * micro_batch_size, (rank + 1) * micro_batch_size)
        batches.append((x[mine], y[mine]))
    return batches


def make_config(stage, dtype="fp32", accum=1, micro=2, **more):
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config | more


def to_dtype(batch, dtype):
    if dtype != "bf16":
        return batch
    return tuple(t.bfloat16() if t.is_floating_point() else t for t in batch)


def full_params(engine):
    """Every parameter, whole, whatever the stage."""
    whole = {}
    for bucket in engine.sharding.buckets:
        full = torch.empty(bucket.padded_numel, dtype=bucket.dtype)
        comm.all_gather(full, bucket.shard.clone(), purpose="control")
        for slot in bucket.slots:
            whole[slot.name] = full[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
    return whole


def train(name, config, dtype="fp32", steps=STEPS):
    """Train on the calling rank and return all that the tests ask about."""
    model = make_model(name)
    engine, *_ = zerolab.initialize(model=model, config=config)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    accum, micro = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    stream = iter(make_batches(name, rank, world_size, micro, steps * accum))
    losses, norms, traffic = [], [], []
    for _ in range(steps):
        before = len(engine.records().collectives)
        for _ in range(accum):
            loss = engine(*to_dtype(next(stream), dtype))
            engine.backward(loss)
            engine.step()
        losses.append(mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())
        traffic.append(moved(engine.records().collectives[before:]))
    buckets = engine.sharding.buckets
    return {
        "losses": losses,
        "norms": norms,
        "params": full_params(engine),
        "state_bytes": engine.state_bytes(),
        "traffic": traffic,
        "layout": [[slot.name for slot in b.slots] for b in buckets if b.trainable],
        "counts": counts(engine),
    }


def mean_over_ranks(loss):
    """fp64 mean in rank order."""
    own = loss.detach().double().reshape(1)
    everyone = own.new_empty(comm.get_world_size())
    comm.all_gather(everyone, own, purpose="control")
    return sum(everyone.tolist()) / len(everyone)


def moved(events):
    """Elements by collective, control traffic left out."""
    total = {}
    for event in events:
        if event.purpose == "data":
            total[event.op] = total.get(event.op, 0) + event.elements
    return total


def counts(engine):
    """Padded elements, frozen ones, own real elements and segments."""
    trainable = engine.sharding.trainable
    return {
        "padded": sum(b.padded_numel for b in trainable),
        "frozen": sum(b.padded_numel for b in engine.sharding.buckets if not b.trainable),
        "own": sum(s.param.numel() for b in trainable for s in b.segments),
        "segments": sum(len(b.segments) for b in trainable),
        "idle": sum(
            s.param.numel()
            for b in trainable
            for s in b.segments
            if b.slots[s.slot].name.startswith("never")
        ),
        "idle_segments": sum(
            b.slots[s.slot].name.startswith("never") for b in trainable for s in b.segments
        ),
    }
