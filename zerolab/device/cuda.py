"""Chapter 8: the same on a real GPU: pinned memory, copy streams, torch's own statistics.

Owns one copy stream for each CUDA device and thread. On CUDA the ledger still counts the
tensors of a rank, and `peak_bytes` and `allocated_bytes` give what torch's caching allocator
saw: the difference is what a ledger of tensors cannot see, such as kernel workspaces.
"""

import threading

import torch


class _Streams(threading.local):
    """The copy streams of one thread, by device index."""

    def __init__(self) -> None:
        self.by_device: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()


def is_available() -> bool:
    """Say whether there is a CUDA device."""
    return torch.cuda.is_available()


def allocated_bytes(device: int | None = None) -> int:
    """Bytes that torch's allocator holds in tensors and workspaces now; 0 without CUDA."""
    return torch.cuda.memory_allocated(device) if is_available() else 0


def peak_bytes(device: int | None = None) -> int:
    """The most bytes it held since `reset_peak`; 0 without CUDA."""
    return torch.cuda.max_memory_allocated(device) if is_available() else 0


def reset_peak(device: int | None = None) -> None:
    """Start looking for a new peak."""
    if is_available():
        torch.cuda.reset_peak_memory_stats(device)


def to_host(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Copy a CUDA tensor to host memory on the copy stream, and wait until it is there."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    stream = _copy_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.no_grad(), torch.cuda.stream(stream):
        copy.copy_(tensor, non_blocking=pinned)
    tensor.record_stream(stream)
    stream.synchronize()
    return copy


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a CUDA device on the copy stream; later work there waits for it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    stream, computing = _copy_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(computing)
    with torch.no_grad(), torch.cuda.stream(stream):
        copy.copy_(tensor, non_blocking=tensor.is_pinned())
    computing.wait_stream(stream)
    copy.record_stream(stream)
    return copy


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = _streams.by_device.get(index)
    if stream is None:
        stream = _streams.by_device[index] = torch.cuda.Stream(index)
    return stream
