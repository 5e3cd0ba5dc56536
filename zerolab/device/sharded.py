"""Chapter 6: what may still be done with a tensor whose storage is empty.

Owns one cache of permissions by operation. A sharded unit keeps its tensors but frees their
storage. A kernel that reads such a tensor crashes the process, so the virtual GPU refuses
before it runs. Operations that only look at shapes, or make another view, are harmless; the
few views that torch itself refuses then ("setStorage: ... out of bounds") get a better message.
"""

from typing import Any

_HARMLESS = ("set_", "detach_", "resize_", "resize_as_", "is_same_size", "_unsafe_view")
_harmless: dict[Any, bool] = {}


def is_harmless(func: Any) -> bool:
    """Say whether an operation leaves the contents of its arguments unread."""
    harmless = _harmless.get(func)
    if harmless is None:
        harmless = _harmless[func] = _makes_view(func) or _reads_shape_only(func)
    return harmless


def is_about_size(error: RuntimeError) -> bool:
    """Say whether torch refused because a storage is too small for a view."""
    return str(error).startswith("setStorage:")


def refusal(name: str, func: Any) -> RuntimeError:
    """Build the error for an operation on the empty storage of a unit.

    Args:
        name: the unit, such as `"blocks.3"`.
        func: the operation.
    """
    return RuntimeError(
        f"{func.overloadpacket} would read an empty tensor: parameters of {name} are sharded"
        f" now; use them inside forward or gather them"
    )


def _makes_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _reads_shape_only(func: Any) -> bool:
    name = func._schema.name.split("::")[1]
    return name in _HARMLESS or name.endswith("_like") or name.startswith(("new_", "sym_"))
