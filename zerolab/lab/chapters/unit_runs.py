"""Chapter 6: runs of a small model by units, whose evidence the checks of the chapter read.

Owns models that no world size divides. `Stack` has a root of 24 elements, with a weight that
is used at both ends, and five blocks of 20; `Tied` shares a weight between two of its blocks; the
blocks of `Deep` have two layers each, and may be recomputed in backward.
`run` trains one with the engine and hands back what every rank showed; the *story* of a step is
the order in which units came (+) and went (-), read from the memory that appeared and went.
`alone` is plain torch in one process on the batches of all ranks: the reference.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ... import comm, ddp, device, engine, gathering, unit_sharding
from ...bucket import Unit
from ...records import CollectiveEvent, Records
from ...turns import ShardState
from .. import evidence
from ..outcome import Wrong

STEPS = 2  # the second one knows who follows whom
TOLERANCE = 1e-5
ADAMW = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ROOT, BLOCK, NUM_BLOCKS = 24, 20, 5  # elements of Stack's units
BLOCKS = tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))


class Stack(nn.Module):
    """A layer whose weight is used again at the end, and five blocks in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_BLOCKS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [batch, 5]."""
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden @ self.first.weight


class Tied(nn.Module):
    """Three blocks of which the first and the last share their weight, but not their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [batch, 5]."""
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return inputs


class Deep(nn.Module):
    """Three blocks of two layers: in backward, one layer's gradients come before the other's."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        layers = (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(3))
        self.blocks = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [batch, 5]."""
        for block in self.blocks:
            if self.recompute:
                inputs = checkpoint(block, inputs, use_reentrant=False)
            else:
                inputs = block(inputs)
        return inputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "tied": Tied,
    "deep": Deep,
    "recomputed": partial(Deep, recompute=True),
}
SAID_OF = {
    "tied": "a weight in two blocks",
    "deep": "blocks of two layers",
    "recomputed": "blocks that run again in backward",
}
DEEP_BLOCK = 5 * 6 + 6 + 6 * 5 + 5  # elements


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. What is left out is the engine's default."""

    stage: int
    world_size: int
    model: str = "stack"
    accum_steps: int = 1
    prefetch: bool = True
    prefetch_numel: int | None = None
    zero: tuple[tuple[str, int], ...] = ()  # more keys of "zero_optimization"

    def config(self) -> dict[str, Any]:
        """Return the ds_config.json."""
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 1000, **dict(self.zero)}
        if self.prefetch_numel is not None:
            zero["stage3_prefetch_bucket_size"] = self.prefetch_numel
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accum_steps,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "zero_optimization": zero,
            "zerolab": {"prefetch": self.prefetch},
        }


@dataclass(slots=True)
class Shown:
    """What one rank showed; all but weights and losses of the last step."""

    rank: int
    weights: torch.Tensor  # whole, in the order of `named_parameters`
    ready: dict[str, int]  # bytes by kind when the gradients were reduced
    ended: dict[str, int]  # bytes by kind after the step
    most_gathered: int  # bytes of full parameters, at most
    moved: dict[str, int]  # elements by collective, control traffic left out
    gathers: tuple[str, ...]  # units, in the order in which their gathers were started
    story: tuple[str, ...]  # "+blocks.0", "-blocks.0", ...
    published: tuple[str, ...]  # units that were gathered after the optimizer had stepped
    blocking: tuple[str, ...]  # and of these, those that were waited for at once
    hasty: tuple[tuple[str, str], ...]  # (way, unit): waited for while the one before computed
    rash: tuple[str, ...]  # units that were freed before their last gradient was sent
    left: tuple[str, ...]  # units that were whole when the last gradient had come
    losses: list[float] = field(default_factory=list)


def make_model(name: str) -> nn.Module:
    """Return a model, the same numbers each time."""
    torch.manual_seed(11)
    return MODELS[name]()


