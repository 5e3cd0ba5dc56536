"""Chapter 4: where parameters lie in flat buffers and who owns which part, as plain data.

Owns no state. The layout is that of `zerolab.flat`, called through its module: a function that
the learner has plugged in draws its own picture, mistakes included, and `problems` names them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolab import flat
from zerolab.errors import UsageError

MAX_PARAMS = 100  # in one buffer: more are too thin to be seen
MAX_PARTS = 120  # parameters and shards in one picture
Range = tuple[int, int]


@dataclass(frozen=True)
class Param:
    """One parameter in its buffer."""

    name: str
    shape: tuple[int, ...]
    span: Range
    parts: tuple[tuple[int, int], ...]  # (rank, elements) of the shards that it lies in

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.span[1] - self.span[0]


@dataclass(frozen=True)
class Buffer:
    """One flat buffer: a bucket, or all parameters."""

    name: str
    params: tuple[Param, ...]
    numel: int
    padded: int
    shards: tuple[Range, ...]  # by rank

    @property
    def length(self) -> int:
        """How far the picture must reach, whatever the functions answered."""
        return max(self.numel, self.padded, 1, *(stop for _, stop in self.shards))

    @property
    def cuts(self) -> list[tuple[int, str]]:
        """Where a shard ends inside a parameter, and in which."""
        ends = sorted({stop for _, stop in self.shards} | {start for start, _ in self.shards})
        return [
            (end, param.name)
            for end in ends
            for param in self.params
            if param.span[0] < end < param.span[1]
        ]


def lay_out(
    shapes: Mapping[str, Sequence[int]], world_size: int, bucket_size: int | None = None
) -> list[Buffer]:
    """Lay parameters into flat buffers and cut these into shards, as the engine does.

    Args:
        shapes: the shape of each parameter by name, in the order of the model.
        world_size: how many shards.
        bucket_size: most elements of a bucket, which are filled from the last parameter on;
            None for one buffer with all of them, in order.

    Raises:
        UsageError: a value cannot work or cannot be drawn.
    """
    if not shapes:
        raise UsageError("0 parameters cannot be drawn: give the shape of one or more by name")
    if world_size < 1 or (bucket_size is not None and bucket_size < 1):
        raise UsageError(f"world_size={world_size} and bucket_size={bucket_size} must be 1 or more")
    named = [(name, tuple(shape)) for name, shape in shapes.items()]
    if bucket_size is None:
        return [_buffer("the flat buffer", named, world_size)]
    groups = flat.plan_buckets([math.prod(shape) for _, shape in named], bucket_size)
    return [
        _buffer(f"bucket {number}", [named[position] for position in group], world_size)
        for number, group in enumerate(groups)
    ]


def drawn(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return the first buffers, as many as one picture has room for, at least one.

    Raises:
        UsageError: even the first has more parameters than can be seen.
    """
    if len(buffers[0].params) > MAX_PARAMS:
        raise UsageError(
            f"{len(buffers[0].params)} parameters in one buffer cannot be drawn: give at most "
            f"{MAX_PARAMS}, such as those of one block, or a bucket_size"
        )
    parts = itertools.accumulate(len(b.params) + len(b.shards) for b in buffers)
    return buffers[: max(1, sum(count <= MAX_PARTS for count in parts))]


