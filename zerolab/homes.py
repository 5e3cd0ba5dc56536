"""Chapter 6: from a parameter to the place where it lives.

Owns one table, parameter -> (engine, bucket, slot), weak at both ends: a parameter in it keeps
no engine alive, and an engine no parameter. Whoever gets a parameter from a user and wants its
master weights, its gradient or its shard (`zero`, `utils`) begins here.

The parts of one parameter lie in the shards of several ranks. `ranges` says which part each rank
has, and `complete` lets every rank send its own part to the others, without any padding.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from . import comm, flat
from .bucket import Bucket, Slot
from .errors import UsageError

if TYPE_CHECKING:
    from .engine import Engine

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