def batch(rank: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 5] and targets [4, 5] of one rank."""
    luck = torch.Generator().manual_seed(1000 + 100 * micro_step + rank)
    return torch.randn(4, 5, generator=luck), torch.randn(4, 5, generator=luck)


def run(plan: Plan) -> list[Shown]:
    """Train with the engine on ranks of the check's world; return what every rank showed."""
    return evidence.run(_train, plan.world_size, plan)


@cache
def stage_0(world_size: int) -> list[Shown]:
    """Return what stage 0 showed: the reference to the last bit of what does not change it."""
    return run(Plan(0, world_size))


def left_behind(world_size: int) -> str:
    """Say in a line what stage 3 leaves behind on so many lockstep ranks: for bug hunts."""
    ranks = evidence.run(_train, world_size, Plan(3, world_size), world="lockstep")
    steps = zip(*(rank.losses for rank in ranks), strict=True)
    losses = ", ".join(f"{sum(step) / world_size:.5f}" for step in steps)
    most = max(rank.most_gathered for rank in ranks)
    return (
        f"whole parameters {most} bytes; elements moved: {words(ranks[0].moved)}; losses {losses}"
    )


def _train(plan: Plan) -> Shown:
    model = make_model(plan.model).to(evidence.home())
    trainer, *_ = engine.initialize(model=model, config=plan.config())
    records = comm.records()
    first_call = first_event = 0
    losses = []
    left = _whole_at_the_end(trainer.sharding)
    for micro_step in range(STEPS * plan.accum_steps):
        if micro_step % plan.accum_steps == 0:
            first_call, first_event = len(records.collectives), len(records.memory)
        inputs, targets = (t.to(evidence.home()) for t in batch(comm.get_rank(), micro_step))
        loss = trainer.backward(F.mse_loss(trainer(inputs), targets))
        losses.append(float(loss.detach()))
        del loss
        trainer.step()
    told = Story.of(records, first_call, first_event)
    marks = {mark.name: mark.by_kind for mark in records.marks}
    weights = whole_weights(trainer)
    trainer.close()
    return Shown(
        comm.get_rank(),
        weights,
        dict(marks["grads_ready"]),
        dict(marks["step_end"]),
        told.most,
        moved(records, first_call),
        told.gathers,
        told.events,
        told.published,
        told.blocking,
        told.hasty,
        told.rash,
        left[-1],
        losses,
    )


def _whole_at_the_end(stage: ddp.DDP) -> list[tuple[str, ...]]:
    """Return a list that gets, for every backward, the units that its last gradient left whole.

    `finish_backward` is called when autograd has ended, and frees whatever there still is.
    """
    found: list[tuple[str, ...]] = []
    finish, stage_ref = type(stage).finish_backward, weakref.ref(stage)

    def finish_backward() -> None:
        stage = stage_ref()
        assert stage is not None
        states = stage.turns if isinstance(stage, unit_sharding.UnitSharding) else {}
        whole = [unit for unit, turn in states.items() if turn.state is ShardState.UNSHARDED]
        found.append(tuple(unit.name for unit in whole))
        finish(stage)

    stage.finish_backward = finish_backward
    return found


def stale_in_a_held_block(world_size: int) -> list[tuple[bool, float]]:
    """Take a whole step while somebody holds the parameters; return two facts for every rank.

    Whether they could still be read after forward, and how far what was read after the step is
    off the new slices of all ranks.
    """
    return evidence.run(_hold, world_size)


def _hold() -> tuple[bool, float]:
    model = make_model("deep").to(evidence.home())
    trainer, *_ = engine.initialize(model=model, config=Plan(3, comm.get_world_size()).config())
    inputs, targets = (t.to(evidence.home()) for t in batch(comm.get_rank(), 0))
    with gathering.GatheredParameters(model.parameters()):
        loss = F.mse_loss(trainer(inputs), targets)
        readable = not bool(evidence.weights_of(model).isnan().any())
        trainer.backward(loss)
        trainer.step()
        read = evidence.weights_of(model)
    apart = (read - whole_weights(trainer)).abs().max().item()
    trainer.close()
    return readable, apart


