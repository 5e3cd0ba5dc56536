"""Chapter 12: errors of torch whose cause lies in how the engine is used, said in its words.

Owns nothing. Phases: the engine catches an error of forward and asks here whether it can be
explained; if not, the error goes on as it is.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .errors import UsageError


def explain_dtype(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Raise UsageError when a 16-bit model was given floating inputs of another dtype.

    Args:
        error: what the model's forward raised.
        inputs: its arguments, nested as they are.
        dtype: dtype of the engine's parameters.
    """
    found = {
        leaf.dtype
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
    }
    if dtype == torch.float32 or not found or "dtype" not in str(error):
        return
    given = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
    ours = str(dtype).removeprefix("torch.")
    raise UsageError(
        f"the model computes in {ours}, as the configuration says, and an input is {given}: cast "
        f"floating inputs, as in engine(x.to(torch.{ours})); the engine does not touch your data"
    ) from error
