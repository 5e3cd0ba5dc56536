"""Chapter 8: host memory, with books of its own, and the copies between host and GPU.

Owns one `HostLedger` for each virtual GPU's thread, so that every rank sees its own share of
the host. On a CPU `.to("cpu")` returns the same tensor, so an offload would be invisible:
`to_host` and `to_device` really copy, and each side is counted in its own ledger. Tensors
that live on a CUDA device take the way in `cuda.py`: pinned memory and a copy stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import UsageError
from ..records import Records
from . import active, cuda, resize
from .ledger import UNCOUNTED, Block, Ledger


class HostLedger(Ledger):
    """The books of a rank's host memory.

    Attributes:
        capacity: bytes the rank may use, None for no limit; may be set at any time.
        pinned_bytes: how many of the allocated bytes are page-locked.
    """

    place = "host"

    def __init__(
        self,
        capacity: int | str | None = None,
        *,
        index: int = 0,
        records: Records | None = None,
        timeline: bool = True,
        began: float | None = None,
    ) -> None:
        """Open empty books; see `VirtualGPU` for the arguments."""
        super().__init__(capacity, index, records, timeline, began)
        resize.watch(self)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked, or would be on a machine with CUDA."""
        return sum(block.nbytes for block in list(self.live.values()) if block.pinned)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Say whether a host tensor is page-locked (a promise on a machine without CUDA)."""
        block = self.live.get(tensor.untyped_storage()._cdata)
        return block is not None and block.pinned


_of_process: list[HostLedger] = []  # the ledger of threads without a virtual GPU, once needed


def host() -> HostLedger:
    """Give the host ledger of the calling thread's virtual GPU, else the process's own."""
    gpu = active.current()
    if gpu is None:
        if not _of_process:
            _of_process.append(HostLedger())
        return _of_process[0]
    if gpu.host is None:
        gpu.host = HostLedger(index=gpu.index, began=gpu.began)
    return gpu.host


@contextmanager
def on_host() -> Iterator[HostLedger]:
    """Count what is allocated inside in the host ledger, as for an optimizer on the host.

    On a machine with CUDA allocate with `device="cpu"` inside, as you would anyway.

    Raises:
        UsageError: no virtual GPU is active, so nobody would see the allocations.
    """
    gpu = active.current()
    if gpu is None:
        raise UsageError("on_host() needs an active virtual GPU: enter `with VirtualGPU():` first")
    ledger = host()
    with gpu.paused():
        gpu.host_scopes += 1
        try:
            yield ledger
        finally:
            gpu.host_scopes -= 1


def to_host(tensor: torch.Tensor, pinned: bool = True) -> torch.Tensor:
    """Copy a tensor to host memory, counted in the host ledger, with its kind.

    Args:
        tensor: on a virtual or a CUDA GPU, any shape.
        pinned: page-lock the copy, so that copies can overlap with computation. On a machine
            without CUDA this is only remembered; see `HostLedger.is_pinned`.

    Returns:
        A contiguous copy of the same shape and dtype, without gradient history.

    Raises:
        torch.OutOfMemoryError: the host ledger has a capacity and it is full.
    """
    ledger = host()
    with active.paused():
        copy = cuda.to_host(tensor, pinned) if tensor.is_cuda else _copy(tensor)
    block = ledger.count(copy.untyped_storage(), _kind_on_gpu(tensor))
    block.pinned, block.origin = pinned, tensor.device
    return copy


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to the GPU it came from, counted in that GPU's ledger, with its kind.

    Args:
        tensor: a result of `to_host`; any other tensor goes to the virtual GPU.

    Returns:
        A contiguous copy of the same shape and dtype, without gradient history.

    Raises:
        torch.OutOfMemoryError: the GPU is full.
    """
    block = host().live.get(tensor.untyped_storage()._cdata)
    gpu = active.current()
    if gpu is not None:
        gpu.ignore(tensor)
    with active.tag(_kind_on_host(block)):
        if block is not None and block.origin is not None and block.origin.type == "cuda":
            return cuda.to_device(tensor, block.origin)
        return _copy(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return copy.copy_(tensor)


def _kind_on_gpu(tensor: torch.Tensor) -> str:
    gpu = active.current()
    if gpu is None:
        return "temp"
    block = gpu.live.get(tensor.untyped_storage()._cdata)
    return gpu.tagged or (block.kind if block is not None else "") or "temp"


def _kind_on_host(block: Block | None) -> str:
    gpu = active.current()
    if gpu is not None and gpu.tagged is not None:
        return gpu.tagged
    return "temp" if block is None or block.kind == UNCOUNTED else block.kind
