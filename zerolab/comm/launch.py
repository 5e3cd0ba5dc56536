"""Chapter 2: `run`, which starts the ranks: threads of this process, or processes.

Owns the choice of the world, and refuses what cannot work before anything is started.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from . import current, pool, rng, threads, torchrun, travel, worker

WORLDS = ("lockstep", "process", "gloo", "nccl")
MAX_RANKS = 64


def run(
    fn: Callable[..., Any],
    world_size: int = 4,
    world: str | None = None,
    gpu_memory: int | str | None = None,
    args: tuple = (),
    timeout: float | None = None,
    ledger: bool = True,
    on_report: Callable[[Any], None] | None = None,
) -> list:
    """Run `fn(*args)` on every rank and return the list of results, in rank order.

    Args:
        fn: the same function for all ranks; it finds its rank by `comm.get_rank()`.
        world_size: how many ranks, 1 to 64.
        world: "lockstep" (threads, one runs at a time), "process" (nccl where there are GPUs,
            else gloo), "gloo" or "nccl". None: $ZEROLAB_WORLD, else "lockstep".
        gpu_memory: the capacity of each rank's virtual GPU, bytes or "160MiB"; None: unlimited.
        args: what every rank gets. In the lockstep world these are the same objects.
        timeout: seconds after which the run is ended. None: never.
        ledger: give every rank a virtual GPU that counts its bytes.
        on_report: called in this process with what ranks pass to `comm.report`.

    Raises:
        UsageError: a value that cannot work.
        DeadlockError: no rank could go on; the message is a table of what each one did.
        MismatchError: ranks called different collectives.
        RunTimeoutError: the timeout passed.
        Exception: whatever a rank raised first, itself; out-of-memory errors come before others.
    """
    world = _check(world_size, world, timeout, gpu_memory, ledger)
    inside = current.of_thread()
    if inside is not None:
        raise UsageError(
            f"run() was called by rank {inside.rank} of a run: ranks cannot start ranks; "
            "call it from outside"
        )
    if world == "lockstep":
        task = threads.Task(fn, args, gpu_memory, ledger, on_report)
        return threads.run(task, world_size, timeout)
    if dist.is_initialized():
        raise UsageError("run() was called by a rank process: ranks cannot start rank processes")
    call = travel.pack_call(fn, args)
    order = worker.Job(
        rank=-1,
        world_size=world_size,
        backend=_backend(world, world_size),
        group=-1,
        epoch=-1,
        call=call,
        luggage=travel.pack_luggage(),
        gpu_memory=gpu_memory,
        ledger=ledger,
        random=rng.capture(),
        lines=travel.cell_lines(),
    )
    return pool.the_pool().run(order, timeout, on_report)


def _check(
    world_size: int,
    world: str | None,
    timeout: float | None,
    gpu_memory: int | str | None,
    ledger: bool,
) -> str:
    """Refuse what cannot work; return the world that was meant."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size {world_size!r} is no number of ranks: use 1, 2, 3, ...")
    if world_size > MAX_RANKS:
        raise UsageError(
            f"world_size {world_size} is more than the {MAX_RANKS} ranks one machine runs: "
            "use a dry run for larger worlds"
        )
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout {timeout!r} is no time: use seconds above 0, or None")
    if gpu_memory is not None and not ledger:
        raise UsageError(f"gpu_memory {gpu_memory!r} needs the ledger: leave out ledger=False")
    chosen = world or os.environ.get("ZEROLAB_WORLD") or "lockstep"
    if chosen not in WORLDS:
        raise UsageError(f"world {chosen!r} is unknown: use one of {', '.join(WORLDS)}")
    return chosen


def _backend(world: str, world_size: int) -> str:
    """Choose gloo or nccl; nccl needs one GPU a rank."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world == "nccl" and world_size > gpus:
        raise UsageError(
            f"world_size {world_size} needs as many GPUs in the nccl world, this machine has "
            f"{gpus}: use world='gloo', or fewer ranks"
        )
    if world == "process":
        return torchrun.choose_backend(world_size)
    return world