def whole_weights(trainer: engine.Engine) -> torch.Tensor:
    """Put the shards of all ranks together, without asking the stage for anything."""
    found: dict[str, torch.Tensor] = {}
    for bucket in trainer.sharding.buckets:
        whole = bucket.shard.new_empty(bucket.padded_numel)
        comm.all_gather(whole, bucket.shard.clone(), purpose="control")
        for slot in bucket.slots:
            found[slot.name] = whole[slot.offset : slot.offset + slot.numel].cpu()
    return torch.cat([found[name] for name, _ in trainer.module.named_parameters()])


def moved(records: Records, first_call: int) -> dict[str, int]:
    """Return the elements that collectives carried from a call on, control traffic left out."""
    total: dict[str, int] = {}
    for event in records.collectives[first_call:]:
        if event.purpose == "data":
            total[event.op] = total.get(event.op, 0) + event.elements
    return total


@dataclass(frozen=True, slots=True)
class Story:
    """Who was whole when, within a stretch of a run."""

    events: tuple[str, ...]  # "+blocks.0", "-blocks.0", ...
    gathers: tuple[str, ...]  # units, in the order of their gathers
    published: tuple[str, ...]  # those of them that were started in the phase "step"
    most: int  # bytes of full parameters, at most
    blocking: tuple[str, ...]  # those of them that were waited for where they were started
    hasty: tuple[tuple[str, str], ...]  # (way, unit): gathered before the block before had gone
    rash: tuple[str, ...]  # units that went before their last gradient was sent

    @classmethod
    def of(cls, records: Records, first_call: int = 0, first_event: int = 0) -> "Story":
        """Read it from a rank's records.

        Memory of the kind "gathered" appears right before the gather that fills it, so the
        gathers' labels say whose it is.
        """
        data = [e for e in records.collectives[first_call:] if e.purpose == "data"]
        calls = [e for e in data if e.op == "all_gather"]
        gathers = tuple(unit_of(e.label) for e in calls)
        in_step = [e for e in calls if e.phase == "step"]
        published = tuple(unit_of(e.label) for e in in_step)
        blocking = tuple(unit_of(e.label) for e in in_step if not e.asynchronous)
        names = iter(gathers)
        name_of: dict[int, str] = {}
        gone: list[tuple[float, str]] = []
        events, held, most = [], 0, 0
        for number, event in enumerate(records.memory):
            if event.kind != "gathered":
                continue
            held += event.delta
            if number < first_event or event.phase == "init":
                continue
            most = max(most, held)
            if event.delta > 0:
                name_of[event.block] = next(names, "?")
            else:
                gone.append((event.time, name_of.get(event.block, "?")))
            sign = "+" if event.delta > 0 else "-"
            events.append(sign + name_of.get(event.block, "?"))
        rash = _rash(data, gone)
        hasty = (*_hasty(calls, gone, "forward"), *_hasty(calls, gone, "backward"))
        return cls(tuple(events), gathers, published, most, blocking, hasty, rash)


def _hasty(
    calls: Sequence[CollectiveEvent], gone: Sequence[tuple[float, str]], way: str
) -> list[tuple[str, str]]:
    """Return the units of a way whose gather had ended before the block before them was freed."""
    found = []
    for one, two in pairwise(call for call in calls if call.phase == way):
        left = [at for at, name in gone if name == unit_of(one.label) and at > one.time]
        if unit_of(one.label) != "root" and left and two.ended < left[0]:
            found.append((way, unit_of(two.label)))
    return found


def _rash(data: Sequence[CollectiveEvent], gone: Sequence[tuple[float, str]]) -> tuple[str, ...]:
    """Return the units that were freed for the last time before their last reduction began."""
    sent = {unit_of(call.label): call.time for call in data if call.op != "all_gather"}
    freed = {name: at for at, name in gone}  # the last time counts
    return tuple(name for name, at in sent.items() if freed.get(name, at) < at)


