"""Chapter 6: what a parameter answers while its values lie in the shards of all ranks.

Owns no values. Between its unit's turns a parameter of stage 3 is an `AbsentParameter`, and an
ordinary `nn.Parameter` again for the turn, so that forward pays nothing for the watch:

    its shape, dtype, gradient, hooks    answered as ever
    anything else, the model running     the unit is borrowed (`unit_sharding`), then answered
    anything else, in between            an error that names the parameter and the remedy

The error is on one rank as on all: to gather on demand would wait for ranks that never ask.

Phases: `begin` when a unit is resharded, `end` just before its parameters are whole.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import homes, sharded_param
from .errors import UsageError

_SAFE = sharded_param.LOOKS_AT_SHAPE | frozenset(
    "data_ptr is_set_to is_pinned is_shared is_coalesced __dir__".split()
)
_ALIASES = frozenset(("detach", "data"))  # the same values by another tensor
_WORDS = {
    "__getitem__": "indexing",
    "__reduce_ex__": "pickling",
    "__deepcopy__": "deepcopy",
    "__array__": "numpy",
    "__eq__": "==",
}
_GONE = "sharded by an engine that is gone"
_CONVERSIONS = frozenset("to cpu cuda float double half bfloat16 type".split())


class AbsentValues(torch.Tensor):
    """What `param.detach()` and `param.data` are of an absent parameter: a shape and a name."""

    zerolab_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about the shape; refuse what would read or write values."""
        if _is_safe(func):
            return _plainly(func, args, kwargs or {})
        raise _refusal(_first(AbsentValues, args, kwargs).zerolab_name, func)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Say what there is."""
        return _text(self, self.zerolab_name)

    def __format__(self, spec: str) -> str:
        """Be shown in a text."""
        return format(repr(self), spec)


class AbsentParameter(nn.Parameter):
    """A parameter of an engine at stage 3 whose unit is sharded now."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values; else borrow the unit if the model runs, or refuse."""
        kwargs = kwargs or {}
        if _is_safe(func):
            return _plainly(func, args, kwargs)
        if _sets_data(func) and isinstance(args[0], AbsentParameter):
            return _set_data(func, *args)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, AbsentParameter):
                _borrow(leaf)
        param = _first(AbsentParameter, args, kwargs)
        return (
            func(*args, **kwargs) if param is None else _without_values(param, func, args, kwargs)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Be copied as whatever the parameter is: refused by its name."""
        return type(self).__torch_function__(torch.Tensor.__deepcopy__, (), (self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled, which needs the values."""
        return type(self).__torch_function__(torch.Tensor.__reduce_ex__, (), (self, protocol))

    def __hash__(self) -> int:
        """Be the same key that the parameter is when it is whole."""
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Say what there is."""
        return _text(self, _name_of(self))

    def __format__(self, spec: str) -> str:
        """Be shown in a text."""
        return format(repr(self), spec)


def begin(params: Iterable[nn.Parameter]) -> None:
    """The values of these parameters are gone; parameters of a class of their own stay of it."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = AbsentParameter


def end(params: Iterable[nn.Parameter]) -> None:
    """These parameters are about to be whole."""
    for param in params:
        if type(param) is AbsentParameter:
            param.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]


def _is_safe(func: Callable) -> bool:
    """Whether a function needs no values of the tensor that it is asked of."""
    name = func.__name__
    shaped_alike = name in _SAFE or name.endswith("_like") or name.startswith("new_")
    return shaped_alike or sharded_param.leaves_values_alone(func)


def _plainly(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function as if its arguments were ordinary tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _first(kind: type, args: Any, kwargs: Any) -> Any:
    """Return the first argument of a class, None if there is none."""
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, kind)), None)


def _sets_data(func: Callable) -> bool:
    """Whether a function is the setter behind `param.data = ...`."""
    return func.__name__ == "__set__" and _attribute(func) == "data"


def _attribute(func: Callable) -> str:
    """Return the name of the attribute that a getter or setter is of."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _set_data(func: Callable, param: AbsentParameter, value: torch.Tensor) -> None:
    """Give a parameter data of its own; the engine refuses those before they are used."""
    if value is not param:  # `model.to(...)` sets a parameter that it did not convert to itself
        end([param])
        _plainly(func, (param, value), {})


def _borrow(param: AbsentParameter) -> None:
    """Where the model is running, make a parameter whole: it is read outside its unit's turn."""
    home = homes.find(param)
    stage: Any = None if home is None else home.engine.sharding
    if home is not None and stage.running:
        stage.read_param(stage.unit_of[home.bucket])


def _without_values(param: AbsentParameter, func: Callable, args: tuple, kwargs: Any) -> Any:
    """Do what can be done without values: an alias, a conversion that changes nothing."""
    name = _attribute(func) if func.__name__ == "__get__" else func.__name__
    if name in _ALIASES:
        alias = _plainly(func, args, kwargs).as_subclass(AbsentValues)
        alias.zerolab_name = _name_of(param)
        return alias
    if name in _CONVERSIONS and args[0] is param:
        probe = torch.empty((), dtype=param.dtype, device=param.device)
        converted = func(probe, *args[1:], **kwargs)
        if converted is probe or isinstance(converted, str):  # `param.type()` tells the type
            return param if converted is probe else converted
    raise _refusal(_name_of(param), func)


def _name_of(param: AbsentParameter) -> str:
    home = homes.find(param)
    if home is None:
        return f"of shape {tuple(param.shape)}, {_GONE}"
    return repr(home.slot.name)


def _text(values: torch.Tensor, name: str) -> str:
    shape, dtype = tuple(values.shape), values.dtype
    return f"Parameter {name} sharded: no values here of shape {shape}, dtype={dtype}"


def _refusal(name: str, func: Callable) -> UsageError:
    what = _attribute(func) if func.__name__ in ("__get__", "__set__") else func.__name__
    said = f"{_WORDS.get(what, what)} needs the values of parameter {name}"
    if name.endswith(_GONE):
        return UsageError(f"{said}, and the values with it: keep the engine as long as the model")
    return UsageError(
        f"{said}, which are sharded outside of forward and backward: put it into `with "
        "zero.GatheredParameters(param):`, entered by every rank, and give it modifier_rank=0 to "
        "change values"
    )
