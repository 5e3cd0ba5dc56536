"""Chapter 2: one sum for every world, in rank order and with one rounding.

Floating point addition is not associative, so "the sum over ranks" is only defined once the
order is. Ours: rank 0 first, the others after it in turn, in fp32 (fp64 and integers keep
their dtype); "avg" divides by the number of ranks in fp32; the result is rounded to its dtype
once, at the end. All worlds use this function or something that gives the same bits, and that
is why stage 3 on gloo can equal stage 0 on threads bit for bit. Owns no data.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

OPS = ("sum", "avg", "max")
_LOW = (torch.bfloat16, torch.float16)


def reduce_rows(rows: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Reduce one flat tensor a rank into `out`.

    Args:
        rows: the tensors of rank 0, 1, ..., each [numel]; `out` may be `rows[0]` but no other.
        op: "sum", "avg" or "max".
        out: [numel], of the dtype of the rows.
    """
    if op == "max":
        _fold(torch.maximum, rows, out)
    elif out.dtype in _LOW:
        out.copy_(_sum_in_fp32(rows, op))
    else:
        _fold(torch.add, rows, out)
        if op == "avg":
            out.div_(len(rows))


def _fold(function, rows: Sequence[Tensor], out: Tensor) -> None:
    """Combine the rows one after the other, straight into `out`: no copy of any row."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    function(rows[0], rows[1], out=out)
    for row in rows[2:]:
        function(out, row, out=out)


def _sum_in_fp32(rows: Sequence[Tensor], op: str) -> Tensor:
    """Add 16-bit rows in fp32: only the caller's `copy_` rounds."""
    total = rows[0].float()  # [numel] fp32
    for row in rows[1:]:
        total.add_(row)
    return total.div_(len(rows)) if op == "avg" else total
