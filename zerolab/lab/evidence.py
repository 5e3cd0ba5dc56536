"""Chapter 0: evidence, what a check can look at beside return values.

Owns one small model that every engine check trains: odd sizes, three steps, other data on
every rank. `train_tiny` runs the engine on it and hands back what every rank held, moved and
computed; `train_tiny_alone` is plain torch in one process with the global batch, the reference.

A check that needs ranks of its own calls `run`, never `comm.run`: then it follows ZEROLAB_WORLD
(lockstep, gloo or nccl) like all others, what is plugged in travels along, a rank that hangs is
ended, and where there are too few GPUs the check is skipped with the reason. In its function,
models and batches go to `home()`:

    def _rank(stage: int) -> float:
        model = nn.Linear(4, 3).to(evidence.home())
        ...

    results = evidence.run(_rank, 4, stage)
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm, device, engine
from ..records import CollectiveEvent
from .outcome import Skipped, Wrong

STEPS = 3
TOLERANCE = 1e-5
SIZES = (5, 3, 2)  # widths of the model: 5*3 + 3 + 3*2 + 2 = 26 parameters in 4 tensors
OPTIMIZER = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
HANGING_SECONDS = 30.0  # of a run in rank processes, their start not counted
STOPPING_SECONDS = 5.0  # to stop lockstep ranks and say where each was, before the check ends

_worlds: set[str] = set()  # in which `run` has started rank processes since `forget_worlds`
_ends_at: list[float] = []  # when lockstep ranks are stopped, by the clock that only goes forward


# Ranks, in the world that ZEROLAB_WORLD names.


def chosen_world() -> str:
    """Return the world in which exercises are checked: ZEROLAB_WORLD, else lockstep."""
    return os.environ.get("ZEROLAB_WORLD") or "lockstep"


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    gpu_memory: int | str | None = None,
    world: str | None = None,
) -> list[Any]:
    """Run `function(*args)` on every rank and return the results in rank order.

    Args:
        function: the same for all ranks; it finds its rank by `comm.get_rank()`.
        world_size: how many ranks.
        args: what every rank gets.
        gpu_memory: the capacity of each rank's virtual GPU; None: unlimited.
        world: None for that of ZEROLAB_WORLD.

    Raises:
        Skipped: the nccl world needs a GPU for each rank, and there are fewer.
    """
    chosen = world or chosen_world()
    gpus = torch.cuda.device_count() if chosen == "nccl" else world_size
    if world_size > gpus:
        raise Skipped(
            f"It trains on {world_size} GPUs and this machine has {gpus}: "
            "ZEROLAB_WORLD=gloo checks it on processes."
        )
    hanging = _seconds_left()
    if chosen != "lockstep":
        _worlds.add(chosen)
        hanging = HANGING_SECONDS
        comm.run(home, world_size, chosen)  # processes that are new load this module first
    return comm.run(function, world_size, chosen, gpu_memory, args, timeout=hanging)


def home() -> torch.device:
    """Return where the calling rank's tensors live: its GPU in the nccl world, else the CPU."""
    if comm.get_world() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def allow(seconds: float) -> None:
    """Give the ranks of this process so much time: then the check says where each of them was.

    Never called where a learner may stop at a breakpoint.
    """
    _ends_at[:] = [time.monotonic() + seconds - min(STOPPING_SECONDS, seconds / 2)]


def _seconds_left() -> float | None:
    """Return how long lockstep ranks may still run, None for as long as they like."""
    return max(round(_ends_at[0] - time.monotonic(), 1), 0.1) if _ends_at else None


def forget_worlds() -> None:
    """Begin anew to note in which worlds ranks are started."""
    _worlds.clear()


def worlds_seen() -> str:
    """Name the worlds of rank processes since `forget_worlds`, "" for none but lockstep."""
    return ", ".join(sorted(_worlds))


# The tiny model and its training.


@dataclass(frozen=True, slots=True)
class TinyRank:
    """What one rank showed. All but weights and losses is that of the last step."""

    weights: torch.Tensor  # [numel], whole at every stage
    optimizer_bytes: int  # held["optimizer"]
    moved: dict[str, int]  # elements by collective
    losses: tuple[float, ...]  # of its own batches, one a step
    held: dict[str, int] = field(default_factory=dict)  # state bytes by kind, gradients ready
    peak: dict[str, int] = field(default_factory=dict)  # bytes by kind at the peak of the run
    calls: tuple[tuple[str, str, int], ...] = ()  # (collective, label, elements), in order


def tiny_model() -> nn.Module:
    """Return the model, the same numbers each time."""
    torch.manual_seed(7)
    first, second = nn.Linear(SIZES[0], SIZES[1]), nn.Linear(SIZES[1], SIZES[2])
    return nn.Sequential(first, nn.Tanh(), second)


