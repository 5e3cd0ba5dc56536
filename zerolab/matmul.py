"""Chapter 1: bf16 matrix products on CPUs that have no instructions for them.

Owns nothing. A GPU's tensor cores take bf16 numbers, add up in fp32 and round once. Recent CPUs
do the same; on older ones torch falls back to loops that take 10 to 50 times as long as fp32.
There we do in software what tensor cores do: widen, multiply in fp32, round once. The wide
copies exist only inside the product, as a kernel's workspace does, so no ledger counts them;
what autograd remembers and what comes out are the same tensors as for `F.linear`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import device


def has_bf16_products() -> bool:
    """Tell whether torch has fast bf16 products for this CPU."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return ask is not None and bool(ask())


SLOW_BF16 = not has_bf16_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features], or None.
    """
    if SLOW_BF16 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        rows = _WideLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
        return rows.view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias)


def wide_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right + bias`, added up in fp32 and rounded once."""
    with device.paused():
        product = left.float() @ right.float()  # [rows, columns] fp32
        if bias is not None:
            product += bias.float()
    return product.to(left.dtype)


class _WideLinear(torch.autograd.Function):
    """`F.linear` on [rows, in_features] by wide products, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            wide_product(grad, weight) if need_x else None,
            wide_product(grad.t(), x) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )
