"""Chapter 3: runs to look at: a model whose gradients come in another order on another rank.

Owns two models and what their ranks write down. `watch` trains the first with the engine: five
layers of 20 elements, one bucket each, of which odd ranks visit two in the other order and one
belongs to rank 1 alone. `share` trains the second with a function that needs no engine, and
looks at it from inside backward. `alone` and `share_alone` are plain torch in one process.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ... import comm, ddp, device, engine, precision
from ...bucket import Bucket, GradState
from ...errors import DeadlockError
from ...two_layers import data_parallel
from .. import evidence, training
from ..outcome import Wrong

WORLD_SIZE = 3  # which does not divide the 20 elements of a layer
WIDTH, LAYER, PADDED = 4, 20, 21
NUM_LAYERS, STEPS, SAMPLES = 5, 3, 4
TOLERANCE = 1e-5
OPTIMIZER = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Grads = dict[str, torch.Tensor | None]


class Crossing(nn.Module):
    """Five layers; ranks part in the middle and meet again."""

    rare: nn.Module
    first: nn.Module
    left: nn.Module
    right: nn.Module
    last: nn.Module

    def __init__(self, *, reuse: bool, rare_last: bool = False) -> None:
        """Make the layers, the same each time.

        `reuse`: nobody parts, but rank 1 comes to the left layer a second time. `rare_last`: the
        layer of rank 1 alone is the last of the model, whose bucket is the first to be sent.
        """
        super().__init__()
        torch.manual_seed(11)
        self.reuse = reuse
        names = ["rare", "first", "left", "right", "last"]
        for name in [*names[1:], names[0]] if rare_last else names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor, rank: int) -> torch.Tensor:
        """Return [samples, width] as `rank` computes it."""
        hidden = torch.tanh(self.first(inputs))
        crossed = rank % 2 == 1 and not self.reuse
        for layer in (self.right, self.left) if crossed else (self.left, self.right):
            hidden = torch.tanh(layer(hidden))
        if rank == 1:
            if self.reuse:  # a backward of its own inside backward: its gradients come separately
                hidden = checkpoint(self.left, hidden, use_reentrant=True)
            hidden = hidden + torch.tanh(self.rare(hidden))
        return self.last(hidden)


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets [samples, width] of a rank's micro-batch."""
    luck = torch.Generator().manual_seed(1000 * number + rank)
    inputs = torch.randn(SAMPLES, WIDTH, generator=luck)
    return inputs, torch.randn(SAMPLES, WIDTH, generator=luck)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train it."""

    accum: int = 1
    reduce: str = "boundary"  # or "micro_step"
    reuse: bool = False
    dtype: str = "fp32"  # in bf16, gradients wait in fp32
    travel: str | None = None  # dtype of the collectives; None: the one they wait in
    limit: int = LAYER
    rare_last: bool = False

    def model(self) -> Crossing:
        """Return the model, the same numbers each time."""
        return Crossing(reuse=self.reuse, rare_last=self.rare_last)

    def config(self) -> dict[str, Any]:
        """Return the ds_config.json of the run."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.accum,
            "zero_optimization": {"stage": 0, "reduce_bucket_size": self.limit},
            "zerolab": {"reduce": self.reduce},
            "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        }
        if self.dtype == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        if self.travel is not None:
            config["communication_data_type"] = self.travel
        return config


@dataclass(frozen=True, slots=True)
class Astray:
    """A bucket whose state was not what it must be, right after one of its gradients."""

    bucket: str
    expected: str
    found: str


@dataclass(slots=True)
class Step:
    """What one rank showed in one step, after its last backward and before the update."""

    grads: Grads = field(default_factory=dict)  # means over ranks; None: was never reduced
    left: tuple[str, ...] = ()  # parameters that still have a `.grad` of their own
    loose: tuple[str, ...] = ()  # what buckets still hold of a collective
    sent: dict[str, int] = field(default_factory=dict)  # when a layer's first gradient came ...
    under_way: dict[str, int] = field(default_factory=dict)  # ... so many buckets were
    waited: int = 0  # reductions that had ended before the next one was sent
    in_backward: int = 0  # buckets that had been sent when the last gradient had come
    order: tuple[str, ...] = ()  # buckets as they were reduced
    sizes: tuple[int, ...] = ()  # elements of each of these
    moved: int = 0
    held: dict[str, int] = field(default_factory=dict)  # bytes by kind
    waiting: int = 0  # bytes of gradients after the first of two micro-steps
    states: dict[str, str] = field(default_factory=dict)  # of the buckets
    astray: tuple[Astray, ...] = ()  # buckets whose state was wrong when a gradient had been taken


def hunted(world_size: int) -> str:
    """Return what a bug hunt shows of a run: two steps of two micro-steps, as rank 0 saw them."""
    case = Case(accum=2)
    ranks = evidence.run(_watched, world_size, case, world="lockstep")
    steps = ranks[0][:2]
    lengths = ", ".join(f"{_length(step.grads):.4f}" for step in steps)
    right = ", ".join(f"{_length(grads):.4f}" for grads in alone(case, world_size)[:2])
    sent = max(steps[0].sent.values())
    return (
        f"{steps[1].moved} elements moved in step 1; {steps[1].held['grad']} bytes of gradients; "
        f"{sent} buckets sent before the last layer's turn; "
        f"lengths of the mean gradient {lengths} (plain torch: {right})"
    )


def _length(grads: Mapping[str, torch.Tensor | None]) -> float:
    parts = [grad.double().reshape(-1) for grad in grads.values() if grad is not None]
    return float(torch.cat(parts).norm())


def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on the ranks of this check; ranks that wait for each other are a verdict."""
    try:
        return evidence.run(fn, WORLD_SIZE, *args)
    except DeadlockError as error:
        raise Wrong(
            f"The ranks do not call the same collectives in the same order: {_told(error)}.",
            expected="the same row of collectives on every rank",
            observed=str(error),
        ) from None


def _told(error: DeadlockError) -> str:
    """Say which calls do not match, or who is missing: the first line, without its first word."""
    return str(error).splitlines()[0].partition(": ")[2]


def watch(case: Case) -> list[list[Step]]:
    """Train with the engine; return what every rank showed in every step."""
    return on_ranks(_watched, case)


def _watched(case: Case) -> list[Step]:
    rank, steps, home = comm.get_rank(), [], evidence.home()
    model = case.model().to(home)
    log = _Log(model)
    trainer, *_ = engine.initialize(model=model, config=case.config())
    log.follow(trainer.sharding)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    for number in range(STEPS):
        first_call, waiting = len(comm.records().collectives), 0
        for micro in range(case.accum):
            log.begin()
            inputs, targets = batch(rank, number * case.accum + micro)
            outputs = trainer(inputs.to(home, dtype), rank)
            trainer.backward(F.mse_loss(outputs, targets.to(home, dtype)))
            if micro < case.accum - 1:
                waiting = _held_as("grad")
                trainer.step()
        late = precision.late_anywhere(trainer.sharding.trainable)
        if late:
            trainer.sharding.send_again(late)
            _sent_again(late)
        steps.append(_look(trainer, log, first_call))
        steps[-1].waiting, steps[-1].astray = waiting, tuple(log.astray)
        steps[-1].in_backward = log.in_backward
        if None in steps[-1].grads.values():
            break
        trainer.step()
    log.close()
    trainer.close()
    return steps


class _Log:
    """Counts, at the first gradient of each layer, what has been sent so far."""

    def __init__(self, model: nn.Module) -> None:
        """Hook every parameter, before the engine does."""
        self.stage: Any = None
        self.before = self.in_backward = 0
        self.sent: dict[str, int] = {}
        self.under_way: dict[str, int] = {}
        self.astray: list[Astray] = []
        self.hooks = []
        self.model = model
        for name, param in model.named_parameters():
            layer = name.partition(".")[0]
            hook = param.register_post_accumulate_grad_hook(lambda _, at=layer: self.note(at))
            self.hooks.append(hook)

    def follow(self, stage: ddp.DDP) -> None:
        """Hook every parameter once more, after the engine did: to see what it made of it."""
        self.stage = stage
        for bucket in stage.trainable:
            for slot in bucket.slots:
                hook = slot.param.register_post_accumulate_grad_hook(partial(self.taken, bucket))
                self.hooks.append(hook)
        finish, stage_ref = type(stage).finish_backward, weakref.ref(stage)

        def finish_backward() -> None:
            self.in_backward = num_reductions() - self.before
            stage = stage_ref()
            assert stage is not None
            finish(stage)

        stage.finish_backward = finish_backward

    def begin(self) -> None:
        """Begin a micro-step."""
        self.before = num_reductions()
        self.sent, self.under_way = {}, {}

    def note(self, layer: str) -> None:
        """A gradient of this layer is there, and the engine has not seen it yet."""
        self.sent.setdefault(layer, num_reductions() - self.before)
        self.under_way.setdefault(layer, len(self.stage.in_flight))

    def taken(self, bucket: Bucket, _: torch.Tensor) -> None:
        """Compare the state of a bucket that has just got a gradient with what it does."""
        flying = any(other is bucket for other in self.stage.in_flight)
        expected = GradState.IN_FLIGHT if flying else GradState.FILLING
        if bucket.state is not expected and bucket.fresh is not None:
            self.astray.append(Astray(bucket.name, expected.value, state_of(bucket)))

    def close(self) -> None:
        """Take the hooks out again."""
        for hook in self.hooks:
            hook.remove()


def state_of(bucket: Bucket) -> str:
    """Return a bucket's state in a word."""
    return str(getattr(bucket.state, "value", bucket.state))


