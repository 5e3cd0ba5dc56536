"""Chapter 0: a training run to look at, from one call.

Owns what a run left behind, a `Training`: records, losses and peaks of every rank, and the
error that ended it, if one did. An out-of-memory error is a result here, not an accident.
`train_rank` is the whole training loop, the one that a learner reads. Phases: start the ranks,
draw them while they run, draw the end.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import comm, data, device, engine, gpt
from ..errors import UsageError
from ..records import Records
from . import cards, live, whose
from .evidence import home

DEFAULT_WORLD_SIZE = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told."""

    model: str
    stage: int
    steps: int
    dtype: str
    micro_batch_size: int
    seed: int

    def config(self) -> dict[str, Any]:
        """Return the ds_config.json of the run."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }


@dataclass(slots=True)
class Rank:
    """What one rank held, moved and computed."""

    rank: int
    losses: list[float] = field(default_factory=list)
    state_bytes: dict[str, int] = field(default_factory=dict)  # at the last grads_ready
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    elements_moved: int = 0  # in the last step, an all-reduce counted as two
    records: Records = field(default_factory=Records)

    @property
    def peak_bytes(self) -> int:
        """The most it held at once."""
        return sum(self.peak_by_kind.values())


def train_rank(job: Job) -> None:
    """Train as one rank: the same program on all of them."""
    rank = Rank(comm.get_rank())
    _introduce(rank)
    try:
        torch.manual_seed(job.seed)
        shape = gpt.preset(job.model)
        with device.in_phase("init"):
            model = gpt.GPT(shape).to(home())
        trainer, *_ = engine.initialize(model=model, config=job.config())
        batches = data.batches(
            data.load_text(),
            comm.get_rank(),
            comm.get_world_size(),
            job.micro_batch_size,
            shape.seq_len,
            job.seed,
        )
        for _ in range(job.steps):
            first_call = len(comm.records().collectives)
            tokens, targets = (part.to(home()) for part in next(batches))
            loss = trainer(tokens, targets)
            trainer.backward(loss)
            rank.losses.append(float(loss.detach()))
            trainer.step()
            rank.state_bytes = trainer.state_bytes()
            rank.elements_moved = elements_moved(comm.records(), first_call)
        trainer.close()
    finally:
        _hand_in(rank)


def _introduce(rank: Rank) -> None:
    gpu = device.current()
    if comm.get_world() == "lockstep" and gpu is not None:
        comm.report(live.Started(rank.rank, gpu, rank.losses))


def _hand_in(rank: Rank) -> None:
    gpu = device.current()
    if gpu is not None:
        rank.peak_by_kind = gpu.peak_by_kind()
    rank.records = comm.records()
    comm.report(rank)


def elements_moved(records: Records, first_call: int = 0) -> int:
    """Count what the collectives from a certain one on carried, control traffic left out."""
    return sum(
        event.elements * (2 if event.op == "all_reduce" else 1)
        for event in records.collectives[first_call:]
        if event.purpose == "data"
    )


# The run as a whole.


@dataclass(frozen=True)
class Training:
    """How a run went: what every rank left behind, and what ended it early, if anything did."""

    job: Job
    capacity: int | None
    ranks: list[Rank]
    error: Exception | None
    running: str = ""  # whose code it ran on
    world_size: int = 0  # how many ranks began; those that a failure ended hand nothing in

    @property
    def fits(self) -> bool:
        """Whether it reached its end."""
        return self.error is None

    @property
    def failed_rank(self) -> int | None:
        """The rank whose memory was full, None if none was."""
        return getattr(self.error, "rank", None)

    @property
    def losses(self) -> list[float]:
        """The mean loss over all ranks, step by step."""
        done = min((len(rank.losses) for rank in self.ranks), default=0)
        return [sum(r.losses[i] for r in self.ranks) / len(self.ranks) for i in range(done)]

    @property
    def peak_bytes(self) -> int:
        """The most that any rank held."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    @property
    def fullest(self) -> Rank:
        """The rank that held most, the failed one if there is one."""
        if self.failed_rank is not None:
            return next(rank for rank in self.ranks if rank.rank == self.failed_rank)
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def card(self) -> cards.Card:
        """Return the outcome as a card."""
        limit = f" of {device.format_bytes(self.capacity)}" if self.capacity else ""
        count = self.world_size or len(self.ranks)
        heading = f"stage {self.job.stage} on {count} GPU{'s' * (count != 1)}{limit}"
        if self.error is not None:
            kind = type(self.error)
            home = "torch." if kind is torch.OutOfMemoryError else ""
            message = f"{home}{kind.__name__}: {self.error}"
            stopped = f"{heading}: stopped"
            return cards.Card("--jp-error-color1", stopped, message, footer=self.running)
        losses = "  ".join(f"{loss:.4f}" for loss in self.losses)
        rows = (cards.Row("at most", f"{device.format_bytes(self.peak_bytes)} on one GPU"),)
        rows += (cards.Row("losses", losses, code=True),)
        trained = f"{heading}: trained"
        return cards.Card("--jp-success-color1", trained, rows=rows, footer=self.running)

    def engine_map(self) -> dict[str, Any]:
        """Return the functions that a step of this stage calls now, for `EngineMap`."""
        from . import engine_pieces  # which traces a run, and so stands on this module

        return engine_pieces.engine_map(stage=self.job.stage)

    def __repr__(self) -> str:
        return repr(self.card())

    def _repr_html_(self) -> str:
        return self.card()._repr_html_()


