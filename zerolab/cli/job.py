"""Chapter 12: what `zerolab train` does on every rank, and what comes back.

Owns a `Job`, the same for all ranks, and the `RankReport` that each one fills while it works.
A report is handed over however the rank ends, so that a run that died of memory still says
how high it got. Phases on a rank: build the model, `zerolab.initialize`, steps, report.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .. import comm, data, device, engine, gpt
from ..records import CollectiveEvent

PROMPT = "\n"


@dataclass(frozen=True, slots=True)
class Job:
    """One training run, as every rank is told it.

    Attributes:
        model: the shape of the GPT.
        text: what it learns.
        config: the content of a ds_config.json.
        steps: optimizer steps.
        micro_batch_size: samples a rank and forward.
        accum_steps: forwards a step.
        seed: decides the weights and the batches.
        sample: how many bytes the trained model writes at the end.
    """

    model: gpt.GPTConfig
    text: bytes
    config: dict[str, Any]
    steps: int
    micro_batch_size: int
    accum_steps: int
    seed: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """News from rank 0: one step is done."""

    number: int  # from 1
    loss: float
    seconds: float


@dataclass(slots=True)
class RankReport:
    """What one rank held, moved and measured."""

    rank: int
    losses: list[float] = field(default_factory=list)  # means over all ranks
    step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)  # at the last grads_ready
    state_step: int = 0  # the step in which that was, from 1; 0 for none
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)  # of the last step
    traffic_step: int = 0  # which one that was; it may have been cut short
    skipped_steps: int = 0  # cancelled by an overflow
    loss_scale: float = 1.0  # after the last step; it moves with fp16 only
    sample: str = ""


def train_rank(job: Job) -> RankReport:
    """Train as one rank of the current group; runs inside a virtual GPU."""
    report = RankReport(comm.get_rank())
    try:
        _train(job, report)
    finally:
        gpu = device.current()
        if gpu is not None:
            report.peak_bytes, report.peak_by_kind = gpu.peak_bytes, gpu.peak_by_kind()
        comm.report(report)
    return report


def _train(job: Job, report: RankReport) -> None:
    """Build, step, sample; the report grows with every step."""
    torch.manual_seed(job.seed)
    with device.in_phase("init"):
        model = gpt.GPT(job.model).to(home())
    trainer, *_ = engine.initialize(model=model, config=job.config)
    try:
        batches = data.batches(
            job.text,
            comm.get_rank(),
            comm.get_world_size(),
            job.micro_batch_size,
            job.model.seq_len,
            job.seed,
        )
        for number in range(1, job.steps + 1):
            _step(trainer, islice(batches, job.accum_steps), number, report)
        if job.sample:
            report.sample = _write(trainer, job)
    finally:
        trainer.close()


def _step(
    trainer: Any, micro_batches: Iterator[tuple[Tensor, Tensor]], number: int, report: RankReport
) -> None:
    """Run one optimizer step and enter it in the report."""
    first_call = len(comm.records().collectives)
    start = time.perf_counter()
    losses = []
    try:
        for tokens, targets in micro_batches:
            loss = trainer(tokens.to(home()), targets.to(home()))
            trainer.backward(loss)
            losses.append(float(loss.detach()))
            trainer.step()
    finally:
        report.state_bytes = trainer.state_bytes()
        report.state_step = sum(mark.name == "grads_ready" for mark in comm.records().marks)
        report.traffic_step = number
        report.traffic = traffic(comm.records().collectives[first_call:])
        report.skipped_steps, report.loss_scale = trainer.skipped_steps, trainer.cur_scale
    report.step_seconds.append(time.perf_counter() - start)
    report.losses.append(mean_over_ranks(sum(losses) / len(losses)))
    if report.rank == 0:
        comm.report(Step(number, report.losses[-1], report.step_seconds[-1]))


def home() -> torch.device:
    """Return where this rank's tensors live: its GPU in the nccl world, else the CPU."""
    if comm.get_world() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def mean_over_ranks(value: float) -> float:
    """Average one number over all ranks, in fp64 and rank order: equal bits in every world."""
    with device.paused():
        mine = torch.tensor([value], dtype=torch.float64, device=home())
        everyone = mine.new_empty(comm.get_world_size())  # [world_size]
        comm.all_gather(everyone, mine, purpose="control")
        return sum(everyone.tolist()) / len(everyone)


def traffic(events: list[CollectiveEvent]) -> dict[str, dict[str, int]]:
    """Add up calls, elements and bytes by collective, control traffic left out."""
    totals: dict[str, dict[str, int]] = {}
    for event in events:
        if event.purpose != "control":
            total = totals.setdefault(event.op, {"calls": 0, "elements": 0, "bytes": 0})
            total["calls"] += 1
            total["elements"] += event.elements
            total["bytes"] += event.nbytes
    return totals


def _write(trainer: Any, job: Job) -> str:
    """Let the trained model write; all ranks together, because each may hold only a shard."""
    luck = torch.Generator(home()).manual_seed(job.seed)
    trainer.module.eval()
    tokens = gpt.generate(trainer, data.encode(PROMPT).to(home()), job.model.seq_len, luck)
    return data.decode(list(islice(tokens, job.sample)))
