"""Chapter 4: runs of a small model whose evidence the checks of the stage chapters read.

Owns two models: `Small`, 70 elements in six tensors that no world size divides, one layer of it
unused, cut into three buckets; and `Deep`, six layers of 42, a bucket each. `run` trains one with
the engine on all ranks and hands back what every rank showed: weights, bytes held by kind, the
collectives of the last step. `alone` is plain torch in one process on the batches of all ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, ddp, device, engine
from ...records import CollectiveEvent, MemoryEvent
from .. import evidence
from ..outcome import Wrong

STEPS = 3
TOLERANCE = 1e-5
BUCKET_NUMELS = (28, 7, 35)  # of Small's three buckets, in the order in which they are reduced
BUCKET_LIMIT = 30
NUMEL = sum(BUCKET_NUMELS)
DEEP_LAYERS, DEEP_WIDTH, DEEP_NUMEL = 6, 6, 42  # of Deep: layers, width, elements a layer
ADAMW: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
WIDE: dict[str, Any] = {
    "communication_data_type": "bf16",
    "data_types": {"grad_accum_dtype": "fp32"},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. What is left out is the engine's default."""

    stage: int
    world_size: int
    dtype: str = "fp32"
    accum_steps: int = 1
    optimizer: str = "AdamW"
    clipping: float = 0.0
    reduce_scatter: bool = True
    op: str = "mean"  # or "sum", over the ranks
    reduce: str = ""  # "boundary" or "micro_step"; "" for the stage's own
    deep: bool = False
    wide: bool = False  # with bf16: gradients travel in it and are kept in fp32

    def config(self) -> dict[str, Any]:
        """Return the ds_config.json."""
        params = dict(ADAMW if self.optimizer == "AdamW" else SGD)
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accum_steps,
            "gradient_clipping": self.clipping,
            "gradient_allreduce_op": self.op,
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": DEEP_NUMEL if self.deep else BUCKET_LIMIT,
                "reduce_scatter": self.reduce_scatter,
            },
            **({"zerolab": {"reduce": self.reduce}} if self.reduce else {}),
            **(dict(WIDE) if self.wide else {}),
        }

    def model(self) -> nn.Module:
        """Return the model, the same numbers each time."""
        torch.manual_seed(11)
        return Deep() if self.deep else Small()

    def batch(self, rank: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets [4, ...] of one rank."""
        sizes = (DEEP_WIDTH, DEEP_WIDTH) if self.deep else (5, 3)
        luck = torch.Generator().manual_seed(1000 + 100 * micro_step + rank)
        inputs, targets = (torch.randn(4, size, generator=luck) for size in sizes)
        return inputs, targets


@dataclass(slots=True)
class Shown:
    """What one rank showed."""

    rank: int
    weights: torch.Tensor  # [numel]
    ready: dict[str, int]  # bytes by kind when the last gradients were reduced
    ended: dict[str, int]  # bytes by kind after the last step
    most: dict[str, int]  # the most bytes of each kind within the last step
    events: list[CollectiveEvent]  # of the last step, control traffic left out
    states: dict[str, str]  # of every bucket after the last step
    losses: list[float] = field(default_factory=list)

    def moved(self) -> dict[str, int]:
        """Return the elements that the last step moved, by collective."""
        total: dict[str, int] = {}
        for event in self.events:
            total[event.op] = total.get(event.op, 0) + event.elements
        return total


class Small(nn.Module):
    """Two layers and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.never = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [batch, 3]."""
        return self.second(torch.tanh(self.first(inputs)))


class Deep(nn.Sequential):
    """Six layers of one size, all of them used."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(DEEP_LAYERS):
            self.add_module(f"layer{number}", nn.Linear(DEEP_WIDTH, DEEP_WIDTH))


def run(plan: Plan) -> list[Shown]:
    """Train with the engine; return what every rank showed, in rank order."""
    return evidence.run(_train, plan.world_size, plan)


@cache
def stage_0(world_size: int, dtype: str) -> list[Shown]:
    """Return what stage 0 showed: the reference to the last bit of what does not change it."""
    return run(Plan(0, world_size, dtype))


def _train(plan: Plan) -> Shown:
    model, dtype = plan.model().to(evidence.home()), DTYPES[plan.dtype]
    trainer, *_ = engine.initialize(model=model, config=plan.config())
    records = comm.records()
    first_call = first_block = 0
    losses = []
    for micro_step in range(STEPS * plan.accum_steps):
        if micro_step % plan.accum_steps == 0:
            first_call, first_block = len(records.collectives), len(records.memory)
        with device.paused():
            inputs, targets = plan.batch(comm.get_rank(), micro_step)
            inputs, targets = inputs.to(evidence.home(), dtype), targets.to(evidence.home(), dtype)
        loss = trainer.backward(F.mse_loss(trainer(inputs), targets))
        losses.append(float(loss.detach()))
        del loss
        trainer.step()
    marks = {mark.name: mark.by_kind for mark in records.marks}
    calls = [e for e in records.collectives[first_call:] if e.purpose == "data"]
    most = most_by_kind(records.memory, first_block)
    weights = evidence.trained_weights(trainer)
    trainer.close()
    return Shown(
        comm.get_rank(),
        weights,
        dict(marks["grads_ready"]),
        dict(marks["step_end"]),
        most,
        calls,
        states_of(trainer.sharding),
        losses,
    )


def states_of(stage: ddp.DDP) -> dict[str, str]:
    """Return the state of every bucket in a word."""
    return {one.name: str(getattr(one.state, "value", one.state)) for one in stage.trainable}


def most_by_kind(events: Sequence[MemoryEvent], first: int) -> dict[str, int]:
    """Return the most bytes of each kind that were held at once, from event `first` on."""
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for number, event in enumerate(events):
        now[event.kind] = now.get(event.kind, 0) + event.delta
        if number >= first:
            most[event.kind] = max(most.get(event.kind, 0), now[event.kind])
    return most


@cache
def alone(plan: Plan) -> torch.Tensor:
    """Train in one process with torch alone, on the batches of all ranks; returns the weights."""
    model = plan.model()
    optimizer = (
        torch.optim.AdamW(model.parameters(), **ADAMW)
        if plan.optimizer == "AdamW"
        else torch.optim.SGD(model.parameters(), **SGD)
    )
    for step in range(STEPS):
        micro_steps = range(step * plan.accum_steps, (step + 1) * plan.accum_steps)
        pairs = [
            plan.batch(rank, micro) for micro in micro_steps for rank in range(plan.world_size)
        ]
        optimizer.zero_grad()
        losses = [F.mse_loss(model(inputs), targets) for inputs, targets in pairs]
        (torch.stack(losses).mean() * (plan.world_size if plan.op == "sum" else 1)).backward()
        if plan.clipping:
            used = [param for param in model.parameters() if param.grad is not None]
            nn.utils.clip_grad_norm_(used, plan.clipping)
        optimizer.step()
    return evidence.weights_of(model)


def padded(world_size: int, *, deep: bool = False) -> int:
    """Return the elements of all buckets with padding, counted up."""
    numels = (DEEP_NUMEL,) * DEEP_LAYERS if deep else BUCKET_NUMELS
    return sum(len(range(0, numel, world_size)) * world_size for numel in numels)


# What several checks ask of such a run.


def same_weights(plan: Plan, ranks: Iterable[Shown], call: str) -> str:
    """Compare the weights of every rank with those of one process."""
    what = f"{describe(plan)}: after {STEPS} steps"
    shown = (rank.weights for rank in ranks)
    return evidence.same_weights(what, shown, alone(plan), TOLERANCE, call)


def same_on_all_ranks(plan: Plan, ranks: Sequence[Shown], call: str) -> None:
    """Compare the weights of the ranks with each other."""
    for shown in ranks[1:]:
        different = int((shown.weights != ranks[0].weights).sum())
        if different:
            raise Wrong(
                f"{describe(plan)}: {different} of {len(shown.weights)} weights of rank "
                f"{shown.rank} are not those of rank 0. What one rank has updated, the others "
                "must hear of.",
                expected="the same weights on all ranks",
                observed=f"{different} differ",
                rank=shown.rank,
                call=call,
            )


def same_bits(plan: Plan, ranks: Iterable[Shown], others: Iterable[Shown], call: str) -> None:
    """Compare the weights of two runs to the last bit."""
    for shown, other in zip(ranks, others, strict=True):
        loose = TOLERANCE if evidence.chosen_world() == "nccl" else 0.0  # its sums have no order
        different = int(((shown.weights - other.weights).abs() > loose).sum())
        if different:
            raise Wrong(
                f"{describe(plan)}: {different} of {len(other.weights)} weights differ in their "
                "last bits from those of stage 0.",
                expected="the same bits",
                observed=f"{different} differ",
                rank=shown.rank,
                call=call,
            )


def same_traffic(plan: Plan, ranks: Iterable[Shown], expected: dict[str, int], call: str) -> None:
    """Compare the elements that the last step moved with numbers."""
    for shown in ranks:
        if shown.moved() != expected:
            raise Wrong(
                f"{describe(plan)}: a step moves {_words(shown.moved())}, for {len(shown.weights)} "
                "elements.",
                expected=_words(expected),
                observed=_words(shown.moved()),
                rank=shown.rank,
                call=call,
            )


def describe(plan: Plan) -> str:
    """Say in a few words what was run."""
    more = [
        plan.dtype if plan.dtype != "fp32" else "",
        plan.optimizer if plan.optimizer != "AdamW" else "",
        f"{plan.accum_steps} micro-steps" if plan.accum_steps > 1 else "",
        "clipping" if plan.clipping else "",
        "gradients added up" if plan.op == "sum" else "",
        "reduce_scatter false" if not plan.reduce_scatter else "",
        "gradients kept in fp32" if plan.wide else "",
    ]
    said = ", ".join(["", *filter(None, more)])
    return f"Stage {plan.stage} on {plan.world_size} ranks{said}"


def _words(moved: dict[str, int]) -> str:
    return ", ".join(f"{op} {elements}" for op, elements in moved.items()) or "nothing"
