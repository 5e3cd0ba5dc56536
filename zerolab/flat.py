"""Chapter 4: parameters laid end to end in one padded buffer, cut into equal shards.

Owns no data: these are the small functions about lengths and slices on which every stage
stands. A *range* is a pair `(start, stop)` of element positions, half open.

Phases of a buffer's life: plan (which parameters go together), pad (so that all ranks can
hold equally much), pack (copy the parameters in), view (let the parameters be slices of it).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

Range = tuple[int, int]


def padded_numel(numel: int, world_size: int) -> int:
    """Return the smallest multiple of `world_size` that holds `numel` elements.

    Args:
        numel: elements to hold, at least 0.
        world_size: how many equal shards the buffer is cut into, at least 1.

    Example: 10 elements for 4 ranks take 12; 12 take 12; 0 take 0.
    """
    return -(-numel // world_size) * world_size


def shard_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the range `(start, stop)` that `rank` owns in a buffer for `numel` elements.

    The buffer is padded to a multiple of `world_size`; all shards are equally long, in rank
    order, and together they cover the padded buffer. The last ones may hold only padding.

    Args:
        numel: elements before padding, at least 0.
        world_size: number of shards, at least 1.
        rank: whose shard, 0 <= rank < world_size.

    Example: 10 elements on 4 ranks: rank 0 owns (0, 3), rank 3 owns (9, 12).
    """
    shard_numel = padded_numel(numel, world_size) // world_size
    start = rank * shard_numel
    return start, start + shard_numel


def intersect(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the range that two ranges share; empty (start == stop) if they share nothing.

    Example: (0, 4) and (2, 7) share (2, 4).
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def offsets(numels: Sequence[int]) -> list[int]:
    """Return where each tensor starts when tensors of these lengths are laid end to end."""
    return [0, *accumulate(numels)][:-1]


def plan_buckets(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Group tensors into buckets of at most `limit` elements, last tensor first.

    Backward produces gradients roughly in reverse, so the bucket that fills first should hold
    the last parameters. A tensor longer than `limit` sits alone.

    Args:
        numels: length of each tensor, in the order of the model.
        limit: most elements a bucket may hold, unless a single tensor is longer.

    Returns:
        Groups of positions in `numels`; every position stands in exactly one.

    Example: lengths (4, 4, 9, 1, 2) with limit 8 give [[4, 3], [2], [1, 0]].
    """
    buckets: list[list[int]] = []
    room = 0
    for position in reversed(range(len(numels))):
        if not buckets or numels[position] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(position)
        room -= numels[position]
    return buckets


def pack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
    """Copy tensors end to end into `flat` [padded_numel] and fill what is left with zeros."""
    stop = 0
    for tensor, start in zip(tensors, starts, strict=True):
        stop = start + tensor.numel()
        flat[start:stop].copy_(tensor.detach().reshape(-1))
    flat[stop:].zero_()


def view(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return the tensor of this shape that begins at `start` in `flat`, without a copy."""
    return flat[start : start + shape.numel()].view(shape)
