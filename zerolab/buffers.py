"""Chapter 3: buffers, the tensors of a model that nobody trains. Rank 0's values win.

Owns the version of every buffer at the last synchronisation. Running statistics drift apart
while each rank sees its own data; DistributedDataParallel sends rank 0's before every
forward. Here they are sent after the optimizer's step, and only those that something wrote
to: a buffer that autograd saved in one forward is never overwritten before its backward, and
a model whose buffers are constants sends nothing.

Phases: `changed` says what this rank wrote to; the ranks agree (`precision.agree`); `send`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from . import comm


class Buffers:
    """The distinct buffers of a model on this rank."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Bring floating buffers to `dtype` (None: leave them) and all to rank 0's values."""
        for module in model.modules():
            for name, value in module._buffers.items():
                if value is not None and dtype is not None and value.is_floating_point():
                    module._buffers[name] = value.to(dtype)
        self.model = model
        self.versions: dict[str, int] = {}
        self.send([True] * len(self.named()))

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) of every buffer that holds something."""
        return [(name, value) for name, value in self.model.named_buffers() if value.numel()]

    def changed(self) -> list[bool]:
        """Return for every buffer whether it was written to, or replaced, since it was sent."""
        return [self.versions.get(name) != _version(value) for name, value in self.named()]

    @torch.no_grad()
    def send(self, which: Sequence[bool]) -> None:
        """Copy rank 0's values of the chosen buffers to all ranks: one broadcast a dtype."""
        chosen = [pair for pair, take in zip(self.named(), which, strict=True) if take]
        for dtype in dict.fromkeys(value.dtype for _, value in chosen):
            same = [value for _, value in chosen if value.dtype == dtype]
            packed = torch.cat([value.reshape(-1) for value in same])
            comm.broadcast(packed, src=0, purpose="control")
            pieces = packed.split([value.numel() for value in same])
            for value, piece in zip(same, pieces, strict=True):
                value.copy_(piece.view(value.shape))
        for name, value in self.named():
            self.versions[name] = _version(value)


def _version(value: torch.Tensor) -> int:
    """Return a number that changes when the buffer is written to or is another tensor."""
    return hash((value._version, value.untyped_storage()._cdata))
