"""Chapter 2: scratch memory for collectives, used again by the next call of the same size.

Owns the buffers that no call is using. A fresh buffer of 16 MiB costs the kernel some 4,000 page
faults, more time than the sum that it is for; a training step asks for the same few sizes over
and over. What is kept is bounded by `KEEP_BYTES`, and let go when the engine says
that a row of calls has ended: between two steps nothing is held.
"""

import torch
from torch import Tensor

KEEP_BYTES = 64 * 2**20


class Scratch:
    """Buffers by number of elements and dtype."""

    def __init__(self) -> None:
        """Start with none."""
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Return an uninitialised tensor with the size, dtype and device of `like`."""
        free = self._free.get((like.numel(), like.dtype))
        if free:
            buffer = free.pop()
            self._kept_bytes -= buffer.nbytes
            return buffer
        return torch.empty_like(like)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; forget it when enough are kept."""
        if self._kept_bytes + buffer.nbytes <= KEEP_BYTES:
            self._kept_bytes += buffer.nbytes
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def release(self) -> None:
        """Forget all buffers that no call is using."""
        self._free.clear()
        self._kept_bytes = 0