def _sent_again(buckets: Sequence[Bucket]) -> None:
    """Buckets that were late are at home now; the engine would ask for a third round for ever."""
    for bucket in buckets:
        if bucket.state is GradState.FILLING:
            raise Wrong(
                f"Bucket {bucket.name} was sent once more for a late gradient, its mean is here, "
                "and it is filling: it would be sent for ever. Without gradients in `fresh` it is "
                "reduced.",
                expected=GradState.REDUCED.value,
                observed=state_of(bucket),
                rank=comm.get_rank(),
            )


def num_reductions() -> int:
    """Return how many reductions of gradients this rank has started."""
    events = comm.records().collectives
    return sum(event.op == "all_reduce" and event.purpose == "data" for event in events)


def _held_as(kind: str) -> int:
    gpu = device.current()
    return 0 if gpu is None else gpu.by_kind().get(kind, 0)


def _held_by(bucket: Bucket) -> str:
    """Name what a bucket still holds of its collective."""
    parts = [part for part in ("work", "incoming") if getattr(bucket, part) is not None]
    return f"{' and '.join(parts)} of {bucket.name}" if parts else ""


def _look(trainer: engine.Engine, log: _Log, first_call: int) -> Step:
    """Write down what the rank holds and did."""
    grads: Grads = {}
    for bucket in trainer.sharding.trainable:
        for slot in bucket.slots:
            span = slice(slot.offset, slot.offset + slot.numel)
            mean = bucket.reduced
            grads[slot.name] = None if mean is None else mean[span].view(slot.shape).clone()
    gpu = device.current()
    calls = [e for e in comm.records().collectives[first_call:] if e.purpose == "data"]
    held = {} if gpu is None else gpu.by_kind()
    return Step(
        grads,
        tuple(n for n, param in trainer.module.named_parameters() if param.grad is not None),
        tuple(_held_by(bucket) for bucket in trainer.sharding.trainable if _held_by(bucket)),
        log.sent,
        log.under_way,
        sum(one.ended < two.time for one, two in pairwise(calls)),
        0,
        tuple(event.label for event in calls),
        tuple(event.elements for event in calls),
        training.elements_moved(comm.records(), first_call),
        {kind: held.get(kind, 0) for kind in ("grad", "bucket")},
        states={bucket.name: state_of(bucket) for bucket in trainer.sharding.trainable},
    )


@cache
def alone(case: Case, world_size: int = WORLD_SIZE) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of every step, from one process with all ranks' batches."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    steps = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.accum):
            for rank in range(world_size):
                inputs, targets = batch(rank, number * case.accum + micro)
                loss = F.mse_loss(model(inputs, rank), targets)
                (loss / (world_size * case.accum)).backward()
        named = model.named_parameters()
        steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        optimizer.step()
    return steps


# Two layers, without an engine.


