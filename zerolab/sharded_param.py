"""Chapter 6: a parameter that is sharded before any engine exists.

Owns the slices of parameters that `zero.Init` has cut, and the list of those that are whole again
for a moment. A model that is larger than one GPU is built module by module; when a module's
constructor has ended, each of its parameters keeps only this rank's slice:

    whole    an ordinary nn.Parameter
    sharded  a ShardedParameter: shape, dtype and device as before, and one slice of the values

Phases: `shard` cuts. Whoever *touches* a sharded parameter, that is, asks for more than its shape,
makes it whole: `torch.nn.init`, `Module.apply`, `load_state_dict` and `model.half()` work as if
nothing had happened. It stays whole until `settle`, which comes with the next module's turn, so
that no more than one module is whole at a time. In the end `pack` moves parameters into a bucket.

Every rank must touch the same parameters in the same order: each touch is a collective.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import comm, device, flat, homes
from .errors import UsageError

LOOKS_AT_SHAPE = frozenset(
    "dim ndimension numel nelement size stride storage_offset element_size get_device is_contiguous"
    " is_floating_point is_complex is_same_size __len__ __hash__ untyped_storage requires_grad_"
    " register_hook register_post_accumulate_grad_hook _has_compatible_shallow_copy_type"
    " has_names is_inference is_signed retain_grad".split()
)
_GIVES_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))

_POISON: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape that holds one shared element, a NaN.

    Whatever uses it by mistake gives NaN, and nothing crashes: with no memory at all behind
    the parameter, `param.norm()` or `deepcopy` would end the process.
    """
    key = (param.dtype, param.device)
    if key in _POISON:
        return _POISON[key].expand(param.shape)
    with device.paused():
        poison = torch.full((), _poison(param.dtype), dtype=param.dtype, device=param.device)
    if type(poison) is torch.Tensor:  # the fake tensors of a dry run belong to that run
        _POISON[key] = poison
    return poison.expand(param.shape)


def _poison(dtype: torch.dtype) -> float:
    """Return a value that spreads wherever it is used."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def placeholder_address(dtype: torch.dtype, where: torch.device) -> int | None:
    """Return where the shared element lies, None if there is none."""
    poison = _POISON.get((dtype, where))
    return None if poison is None else poison.data_ptr()


def is_placeholder(param: torch.Tensor) -> bool:
    """Whether there is nothing behind a parameter but the shared element."""
    return param.data_ptr() == placeholder_address(param.dtype, param.device)


def lost_writes() -> bool:
    """Whether somebody has written to a placeholder, which changes no parameter; mend it.

    Most such writes are refused by torch; `zero_()` and `fill_()` on `.data` are not.
    """
    found = False
    for poison in _POISON.values():
        if poison.is_floating_point() and not bool(poison.isnan()):
            poison.fill_(float("nan"))
            found = True
    return found


@dataclass(slots=True)
class Slice:
    """What one rank keeps of a sharded parameter."""

    values: torch.Tensor  # [shard_numel], the last ones padded with zeros
    module: weakref.ref[nn.Module]  # who owns the parameter
    world_size: int


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank holds a slice; touching it makes it whole and ordinary."""

    zero_slice: Slice

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let questions about the shape pass; before anything else, make the arguments whole."""
        kwargs = kwargs or {}
        if leaves_values_alone(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func.__name__ == "__set__" and isinstance(args[0], ShardedParameter):
            _loosen(args[0], forget(args[0]))  # `param.data = ...`: the old values do not matter
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, ShardedParameter):
                make_whole(leaf)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the slice: no rank needs another one for that."""
        if id(self) in memo:
            return memo[id(self)]
        mine = self.zero_slice
        copy = nn.Parameter(placeholder(self), requires_grad=self.requires_grad)
        _become_sharded(copy, Slice(mine.values.clone(), mine.module, mine.world_size))
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled whole."""
        make_whole(self)
        return nn.Parameter.__reduce_ex__(self, protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Say what there is without asking other ranks."""
        own, shape = self.zero_slice.values.numel(), tuple(self.shape)
        return f"Parameter sharded: {own} elements here of shape {shape}, dtype={self.dtype}"


@dataclass(slots=True)
class Loose:
    """A parameter that was touched and is whole for the moment."""

    param: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]


class _Rank(threading.local):
    """What one rank remembers; in the lockstep world a rank is a thread."""

    def __init__(self) -> None:
        self.loose: list[Loose] = []


_rank = _Rank()


