"""Chapter 7: 16-bit matrix products as a GPU computes them, also on a CPU that has none.

Owns nothing but a short list of operations. A tensor core multiplies 16-bit numbers, adds in
fp32 and rounds once. CPUs with bf16 instructions do the same; on others torch falls back to
loops that are 10 to 40 times slower than fp32. There the virtual GPU computes the product in
fp32 and rounds once: the same definition, at fp32's speed. The fp32 copies are workspace
inside a kernel, which no allocator of tensors sees, so the ledger does not count them.

Phases: the virtual GPU looks each operation up in `KERNELS`, empty where the hardware can do it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)

SAME_DTYPE = frozenset(PRODUCTS[:-1])  # attention's backward also takes an fp32 statistic


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def in_fp32(func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on 16-bit CPU tensors in fp32 and round its results once.

    Operands of different dtypes are left to torch, which refuses them.
    """
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    first = operands[0] if operands else None
    if first is None or first.dtype not in SIXTEEN_BIT or first.device.type != "cpu":
        return func(*args, **kwargs)
    if func in SAME_DTYPE and any(arg.dtype != first.dtype for arg in operands):
        return func(*args, **kwargs)
    if type(first) not in (torch.Tensor, torch.nn.Parameter):  # a fake tensor computes nothing
        return func(*args, **kwargs)
    wide_args, wide_kwargs = tree_map_only(torch.Tensor, _widen, (args, kwargs))
    return tree_map_only(
        torch.Tensor, lambda out: out.to(first.dtype), func(*wide_args, **wide_kwargs)
    )


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in SIXTEEN_BIT else tensor


KERNELS: frozenset = frozenset() if cpu_has_bf16() else frozenset(PRODUCTS)