def unit_of(label: str) -> str:
    """Return the unit of a bucket's name: "blocks.0" of "blocks.0/0"."""
    return label.rpartition("/")[0]


@cache
def alone(plan: Plan) -> torch.Tensor:
    """Train in one process with torch alone, on the batches of all ranks; returns the weights."""
    model = make_model(plan.model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        micro_steps = range(step * plan.accum_steps, (step + 1) * plan.accum_steps)
        pairs = [batch(rank, micro) for micro in micro_steps for rank in range(plan.world_size)]
        losses = [F.mse_loss(model(inputs), targets) for inputs, targets in pairs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return evidence.weights_of(model)


def padded(numel: int, world_size: int) -> int:
    """Return a length with padding, counted up."""
    return len(range(0, numel, world_size)) * world_size


def stack_numel(world_size: int) -> int:
    """Return the elements of all of Stack's units with padding."""
    return padded(ROOT, world_size) + NUM_BLOCKS * padded(BLOCK, world_size)


# What several checks ask of such a run.


def same_weights(plan: Plan, ranks: Iterable[Shown], call: str) -> str:
    """Compare the weights of every rank with those of one process."""
    what = f"{describe(plan)}: after {STEPS} steps"
    shown = (rank.weights for rank in ranks)
    return evidence.same_weights(what, shown, alone(plan), TOLERANCE, call)


def same_traffic(plan: Plan, ranks: Iterable[Shown], expected: dict[str, int], call: str) -> None:
    """Compare the elements that the last step moved with numbers."""
    for shown in ranks:
        if shown.moved != expected:
            raise Wrong(
                f"{describe(plan)}: a step moves {words(shown.moved)}.",
                expected=words(expected),
                observed=words(shown.moved),
                rank=shown.rank,
                call=call,
            )


def describe(plan: Plan) -> str:
    """Say in a few words what was run."""
    more = [
        SAID_OF.get(plan.model, ""),
        f"{plan.accum_steps} micro-steps" if plan.accum_steps > 1 else "",
        "no prefetch" if not plan.prefetch else "",
        f"prefetch of {plan.prefetch_numel}" if plan.prefetch_numel is not None else "",
        *(f"{key.removeprefix('stage3_')} {value:g}" for key, value in plan.zero),
    ]
    said = ", ".join(["", *filter(None, more)])
    return f"stage {plan.stage} on {plan.world_size} ranks{said}"


def words(moved: dict[str, int]) -> str:
    """Say what was moved."""
    return ", ".join(f"{op} {elements}" for op, elements in sorted(moved.items())) or "nothing"


# One unit by itself, for the checks of what works on buckets.


@dataclass(slots=True)
class Bench:
    """A stage 3 that nobody has used yet, on the calling rank: its units are sharded."""

    trainer: engine.Engine
    gpu: device.VirtualGPU

    @property
    def stage(self) -> unit_sharding.UnitSharding:
        """The stage."""
        assert isinstance(self.trainer.sharding, unit_sharding.UnitSharding)
        return self.trainer.sharding

    @property
    def units(self) -> Sequence[Unit]:
        """Root first, then the blocks."""
        return self.stage.units

    def gathered(self) -> int:
        """Return the bytes of full parameters now."""
        return self.gpu.by_kind().get("gathered", 0)


def bench(model: str = "stack", bucket_numel: int = 1000, persistent: int = 0) -> Bench:
    """Return a fresh stage 3 on the calling rank.

    Args:
        model: a name in `MODELS`.
        bucket_numel: the most elements of a bucket.
        persistent: parameters of fewer elements stay whole.
    """
    keys = {"reduce_bucket_size": bucket_numel, "stage3_param_persistence_threshold": persistent}
    plan = Plan(3, 1, model, zero=tuple(keys.items()))
    trainer, *_ = engine.initialize(
        model=make_model(model).to(evidence.home()), config=plan.config()
    )
    gpu = device.current()
    assert gpu is not None
    return Bench(trainer, gpu)
