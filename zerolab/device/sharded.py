"""Chapter 6: what may still be done with a tensor whose storage is empty.

Owns one cache of permissions by operation. A sharded unit keeps its tensors but frees their
storage. A kernel that reads such a tensor crashes the process, so `check` refuses before it
runs. Operations that only look at shapes, or make another view, are harmless.
"""

from typing import Any

import torch

_HARMLESS = ("set_", "detach_", "resize_", "resize_as_", "is_same_size", "_unsafe_view")
_permitted: dict[Any, bool] = {}


def check(tensor: torch.Tensor, name: str, func: Any) -> None:
    """Refuse an operation that would read the empty storage of a unit.

    Args:
        tensor: an argument whose storage holds 0 bytes.
        name: the unit it belongs to, such as `"blocks.3"`.
        func: the operation about to run.

    Raises:
        RuntimeError: naming the unit, the operation and the remedy.
    """
    if tensor.numel() == 0 or _is_permitted(func):
        return
    raise RuntimeError(
        f"{func.overloadpacket} would read an empty tensor: parameters of {name} are sharded"
        f" now; use them inside forward or gather them"
    )


def _is_permitted(func: Any) -> bool:
    permitted = _permitted.get(func)
    if permitted is None:
        permitted = _permitted[func] = _makes_view(func) or _reads_shape_only(func)
    return permitted


def _makes_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _reads_shape_only(func: Any) -> bool:
    name = func._schema.name.split("::")[1]
    return name in _HARMLESS or name.endswith("_like") or name.startswith(("new_", "sym_"))
