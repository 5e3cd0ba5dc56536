"""Chapter 12: one job on all ranks, started here or by torchrun, and what became of it.

Owns an `Outcome`: the reports that arrived and the error that ended the run, if one did. Both
ways of starting end in the same place:

    started here    `comm.run` starts the ranks; they report to this process
    by torchrun     this process is a rank already; at the end the ranks tell rank 0
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from .. import comm, device
from ..errors import UsageError
from .job import Job, RankReport, Step, home, train_rank

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        reports: in rank order; ranks that could not report are left out.
        error: what ended the run early, or None.
        world_size: how many ranks there were.
    """

    reports: list[RankReport]
    error: BaseException | None
    world_size: int

    @property
    def first(self) -> RankReport | None:
        """The report of the lowest rank that has one."""
        return self.reports[0] if self.reports else None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a job runs on.

    Attributes:
        world_size: how many ranks.
        world: "lockstep", "gloo", "nccl" or "process"; None for $ZEROLAB_WORLD, else lockstep.
        gpu_memory: capacity of each virtual GPU, such as "160MiB"; None: unlimited.
        timeout: seconds after which the run is given up; None: never.
    """

    world_size: int
    world: str | None = None
    gpu_memory: str | None = None
    timeout: float | None = None


def under_torchrun() -> bool:
    """Tell whether torchrun (or a part of its environment) started this process."""
    return any(name in os.environ for name in TORCHRUN)


def join(gpus: int | None, world: str | None) -> int:
    """Become the rank that torchrun made this process, and return the world size.

    Raises:
        UsageError: the environment is half set, or the flags ask for something else.
    """
    if world == "lockstep":
        raise UsageError(
            "--world lockstep has all ranks in one process, but torchrun started several; "
            "leave out one of the two"
        )
    comm.init_process_group()
    world_size = comm.get_world_size()
    if gpus not in (None, world_size):
        raise UsageError(
            f"--gpus {gpus} contradicts torchrun, which started {world_size} ranks; "
            "leave out --gpus"
        )
    return world_size


def execute(job: Job, machine: Machine, on_step: Callable[[Step], None]) -> Outcome:
    """Run a job to its end, good or bad; mistakes of the user are raised."""
    inbox: dict[int, RankReport] = {}

    def receive(news: Step | RankReport) -> None:
        if isinstance(news, Step):
            on_step(news)
        else:
            inbox[news.rank] = news

    try:
        if under_torchrun():
            comm.current_group().on_report = receive
            reports = _as_rank(job, machine.gpu_memory)
        else:
            reports = comm.run(
                train_rank,
                machine.world_size,
                machine.world,
                machine.gpu_memory,
                args=(job,),
                timeout=machine.timeout,
                on_report=receive,
            )
        return Outcome(reports, None, machine.world_size)
    except UsageError:
        raise
    except Exception as error:
        arrived = [inbox[rank] for rank in sorted(inbox)]
        return Outcome(arrived, error, machine.world_size)


def _as_rank(job: Job, gpu_memory: str | None) -> list[RankReport]:
    """Train as the rank that this process is; every rank returns the reports of all."""
    with device.VirtualGPU(gpu_memory, index=comm.get_rank()):
        report = train_rank(job)
    return [RankReport(**json.loads(text)) for text in _all_gather_text(json.dumps(asdict(report)))]


def _all_gather_text(text: str) -> list[str]:
    """Give every rank the texts of all ranks, in rank order."""
    where = home()
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = torch.empty(comm.get_world_size(), dtype=torch.int64, device=where)
    comm.all_gather(lengths, torch.tensor([len(raw)], device=where), purpose="control")
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8, device=where)
    mine[: len(raw)] = raw
    everyone = torch.empty(len(lengths) * longest, dtype=torch.uint8, device=where)
    comm.all_gather(everyone, mine, purpose="control")
    rows = everyone.view(len(lengths), longest).cpu()
    return [
        bytes(row[:length].tolist()).decode()
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