def world_size() -> int:
    """Return how many ranks notebooks use: four, or on real GPUs as many as there are."""
    if os.environ.get("ZEROLAB_WORLD") == "nccl":
        return torch.cuda.device_count()
    return DEFAULT_WORLD_SIZE


def train(
    *,
    stage: int = 0,
    gpu_memory: int | str | None = None,
    steps: int = 2,
    model: str = "gpt-10m",
    dtype: str = "bf16",
    micro_batch_size: int = 1,
    watch: live.Picture | None = None,
) -> Training:
    """Train a small GPT on `world_size()` virtual GPUs.

    Args:
        stage: ZeRO stage, 0 to 3.
        gpu_memory: capacity of each GPU, such as "160MiB"; None for no limit.
        steps: optimizer steps.
        model: a preset of `zerolab.gpt`.
        dtype: "bf16", "fp16" or "fp32".
        micro_batch_size: samples a rank and step.
        watch: a picture to draw while the ranks run.

    Returns:
        What happened, also when the memory did not suffice.

    Raises:
        UsageError: a value cannot work.
    """
    capacity = None if gpu_memory is None else device.parse_bytes(gpu_memory)
    job = make_job(stage, steps, model, dtype, micro_batch_size)
    if watch is None:
        return _run(job, capacity, lambda news: None)
    watch.capacity = capacity or 0
    with live.shown(watch):
        with live.redrawn(watch, world_size()) as started:
            training = _run(job, capacity, started)
        _draw_end(watch, training)  # nobody redraws any more
    return training


def _draw_end(watch: live.Picture, training: Training) -> None:
    """Draw the run as it ended."""
    records = [rank.records for rank in training.ranks]
    if isinstance(watch, live.Dashboard):
        watch.advance([rank.losses for rank in training.ranks], records)
    message = str(training.error or "").split(" Of the allocated")[0]
    watch.finish(records, training.failed_rank, message)


def make_job(stage: int, steps: int, model: str, dtype: str, micro_batch_size: int = 1) -> Job:
    """Return what every rank is told.

    Raises:
        UsageError: a value cannot work.
    """
    gpt.preset(model)
    if dtype not in ("bf16", "fp16", "fp32"):
        raise UsageError(f'dtype {dtype!r} is unknown; give "bf16", "fp16" or "fp32"')
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"stage {stage!r} is no ZeRO stage; give 0, 1, 2 or 3")
    if steps < 1:
        raise UsageError(f"steps={steps} trains nothing; give 1 or more")
    return Job(model, stage, steps, dtype, micro_batch_size, seed=0)


def _run(job: Job, capacity: int | None, started: Callable[[live.Started], None]) -> Training:
    """Run the job and collect what the ranks hand in, whatever ends it."""
    ranks: dict[int, Rank] = {}

    def receive(news: live.Started | Rank) -> None:
        if isinstance(news, Rank):
            ranks[news.rank] = news
        else:
            started(news)

    error: Exception | None = None
    ran_on, count = whose.of_training(), world_size()
    try:
        comm.run(train_rank, count, gpu_memory=capacity, args=(job,), on_report=receive)
    except Exception as failure:
        error = failure.with_traceback(None)  # its frames hold the tensors of the run
    return Training(job, capacity, [ranks[rank] for rank in sorted(ranks)], error, ran_on, count)
