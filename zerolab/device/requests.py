"""Chapter 0: how much an operation is about to ask for, where that is known before it runs.

Owns no data. The virtual GPU normally counts a result after the operation has made it. That
is too late in two cases: `torch.zeros(10**11)` would fill the real memory of the machine
before anybody could object, and a `resize_` that does not fit could not be undone.
"""

import math
from typing import Any

import torch

_aten = torch.ops.aten
RESIZE = _aten.resize_.default
_FACTORIES = frozenset(
    (
        _aten.empty.memory_format,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.rand.default,
        _aten.randn.default,
    )
)


def bytes_asked(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, device_type: str
) -> int:
    """Say how many bytes an operation will allocate, 0 where that is not known beforehand.

    Args:
        func: a factory such as `aten.zeros`, or `aten.resize_`; for others the answer is 0.
        args: its positional arguments.
        kwargs: its keyword arguments.
        device_type: only what is asked from this device counts.
    """
    first = args[0] if args else None
    if type(first) is list:
        return _of_factory(first, kwargs or {}, device_type) if func in _FACTORIES else 0
    if func is RESIZE and args[0].device.type == device_type:
        return _of_resize(args[0], args[1])
    return 0


def _of_factory(size: list[Any], options: dict[str, Any], device_type: str) -> int:
    device = options.get("device")
    if (device.type if device is not None else "cpu") != device_type:
        return 0
    dtype = options.get("dtype") or torch.get_default_dtype()
    return math.prod(size) * dtype.itemsize


def _of_resize(tensor: torch.Tensor, size: list[Any]) -> int:
    nbytes = int(tensor.storage_offset() + math.prod(size)) * tensor.element_size()
    return nbytes if nbytes > tensor.untyped_storage().nbytes() else 0