@torch.no_grad()
def shard(param: nn.Parameter, module: nn.Module, src: int = 0) -> None:
    """Keep this rank's slice of a whole parameter; the values of rank `src` win everywhere."""
    world_size, numel = comm.get_world_size(), param.numel()
    whole = param.data.contiguous().view(-1)  # [numel]
    comm.broadcast(whole, src=src, purpose="control")
    start, stop = flat.shard_bounds(numel, world_size, comm.get_rank())
    with device.tag("param"):
        own = torch.zeros(stop - start, dtype=whole.dtype, device=whole.device)
    part = whole[start:stop]
    own[: part.numel()].copy_(part)
    param.data = placeholder(param)
    _become_sharded(param, Slice(own, weakref.ref(module), world_size))


def _become_sharded(param: nn.Parameter, own: Slice) -> None:
    """Change the class in place: modules, optimizers and ties keep the very same object."""
    param.__class__ = ShardedParameter
    assert isinstance(param, ShardedParameter)
    param.zero_slice = own


def forget(param: ShardedParameter) -> Slice:
    """Make a parameter ordinary; its values are the caller's business. Return its slice."""
    own = param.zero_slice
    del param.zero_slice
    param.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
    return own


@torch.no_grad()
def gather_into(target: torch.Tensor, param: ShardedParameter) -> None:
    """Write the whole values of a sharded parameter into `target` [numel]; all ranks call it."""
    own, numel = param.zero_slice, param.numel()
    if own.world_size != comm.get_world_size():
        raise UsageError(
            f"this model was built under zero.Init on {own.world_size} ranks and is used on "
            f"{comm.get_world_size()}: build it inside the run, after init_distributed()"
        )
    parts = homes.ranges(numel, own.world_size, (0, numel))
    start, stop = parts[comm.get_rank()]
    target[start:stop].copy_(own.values[: stop - start])
    homes.complete(target, parts)


def make_whole(param: ShardedParameter) -> None:
    """Gather a touched parameter; what was whole of other modules is sharded again first."""
    settle(but=param.zero_slice.module())
    _loosen(param, unshard(param))


def _loosen(param: nn.Parameter, own: Slice) -> None:
    """Remember a parameter that is whole for the moment."""
    _rank.loose.append(Loose(weakref.ref(param), own.module))


def unshard(param: ShardedParameter) -> Slice:
    """Gather a parameter for as long as the caller likes, and return the slice it had."""
    with device.tag("gathered"):
        whole = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
    gather_into(whole, param)
    shape = param.shape
    own = forget(param)
    param.data = whole.view(shape)
    return own


def restore(param: nn.Parameter, own: Slice) -> None:
    """Go back to the slice that `unshard` returned; what was changed since is gone."""
    param.data = placeholder(param)
    _become_sharded(param, own)


def settle(but: nn.Module | None = None) -> None:
    """Shard the touched parameters again, as rank 0 has left them.

    One whose values somebody still holds (`weight.data` in a variable) stays whole, so that
    nothing written to it later is lost.

    Args:
        but: a module whose parameters stay whole.
    """
    waiting, _rank.loose = _rank.loose, []
    for entry in waiting:
        param, module = entry.param(), entry.module()
        if param is None or module is None or isinstance(param, ShardedParameter):
            continue
        if module is but or _uses(param) > _ALONE:
            _rank.loose.append(entry)
        else:
            shard(param, module)


def is_loose(param: nn.Parameter) -> bool:
    """Whether a parameter was touched and will be sharded again by `settle`."""
    return any(entry.param() is param for entry in _rank.loose)


@torch.no_grad()
def pack(flat_param: torch.Tensor, params: Sequence[nn.Parameter], starts: Sequence[int]) -> None:
    """Do what `flat.pack` does, for parameters of which some may be sharded.

    A sharded one is gathered straight into its place and is ordinary afterwards; the caller sets
    its data. So no more is whole at a time than the buffer.

    Args:
        flat_param: [padded_numel].
        params: of one dtype; laid end to end.
        starts: where each one begins.
    """
    sharded = {n: param for n, param in enumerate(params) if isinstance(param, ShardedParameter)}
    for number, param in sharded.items():
        target = flat_param[starts[number] : starts[number] + param.numel()]
        gather_into(target, param)
        shape = param.shape
        forget(param)
        param.data = target.view(shape)
    flat.pack(flat_param, params, starts)


def _uses(param: torch.Tensor) -> int:
    """Return a number that grows with every tensor that shares the parameter's storage."""
    return torch._C._storage_Use_Count(param.untyped_storage()._cdata)


_ALONE = _uses(torch.empty(1))  # of a storage that one tensor has


def leaves_values_alone(func: Callable) -> bool:
    """Whether a function asks for, or sets, something else than the values."""
    attribute = getattr(func, "__self__", None)  # of a getter or setter: its descriptor
    if func.__name__ == "__get__":
        return getattr(attribute, "__name__", "") not in _GIVES_VALUES
    if func.__name__ == "__set__":
        return getattr(attribute, "__name__", "") != "data"
    return func.__name__ in LOOKS_AT_SHAPE
