"""Chapter 0: the virtual GPU of the calling thread, and shorthands that act on it.

Owns one stack of virtual GPUs for each thread: in the lockstep world every rank is a thread
with a GPU of its own. The engine calls `tag`, `in_phase`, `set_phase`, `mark`, `set_kind` and
`paused` from here; without an active GPU they do nothing and cost next to nothing.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..records import Mark

if TYPE_CHECKING:
    from .gpu import VirtualGPU

_NOTHING = nullcontext()


class _Thread(threading.local):
    """What one thread knows: its GPUs, innermost last."""

    def __init__(self) -> None:
        self.gpus: list[VirtualGPU] = []


_thread = _Thread()
_everywhere: list["VirtualGPU"] = []  # the GPUs active in any thread


def activate(gpu: "VirtualGPU") -> None:
    """Make this the GPU of the calling thread."""
    _thread.gpus.append(gpu)
    _everywhere.append(gpu)


def deactivate(gpu: "VirtualGPU") -> None:
    """Go back to the GPU that was active before."""
    _thread.gpus.pop()
    _everywhere.remove(gpu)


def current() -> "VirtualGPU | None":
    """Give the virtual GPU of the calling thread, None when there is none."""
    gpus = _thread.gpus
    if gpus:
        return gpus[-1]
    return _from_autograd_thread() if _everywhere else None


def _from_autograd_thread() -> "VirtualGPU | None":
    """CUDA backwards run in threads of autograd: there the process's only GPU is meant."""
    if torch._C._current_graph_task_id() == -1:
        return None
    gpus = list(_everywhere)
    return gpus[0] if gpus and all(gpu is gpus[0] for gpu in gpus) else None


def tag(kind: str) -> AbstractContextManager[object]:
    """Count what is allocated inside as of this kind."""
    gpu = current()
    return _NOTHING if gpu is None else gpu.tag(kind)


def in_phase(name: str) -> AbstractContextManager[object]:
    """Be in a phase of the training step inside, and in the one before afterwards."""
    gpu = current()
    return _NOTHING if gpu is None else gpu.in_phase(name)


def paused() -> AbstractContextManager[object]:
    """Count nothing that is allocated inside, such as the scratch of a collective."""
    gpu = current()
    return _NOTHING if gpu is None else gpu.paused()


def set_phase(name: str) -> None:
    """Enter a phase until the next call; at "backward" live forward temps become activations."""
    gpu = current()
    if gpu is not None:
        gpu.set_phase(name)


def mark(name: str) -> Mark | None:
    """Write down a named moment with the bytes held by kind."""
    gpu = current()
    return None if gpu is None else gpu.mark(name)


def set_kind(tensor: torch.Tensor, kind: str) -> None:
    """Re-classify the storage of a tensor, counting it if it was not counted so far."""
    gpu = current()
    if gpu is not None:
        gpu.set_kind(tensor, kind)


def ignore(tensor: torch.Tensor) -> None:
    """Never count this storage on the calling rank's GPU, if it was not seen there so far."""
    gpu = current()
    if gpu is not None:
        gpu.ignore(tensor)


def name_storage(tensor: torch.Tensor, name: str) -> None:
    """Say which unit a storage belongs to, so that using it while it is empty names the unit."""
    gpu = current()
    if gpu is not None:
        gpu.name_storage(tensor, name)
