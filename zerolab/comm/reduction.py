"""Chapter 2: one sum for every world, in rank order and with one rounding.

Floating point addition is not associative, so "the sum over ranks" is only defined once the
order is. Ours: rank 0 first, the others after it in turn, in fp32 (fp64 and integers keep
their dtype); "avg" divides by the number of ranks in fp32; the result is rounded to its dtype
once, at the end. All worlds use this function or something that gives the same bits, and that
is why stage 3 on gloo can equal stage 0 on threads bit for bit. Owns no data.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

OPS = ("sum", "avg", "max")
LOW = (torch.bfloat16, torch.float16)


def needs_fp32(dtype: torch.dtype, op: str) -> bool:
    """Tell whether partial sums must be kept wider than the result."""
    return dtype in LOW and op != "max"


def reduce_rows(rows: Sequence[Tensor], op: str, out: Tensor, partial: Tensor) -> None:
    """Reduce one flat tensor a rank into `out`, which is written last.

    Args:
        rows: the tensors of rank 0, 1, ..., each [numel]; `out` may be any one of them.
        op: "sum", "avg" or "max".
        out: [numel], of the dtype of the rows.
        partial: [numel] for sums on the way, fp32 where `needs_fp32`, else of the rows' dtype;
            it may be row 0 or 1, or `out` if `out` is none of the rows.
    """
    if needs_fp32(out.dtype, op):
        _sum_low(rows, op, out, partial)
        return
    combine = torch.maximum if op == "max" else torch.add
    _fold(combine, rows, out, partial)
    if op == "avg":
        out.div_(len(rows))


def _fold(
    combine: Callable[..., Tensor], rows: Sequence[Tensor], out: Tensor, partial: Tensor
) -> None:
    """Combine the rows one after the other; no row is copied and none is changed."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    so_far = rows[0]
    for row in rows[1:-1]:
        so_far = combine(so_far, row, out=partial)
    combine(so_far, rows[-1], out=out)


def _sum_low(rows: Sequence[Tensor], op: str, out: Tensor, partial: Tensor) -> None:
    """Add 16-bit rows in fp32: only the last `copy_` rounds."""
    partial.copy_(rows[0])
    for row in rows[1:]:
        partial.add_(row)
    if op == "avg":
        partial.div_(len(rows))
    out.copy_(partial)
