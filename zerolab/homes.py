"""Chapter 6: from a parameter to the place where it lives.

Owns one table, parameter -> (engine, bucket, slot), weak at both ends: a parameter in it keeps
no engine alive, and an engine no parameter. Whoever gets a parameter from a user and wants its
master weights, its gradient or its shard (`zero`, `utils`) begins here.

The parts of one parameter lie in the shards of several ranks, and what belongs to them (weights,
gradients, moments) lies beside this rank's segments. `read_whole` puts the parts of all ranks
together and `write_whole` takes one's own out; `read_local` and `write_local` stay on this rank.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from . import comm, flat
from .bucket import Bucket, Segment, Slot
from .errors import UsageError

if TYPE_CHECKING:
    from .engine import Engine

ValueOf = Callable[[Segment], torch.Tensor | None]

_homes = WeakTensorKeyDictionary()  # param -> (engine, bucket, position), the two weakly


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter lives.

    Attributes:
        engine: the engine that trains it.
        bucket: the bucket that holds it.
        position: its place among the bucket's slots.
    """

    engine: "Engine"
    bucket: Bucket
    position: int

    @property
    def slot(self) -> Slot:
        """The parameter's slot."""
        return self.bucket.slots[self.position]

    @property
    def segments(self) -> list[Segment]:
        """What this rank updates of the parameter, in order; none if it is frozen."""
        return [s for s in self.bucket.segments if s.slot == self.position]


def register(engine: "Engine") -> None:
    """Enter all parameters of an engine; a parameter that had another engine has this one now."""
    engine_ref = weakref.ref(engine)
    for bucket in engine.sharding.buckets:
        bucket_ref = weakref.ref(bucket)
        for position, slot in enumerate(bucket.slots):
            _homes[slot.param] = (engine_ref, bucket_ref, position)


def find(param: torch.Tensor) -> Home | None:
    """Return where a parameter lives, None if no living engine has it."""
    entry = _homes.get(param)
    if entry is None:
        return None
    engine_ref, bucket_ref, position = entry
    engine, bucket = engine_ref(), bucket_ref()
    return None if engine is None or bucket is None else Home(engine, bucket, position)


def engines() -> "list[Engine]":
    """Return the engines that are alive and train something."""
    living = (engine_ref() for engine_ref, *_ in list(_homes.values()))
    return list({id(engine): engine for engine in living if engine is not None}.values())


def ranges(numel: int, world_size: int, span: flat.Range) -> list[flat.Range]:
    """Return, for every rank, which elements of a parameter lie in its shard.

    Args:
        numel: elements of the buffer that is cut into shards.
        world_size: number of shards.
        span: where the parameter lies in the buffer.

    Returns:
        A range for each rank, counted from the parameter's first element; empty for most.
    """
    found = []
    for rank in range(world_size):
        start, stop = flat.intersect(span, flat.shard_bounds(numel, world_size, rank))
        found.append((start - span[0], stop - span[0]))
    return found


def complete(full: torch.Tensor, parts: Sequence[flat.Range]) -> None:
    """Fill in the parts that other ranks have; every rank calls it, its own part in place.

    Args:
        full: [numel], of which `full[slice(*parts[rank])]` is right on this rank.
        parts: one range for each rank.
    """
    for rank, (start, stop) in enumerate(parts):
        if start < stop:
            comm.broadcast(full[start:stop], src=rank, purpose="control")


def _placed(home: Home) -> Iterator[tuple[Segment, flat.Range]]:
    """Yield the own segments of a parameter and their ranges, counted from its first element."""
    origin = home.engine.sharding.owned_range(home.bucket)[0]
    for segment in home.segments:
        if segment.param.numel():
            start = origin + segment.start - home.slot.offset
            yield segment, (start, start + segment.param.numel())


def read_whole(home: Home, value_of: ValueOf) -> torch.Tensor | None:
    """Put a parameter's parts from all ranks together, as fp32 [shape]."""
    slot, bucket = home.slot, home.bucket
    values = [value_of(segment) for segment in home.segments]
    if any(value is None for value in values):
        return None
    if values and values[0] is not None and values[0].dim() == 0:
        return values[0].detach().clone()
    full = torch.zeros(slot.numel, device=bucket.device)
    with torch.no_grad():
        for segment, span in _placed(home):
            full[slice(*span)] = value_of(segment)  # pyright: ignore[reportArgumentType]
    if len(home.engine.sharding.owned_shards(bucket)) < bucket.world_size:
        complete(full, ranges(bucket.numel, bucket.world_size, slot.span))
    return full.view(slot.shape)


def read_local(home: Home, value_of: ValueOf) -> torch.Tensor | None:
    """Lay the own parts of a parameter end to end, as a fp32 copy [own_numel]."""
    values = [value_of(segment) for segment in home.segments]
    found = [value.detach().float() for value in values if value is not None]
    if len(found) < len(values):
        return None
    if found and found[0].dim() == 0:
        return found[0].clone()
    return torch.cat(found) if found else torch.zeros(0, device=home.bucket.device)


@torch.no_grad()
def write_whole(home: Home, value_of: ValueOf, value: torch.Tensor) -> None:
    """Copy the own parts out of a whole value."""
    whole = value.detach().reshape(-1)
    for segment, span in _placed(home):
        target = value_of(segment)
        assert target is not None
        target.copy_(whole.view(()) if target.dim() == 0 else whole[slice(*span)])


@torch.no_grad()
def write_local(home: Home, value_of: ValueOf, value: torch.Tensor) -> None:
    """Copy a flat value of the own parts into them."""
    numels = [segment.param.numel() for segment in home.segments]
    own_numel = sum(numels)
    if value.numel() != own_numel:
        raise UsageError(
            f"this rank has {own_numel} elements of {home.slot.name}, the value {value.numel()}"
        )
    parts = value.detach().reshape(-1).split(numels)
    for segment, part in zip(home.segments, parts, strict=True):
        target = value_of(segment)
        assert target is not None
        target.copy_(part)


def as_params(params: object) -> list[nn.Parameter]:
    """Return a list of parameters, whether one was given, several, or a generator of them."""
    several: Any = [params] if isinstance(params, torch.Tensor) else params
    listed = list(several) if isinstance(several, Iterable) else [several]
    for param in listed:
        if not isinstance(param, nn.Parameter):
            raise UsageError(
                f"expected an nn.Parameter or several, got {type(param).__name__}; "
                "give module.parameters(), a list, or one parameter"
            )
    return list(dict.fromkeys(listed))
