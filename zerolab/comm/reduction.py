"""Chapter 2: one sum for every world, in rank order and with one rounding.

Floating point addition is not associative, so "the sum over ranks" is only defined once the
order is. Ours: rank 0 first, the others after it in turn, in fp32 (fp64 and integers keep
their dtype); "avg" divides by the number of ranks in fp32; the result is rounded to its dtype
once, at the end. All worlds use this function, and that is why stage 3 on gloo can equal stage 0
on threads bit for bit.

Long tensors are reduced block by block: partial sums and the division then stay in the cache
instead of passing through memory once more. Owns no data.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

OPS = ("sum", "avg", "max")
LOW = (torch.bfloat16, torch.float16)
BLOCK_NUMEL = 2**16  # 256 KiB of fp32


def reduce_rows(rows: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Reduce one flat tensor a rank into `out`.

    Args:
        rows: the tensors of rank 0, 1, ..., each [numel]; none is changed unless it is `out`.
        op: "sum", "avg" or "max".
        out: [numel], of the dtype of the rows; it may be one of them.
    """
    low = out.dtype in LOW and op != "max"
    reduce_block = _low_block if low else _max_block if op == "max" else _sum_block
    needs_partial = low or len(rows) > 2
    partial = torch.empty(
        min(out.numel(), BLOCK_NUMEL) if needs_partial else 0,
        dtype=torch.float32 if low else out.dtype,
        device=out.device,
    )
    divisor = len(rows) if op == "avg" else 1
    for start in range(0, out.numel(), BLOCK_NUMEL):
        stop = min(start + BLOCK_NUMEL, out.numel())
        block = [row[start:stop] for row in rows]
        reduce_block(block, divisor, out[start:stop], partial[: stop - start])


def _sum_block(rows: list[Tensor], divisor: int, out: Tensor, partial: Tensor) -> None:
    """Add in the dtype of the rows; only the last addition writes `out`, a row perhaps."""
    _fold(torch.add, rows, out, partial)
    divide(out, divisor)


def _max_block(rows: list[Tensor], divisor: int, out: Tensor, partial: Tensor) -> None:
    """Take the largest; a NaN anywhere stays a NaN."""
    _fold(torch.maximum, rows, out, partial)


def _low_block(rows: list[Tensor], divisor: int, out: Tensor, partial: Tensor) -> None:
    """Add 16-bit rows in fp32: only the last `copy_` rounds."""
    partial.copy_(rows[0])
    for row in rows[1:]:
        partial.add_(row)
    divide(partial, divisor)
    out.copy_(partial)


def divide(values: Tensor, divisor: int) -> None:
    """Divide in place. By a power of two a product gives the same bits, in half the time."""
    if divisor & (divisor - 1):
        values.div_(divisor)
    elif divisor > 1:
        values.mul_(1.0 / divisor)


def _fold(combine: Callable[..., Tensor], rows: list[Tensor], out: Tensor, partial: Tensor) -> None:
    """Combine the rows one after the other."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    so_far = rows[0]
    for row in rows[1:-1]:
        so_far = combine(so_far, row, out=partial)
    combine(so_far, rows[-1], out=out)
