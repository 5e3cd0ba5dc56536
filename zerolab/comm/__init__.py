"""Chapter 2: ranks, and the collectives between them.

Everything that engine code may call is a function of this module; each finds the group of the
calling rank and asks it. The code is the same in every world. Reading order below this page:

    source reduction rng   small helpers: whose line, what a sum is, every rank its own dice
    group                  a rank's view of its group: checks, numbers and records each call
    deadlock               the table of a run that cannot go on
    baton lockstep         ranks as threads that take turns
    stores scratch         what process ranks share, and what each keeps for its collectives
    pattern                the calls that every step makes, once the ranks know them
    process nccl watch     ranks as processes: gloo and nccl; when waiting is in vain
    current                which group the calling code belongs to
    torchrun               joining the ranks that a launcher started
    threads                a run of the lockstep world
    travel worker          a rank process, and what travels to it and back
    collect pool           one run of rank processes; the processes that stay warm between runs
    launch                 `run`
    star ring              collectives out of messages, as one would write them first and at best
    work composed switch   ... in the place of a world's own, as long as `use_ring()` says so
"""

import os
from typing import Any

from torch import Tensor

from .. import device
from ..records import Records
from .current import current as current_group
from .deadlock import RunTimeoutError
from .group import Group
from .launch import run
from .pool import close_pool
from .switch import use_ring
from .torchrun import destroy_process_group, init_process_group
from .work import Work

__all__ = [
    "Group",
    "ReduceOp",
    "RunTimeoutError",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "close_pool",
    "current_group",
    "destroy_process_group",
    "end_step",
    "get_local_rank",
    "get_rank",
    "get_world",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "records",
    "recv",
    "reduce_scatter",
    "release_scratch",
    "report",
    "run",
    "send",
    "use_ring",
]


def get_rank() -> int:
    """Return the number of the calling rank, 0 to world_size - 1."""
    return current_group().rank


def get_local_rank() -> int:
    """Return the number of the calling rank on its machine: its GPU."""
    launched = get_world() not in ("lockstep", "solo") and "LOCAL_RANK" in os.environ
    return int(os.environ["LOCAL_RANK"]) if launched else get_rank()


def is_initialized() -> bool:
    """Tell whether there are ranks: inside `run`, and after `init_process_group`."""
    return get_world() != "solo"


class ReduceOp:
    """The reductions, under the names of torch.distributed."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"


def get_world_size() -> int:
    """Return how many ranks there are."""
    return current_group().world_size


def get_world() -> str:
    """Return the kind of world: "lockstep", "gloo", "nccl", or "solo" for a process alone."""
    return current_group().world


def records() -> Records:
    """Return the records of the calling rank, to which every collective adds one event."""
    gpu = device.current()
    return current_group().records if gpu is None else gpu.records


def release_scratch() -> None:
    """Let go of the memory that ended collectives keep for the next ones."""
    current_group().release_scratch()


def end_step() -> None:
    """Say that a training step has ended: the next one probably makes the same calls.

    All ranks must call it. Processes use it to find the calls that all of them make.
    """
    current_group().end_step()


def report(thing: Any) -> None:
    """Hand something to the `on_report` of the run, in the process that called `run`."""
    callback = current_group().on_report
    if callback is not None:
        with device.paused():
            callback(thing)


def all_reduce(
    tensor: Tensor,
    op: str = "sum",
    *,
    async_op: bool = False,
    purpose: str = "data",
    label: str = "",
) -> Work:
    """Replace `tensor` on every rank by the sum, average or maximum over all ranks.

    Args:
        tensor: any shape, contiguous; the same number of elements and dtype on every rank.
        op: "sum", "avg" or "max".
        async_op: return at once; `tensor` is then unusable until `wait()`.
        purpose: "data", or "control" for what the traffic formulas leave out.
        label: what is sent, such as the name of a bucket; must be the same on every rank.
    """
    return current_group().all_reduce(tensor, op, async_op, purpose, label)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: str = "sum",
    *,
    async_op: bool = False,
    purpose: str = "data",
    label: str = "",
) -> Work:
    """Reduce `input` over all ranks, and leave slice r of the result on rank r.

    Args:
        output: [shard_numel]; may be the own slice of `input`.
        input: [world_size * shard_numel], of the dtype of `output`.
        op: "sum", "avg" or "max".
        async_op: return at once; both tensors are then unusable until `wait()`.
        purpose: "data" or "control".
        label: what is sent, such as the name of a bucket; must be the same on every rank.
    """
    return current_group().reduce_scatter(output, input, op, async_op, purpose, label)


def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    async_op: bool = False,
    purpose: str = "data",
    label: str = "",
) -> Work:
    """Lay the `input` of all ranks end to end in the `output` of every rank.

    Args:
        output: [world_size * shard_numel].
        input: [shard_numel]; may be the own slice of `output`.
        async_op: return at once; `output` is then unusable until `wait()`.
        purpose: "data" or "control".
        label: what is sent, such as the name of a bucket; must be the same on every rank.
    """
    return current_group().all_gather(output, input, async_op, purpose, label)


def broadcast(
    tensor: Tensor, src: int = 0, *, async_op: bool = False, purpose: str = "data"
) -> Work:
    """Copy `tensor` of rank `src` into `tensor` of all other ranks."""
    return current_group().broadcast(tensor, src, async_op, purpose)


def send(tensor: Tensor, dst: int, *, async_op: bool = False, purpose: str = "data") -> Work:
    """Send `tensor` to rank `dst`; returns (or `wait()` does) when that rank has it."""
    return current_group().send(tensor, dst, async_op, purpose)


def recv(tensor: Tensor, src: int, *, async_op: bool = False, purpose: str = "data") -> Work:
    """Fill `tensor` with what rank `src` sends."""
    return current_group().recv(tensor, src, async_op, purpose)


def barrier(*, purpose: str = "control") -> None:
    """Return when every rank has called it."""
    current_group().barrier(purpose)