def tiny_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 5] and targets [4, 2] of one rank."""
    luck = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, SIZES[0], generator=luck), torch.randn(4, SIZES[2], generator=luck)


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return all parameters end to end, as a copy on the CPU."""
    parts = [param.detach().reshape(-1) for param in model.parameters()]
    return torch.cat(parts).clone().cpu()


def train_tiny(
    stage: int,
    world_size: int,
    *,
    config: Mapping[str, Any] | None = None,
    model: Callable[[], nn.Module] = tiny_model,
    gpu_memory: int | str | None = None,
    world: str | None = None,
) -> list[TinyRank]:
    """Train the tiny model with the engine at a stage, on ranks of the check's world.

    Args:
        stage: 0 to 3.
        world_size: how many ranks.
        config: blocks and keys beside those of the run itself; a block's keys are added to it.
        model: builds another model for `tiny_batch`; a function of a module, for it travels.
        gpu_memory: the capacity of each rank's virtual GPU; None: unlimited.
        world: None for that of ZEROLAB_WORLD.
    """
    args = (stage, dict(config or {}), model)
    return run(_tiny_rank, world_size, *args, gpu_memory=gpu_memory, world=world)


def _tiny_config(stage: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the run, with what a check adds to it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
    }
    for key, value in more.items():
        block = isinstance(value, Mapping) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if block else value
    return config


def _tiny_rank(
    stage: int,
    more: Mapping[str, Any] | None = None,
    build: Callable[[], nn.Module] = tiny_model,
) -> TinyRank:
    model = build().to(home())
    trainer, *_ = engine.initialize(model=model, config=_tiny_config(stage, more or {}))
    first_call, losses = 0, []
    for step in range(STEPS):
        first_call = len(comm.records().collectives)
        inputs, targets = tiny_batch(comm.get_rank(), step)
        outputs = trainer(inputs.to(home(), trainer.config.param_dtype))
        loss = trainer.backward(_loss(outputs, targets.to(home())))
        losses.append(float(loss.detach()))
        trainer.step()
    events = [e for e in comm.records().collectives[first_call:] if e.purpose == "data"]
    held, gpu = trainer.state_bytes(), device.current()
    peak = {} if gpu is None else gpu.peak_by_kind()
    weights = trained_weights(trainer)
    trainer.close()
    calls = tuple((event.op, event.label, event.elements) for event in events)
    moved = _moved(events)
    return TinyRank(weights, held["optimizer"], moved, tuple(losses), held, peak, calls)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error, in fp32 also of a 16-bit model."""
    return F.mse_loss(outputs.float(), targets)


def trained_weights(trainer: engine.Engine) -> torch.Tensor:
    """Return all parameters of an engine end to end, gathered where a rank holds only shards."""
    if trainer.stage < 3:
        return weights_of(trainer.module)
    whole = trainer.module_state_dict()
    names = [name for name, _ in trainer.module.named_parameters()]
    return torch.cat([whole[name].detach().reshape(-1) for name in names]).cpu()


def _moved(events: list[CollectiveEvent]) -> dict[str, int]:
    moved: dict[str, int] = {}
    for event in events:
        moved[event.op] = moved.get(event.op, 0) + event.elements
    return moved


def train_tiny_alone(
    world_size: int, *, model: Callable[[], nn.Module] = tiny_model
) -> torch.Tensor:
    """Train in one process on the global batch with torch alone; returns the weights [numel]."""
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        batches = [tiny_batch(rank, step) for rank in range(world_size)]
        losses = [_loss(alone(inputs), targets) for inputs, targets in batches]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return weights_of(alone)


def same_weights(
    what: str,
    shown: Iterable[torch.Tensor],
    reference: torch.Tensor,
    tolerance: float,
    call: str,
) -> str:
    """Compare the weights of every rank with those of one process that saw all batches.

    Args:
        what: the run and its length: "stage 1 on 3 ranks: after 3 steps".
        shown: the weights of rank 0, 1, ..., each like `reference`.
        reference: what plain torch came to.
        tolerance: how far apart an element may be.
        call: what the card calls the answer.

    Returns:
        What has been proven.

    Raises:
        Wrong: the weights of a rank are further off, or no numbers.
    """
    for rank, weights in enumerate(shown):
        apart = (weights - reference).abs().max().item()
        if not apart <= tolerance:
            raise Wrong(
                f"{what} the weights are {apart:.2g} off those of one process that saw the "
                "batches of all ranks.",
                expected=f"at most {tolerance:g}",
                observed=f"{apart:.3g}",
                rank=rank,
                call=call,
            )
    return f"{what} the weights of plain torch"