class Marker(torch.autograd.Function):
    """The first operation of forward, so the last of backward: all gradients are there then."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, anchor: torch.Tensor, look: Any) -> torch.Tensor:
        """Pass the inputs on."""
        ctx.look = look
        return inputs + 0 * anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        """Look, while backward still runs."""
        ctx.look()
        return None, None, None


@dataclass(slots=True)
class Shared:
    """What one rank showed."""

    weights: list[torch.Tensor] = field(default_factory=list)  # [Psi] after each step
    calls: list[int] = field(default_factory=list)  # all-reduces of each step
    moved: list[int] = field(default_factory=list)
    others: tuple[str, ...] = ()  # what else was called in a step after the first
    early: list[int] = field(default_factory=list)  # of these, before backward was over
    bytes_more: int = 0  # than the same backward without anything around it, at its end
    after: int = 0  # collectives of a backward when all was over


class TwoLayers(nn.Module):
    """5 to 3 to 2, with a gate of 3 numbers that only a part of the batches uses."""

    def __init__(self, seed: int) -> None:
        """Draw the weights from a seed."""
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 2)
        self.gate = nn.Parameter(torch.randn(3))
        self.anchor = [torch.zeros((), requires_grad=True, device=evidence.home())]  # no parameter
        self.look: Callable[[], None] = lambda: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [samples, 2]."""
        passed = Marker.apply(inputs, self.anchor[0], self.look)
        hidden = torch.tanh(self.first(passed))
        if float(inputs[0, 0]) > 0:
            hidden = hidden * self.gate
        return self.second(hidden)


PSI = 29  # of TwoLayers: 5*3 + 3 + 3*2 + 2 + 3


def pair(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 5] and targets [4, 2]; in step 1, rank 1 does not use the gate."""
    luck = torch.Generator().manual_seed(77 + 10 * step + rank)
    inputs = torch.randn(SAMPLES, 5, generator=luck)
    inputs[0, 0] = -1.0 if (rank, step) == (1, 1) else 1.0
    return inputs, torch.randn(SAMPLES, 2, generator=luck)


def uses_everything(rank: int, step: int) -> bool:
    """Whether a rank uses every parameter in a step."""
    return (rank, step) != (1, 1)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Make the optimizer of the two layers."""
    return torch.optim.SGD(params, lr=0.1)


def share() -> list[Shared]:
    """Train two layers with `data_parallel.train_data_parallel`, whoever wrote it."""
    return on_ranks(_sharing)


def _sharing() -> Shared:
    rank, shown = comm.get_rank(), Shared()
    model = TwoLayers(seed=rank).to(evidence.home())
    plain = _bytes_of_backward(TwoLayers(seed=rank).to(evidence.home()))
    before = _held()

    def look() -> None:
        if len(shown.early) < STEPS:
            shown.early.append(num_reductions() - sum(shown.calls))
            shown.bytes_more = max(shown.bytes_more, _held() - before - plain)

    model.look = look
    data_parallel.train_data_parallel(model, _served(model, shown), sgd)
    first_call = len(comm.records().collectives)
    inputs, targets = (part.to(evidence.home()) for part in pair(rank, 0))
    F.mse_loss(model(inputs), targets).backward()
    shown.after = len(comm.records().collectives) - first_call
    return shown


def _served(model: nn.Module, shown: Shared) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches, and look at what each step has done when the next is asked for."""
    for step in range(STEPS):
        first_call, before = len(comm.records().collectives), num_reductions()
        inputs, targets = pair(comm.get_rank(), step)
        yield inputs.to(evidence.home()), targets.to(evidence.home())
        with device.paused():  # what the check keeps is none of the rank's memory
            shown.weights.append(evidence.weights_of(model))
        shown.calls.append(num_reductions() - before)
        shown.moved.append(training.elements_moved(comm.records(), first_call))
        called = {event.op for event in comm.records().collectives[first_call:]} - {"all_reduce"}
        shown.others = tuple(sorted(called)) if step else ()


def _held() -> int:
    gpu = device.current()
    return 0 if gpu is None else gpu.allocated_bytes


def _bytes_of_backward(model: TwoLayers) -> int:
    """Return what a plain backward holds at its end, gradients included."""
    held: list[int] = []
    model.look = lambda: held.append(_held())
    before = _held()
    inputs, targets = (part.to(evidence.home()) for part in pair(comm.get_rank(), 0))
    F.mse_loss(model(inputs), targets).backward()
    return held[0] - before


@cache
def share_alone() -> list[torch.Tensor]:
    """Return the weights [Psi] after each step, from one process with all ranks' batches."""
    model = TwoLayers(seed=0)
    optimizer = sgd(model.parameters())
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD_SIZE):
            inputs, targets = pair(rank, step)
            (F.mse_loss(model(inputs), targets) / WORLD_SIZE).backward()
        optimizer.step()
        weights.append(evidence.weights_of(model))
    return weights
