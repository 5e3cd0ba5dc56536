"""Chapter 2: which group does the calling code belong to?

Owns the answer, per thread and per process. A lockstep rank is a thread, so its group is the
thread's own. A process rank has one group for the process. Who has neither is alone: a group
of one, which runs the same code, so that nothing in the engine asks "am I distributed?".
"""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .. import device
from ..errors import UsageError
from .group import Group
from .lockstep import LockstepGroup, LockstepWorld
from .nccl import NcclGroup
from .process import ProcessGroup
from .stores import Store

_local = threading.local()
_adopted: list[ProcessGroup] = []  # the group of this process, at most one


def _solo() -> LockstepGroup:
    """Return the group of a process that is alone: world size 1, the same code."""
    group = LockstepGroup(0, LockstepWorld(1))
    group.world = group.records.world = "solo"
    return group


_alone = _solo()


def current() -> Group:
    """Return the calling thread's group, else the process's, else the group of one."""
    group = getattr(_local, "group", None)
    if group is not None:
        return group
    if dist.is_initialized():
        return of_process()
    return _alone


def of_process() -> ProcessGroup:
    """Return our view of torch.distributed's default group, whoever initialised it."""
    pg = dist.group.WORLD
    if not _adopted or _adopted[0].pg is not pg:
        set_process_group(adopt())
    return _adopted[0]


def adopt(store: Store | None = None, epoch: int = 0) -> ProcessGroup:
    """Make our group of torch.distributed's default group, whoever initialised it.

    Args:
        store: one that all ranks share; None: that of the default group.
        epoch: number of the run, where several share a group.
    """
    pg, backend = dist.group.WORLD, dist.get_backend()
    if pg is None or backend not in ("gloo", "nccl"):
        raise UsageError(f"backend {backend!r} is not supported: initialise with gloo or nccl")
    store = store or dist.distributed_c10d._get_default_store()
    kind = NcclGroup if backend == "nccl" else ProcessGroup
    return kind(pg, store, epoch)


def set_process_group(group: ProcessGroup | None) -> None:
    """Make `group` the one of this process, and let go of the one before."""
    for old in _adopted:
        if old.watcher is not None:
            old.watcher.stop()
    _adopted[:] = [] if group is None else [group]


def adopted() -> list[ProcessGroup]:
    """Return the group of this process in a list, empty when there is none."""
    return _adopted


def of_thread() -> Group | None:
    """Return the group of the calling thread, None outside a lockstep run."""
    return getattr(_local, "group", None)


def set_thread_group(group: Group | None) -> None:
    """Make the calling thread a lockstep rank, or an ordinary thread again."""
    _local.group = group


def on_virtual_gpu(
    group: Group,
    fn: Callable[..., Any],
    args: tuple,
    gpu_memory: int | str | None,
    ledger: bool,
) -> Any:
    """Run a function as one rank, on a virtual GPU whose records are those of the group."""
    if not ledger:
        return fn(*args)
    gpu = device.VirtualGPU(
        gpu_memory,
        index=group.rank,
        records=group.records,
        device_type="cuda" if group.world == "nccl" else "cpu",
        began=group.began,
    )
    with gpu:
        return fn(*args)