def _buffer(name: str, named: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> Buffer:
    """Lay parameters end to end, pad, and cut."""
    numels = [math.prod(shape) for _, shape in named]
    numel = sum(numels)
    shards = [flat.shard_bounds(numel, world_size, rank) for rank in range(world_size)]
    params = []
    for (own, shape), start, length in zip(named, flat.offsets(numels), numels, strict=True):
        span = (start, start + length)
        shared = [flat.intersect(span, shard) for shard in shards]
        parts = [(rank, stop - start) for rank, (start, stop) in enumerate(shared) if stop > start]
        params.append(Param(own, shape, span, tuple(parts)))
    padded = flat.padded_numel(numel, world_size)
    return Buffer(name, tuple(params), numel, padded, tuple((a, b) for a, b in shards))


def problems(buffer: Buffer) -> list[str]:
    """Return what is wrong with a cut, in words; nothing for a right one."""
    found = []
    if len({stop - start for start, stop in buffer.shards}) > 1:
        lengths = ", ".join(str(stop - start) for start, stop in buffer.shards)
        found.append(f"the shards are not equally long: {lengths}")
    for start, stop in _pieces(buffer):
        owners = [r for r, (a, b) in enumerate(buffer.shards) if a < stop and start < b]
        if not owners:
            found.append(f"{range_text(start, stop)} belong to no rank")
        elif len(owners) > 1:
            found.append(f"{range_text(start, stop)} belong to {ranks_text(owners)}")
    if buffer.padded < buffer.numel or buffer.padded % len(buffer.shards):
        found.append(f"{buffer.padded} elements hold {buffer.numel} in no equal parts")
    return found


def _pieces(buffer: Buffer) -> list[Range]:
    """Return the stretches between any two neighbouring ends, within the padded buffer."""
    ends = {0, max(buffer.numel, buffer.padded)}
    ends |= {end for shard in buffer.shards for end in shard}
    return list(itertools.pairwise(sorted(ends)))


# Words.


def range_text(start: int, stop: int) -> str:
    """Name a range of elements, ends included: "elements 9 to 11"."""
    return f"element {start:,}" if stop - start == 1 else f"elements {start:,} to {stop - 1:,}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 2", "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}"


def param_text(param: Param) -> str:
    """Return all about a parameter in a sentence or two."""
    shape = " x ".join(map(str, param.shape)) or "scalar"
    head = f"{param.name} ({shape}) takes {range_text(*param.span)}."
    if not param.parts:
        return f"{head} No rank owns any of it."
    if len(param.parts) == 1:
        return f"{head} {ranks_text([param.parts[0][0]]).capitalize()} owns all of it."
    shares = ", ".join(f"rank {rank} has {numel:,}" for rank, numel in param.parts)
    return f"{head} Cut by a boundary: {shares}."


def shard_text(buffer: Buffer, rank: int) -> str:
    """Return all about a shard in a sentence or two."""
    start, stop = buffer.shards[rank]
    if stop <= start:
        return f"Rank {rank} owns nothing here."
    padding = max(0, stop - max(start, buffer.numel))
    inside = [p.name for p in buffer.params if any(owner == rank for owner, _ in p.parts)]
    names = ", ".join(inside[:4]) + (f" and {len(inside) - 4} more" if len(inside) > 4 else "")
    held = f" of {names}" if names else ""
    more = f"; {padding:,} of them padding" if padding else ""
    return f"Rank {rank} owns {stop - start:,} elements{held}{more}: {range_text(start, stop)}."


def padding_text(buffer: Buffer) -> str:
    """Return why there is padding."""
    count, parts = buffer.padded - buffer.numel, len(buffer.shards)
    return (
        f"Padding: {count:,} unused element{'' if count == 1 else 's'}, so that {parts} shards "
        "can be equally long."
    )


def note(drawn_count: int, count: int) -> str:
    """Say how many buffers are drawn, where it is not all of them."""
    if drawn_count == count:
        return ""
    return f"Drawn: the first {drawn_count} of {count} buckets; the others are cut alike."


def finding(buffers: Sequence[Buffer]) -> str:
    """Return in words how much is padded and cut, or the first mistake."""
    world_size = len(buffers[0].shards)
    for buffer in buffers:
        wrong = problems(buffer)
        if wrong:
            return f"This cut cannot work: in {buffer.name}, {wrong[0]}."
    numel = sum(buffer.numel for buffer in buffers)
    padding = sum(buffer.padded - buffer.numel for buffer in buffers)
    cut = {name for buffer in buffers for _, name in buffer.cuts}
    where = "one flat buffer" if len(buffers) == 1 else f"{len(buffers)} buckets"
    own = sum(buffer.padded for buffer in buffers) // world_size
    text = f"{numel:,} elements in {where}, {padding:,} of padding: each of {world_size} ranks "
    text += f"owns {own:,}. "
    if not cut:
        return text + "No boundary cuts a parameter."
    if len(cut) == 1:
        return text + f"A boundary cuts {next(iter(cut))}."
    return text + f"Boundaries cut {len(cut)} of {sum(len(b.params) for b in buffers)} parameters."


def as_state(buffer: Buffer) -> dict[str, Any]:
    """Return a buffer as the script wants it."""
    shards = [
        {"span": list(span), "says": shard_text(buffer, rank)}
        for rank, span in enumerate(buffer.shards)
    ]
    params = [
        {
            "name": param.name,
            "span": list(param.span),
            "cut": len(param.parts) > 1,
            "owners": [rank for rank, _ in param.parts],
            "says": param_text(param),
        }
        for param in buffer.params
    ]
    return {
        "name": buffer.name,
        "numel": buffer.numel,
        "padded": buffer.padded,
        "length": buffer.length,
        "padding": padding_text(buffer) if buffer.padded > buffer.numel else "",
        "params": params,
        "shards": shards,
        "cuts": [[position, name] for position, name in buffer.cuts],
        "problems": problems(buffer),
    }
