"""Chapter 1: what is left of a model when only lengths count.

Owns a `Layout`: the units of a model and their buckets, cut as `zerolab.bucket` cuts them, but
from lengths alone, so that a model of any size can be laid out on the meta device or from a list
of numbers. Phases: `cut` a unit's lengths into buckets, pad each bucket so that all ranks hold
equally much, count.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate

from torch import nn

from .. import bucket, flat
from ..errors import UsageError


@dataclass(slots=True)
class BucketLayout:
    """The lengths of one bucket, as one rank sees it.

    Attributes:
        numels: elements of each parameter, in the order in which they lie in the bucket.
        world_size: into how many shards it is cut.
        rank: whose shard is "own".
        trained: whether the optimizer updates it; frozen parameters have buckets of their own.
        persistent: whether stage 3 keeps it whole (`stage3_param_persistence_threshold`).
    """

    numels: tuple[int, ...]
    world_size: int
    rank: int = 0
    trained: bool = True
    persistent: bool = False

    numel: int = field(init=False)  # without padding
    shard_numel: int = field(init=False)  # of one shard, padding included
    padded_numel: int = field(init=False)  # the smallest multiple of the world size for all

    def __post_init__(self) -> None:
        """Count the elements once."""
        self.numel = sum(self.numels)
        self.shard_numel = -(-self.numel // self.world_size)
        self.padded_numel = self.shard_numel * self.world_size

    @property
    def pad_numel(self) -> int:
        """Elements of padding, fewer than the world size."""
        return self.padded_numel - self.numel

    @property
    def own_numel(self) -> int:
        """Elements of the own shard that are no padding."""
        return max(0, min(self.shard_numel, self.numel - self.rank * self.shard_numel))

    @property
    def num_pieces(self) -> int:
        """Pieces of the bucket when it is cut at the ends of parameters and at those of shards."""
        if self.world_size == 1:
            return len(self.numels)
        borders = {self.shard_numel * rank for rank in range(1, self.world_size)}
        ends = set(accumulate(self.numels))
        return len((ends | {border for border in borders if border < self.numel}) - {0})


@dataclass(slots=True)
class Layout:
    """A model cut into units and buckets, as one rank sees it.

    Attributes:
        world_size: into how many shards every bucket is cut.
        units: the buckets of each unit, in the order of forward, root first.
        padded_numel: P, elements of all trained buckets with padding.
        numel: E, elements of all trained parameters.
    """

    world_size: int
    units: tuple[tuple[BucketLayout, ...], ...]
    padded_numel: int = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        """Add the elements up once."""
        self.padded_numel = sum(each.padded_numel for each in self.trained)
        self.numel = sum(each.numel for each in self.trained)

    @property
    def buckets(self) -> list[BucketLayout]:
        """All buckets in the order of backward, the order in which they are reduced."""
        return [each for unit in reversed(self.units) for each in unit]

    @property
    def trained(self) -> list[BucketLayout]:
        """The buckets that get gradients."""
        return [each for each in self.buckets if each.trained]

    @property
    def own_numel(self) -> int:
        """Elements of trained parameters that lie in this rank's shards."""
        return sum(each.own_numel for each in self.trained)

    @property
    def num_params(self) -> int:
        """Trained parameter tensors; each has one segment in an owned shard, empty if need be."""
        return sum(len(each.numels) for each in self.trained)

    @property
    def num_pieces(self) -> int:
        """Segments of a rank that owns all shards."""
        return sum(each.num_pieces for each in self.trained)

    @property
    def gathered_numel(self) -> int:
        """Elements that stage 3 gathers: all buckets, frozen ones too, but the persistent."""
        return sum(each.padded_numel for each in self.buckets if not each.persistent)

    @property
    def persistent_numel(self) -> int:
        """Elements that stage 3 keeps whole, trained or not, with padding."""
        return sum(each.padded_numel for each in self.buckets if each.persistent)

    @property
    def largest_bucket_numel(self) -> int:
        """Elements of the largest trained bucket, with padding."""
        return max((each.padded_numel for each in self.trained), default=0)

    def unit_numels(self) -> list[int]:
        """Elements of each unit that appear when stage 3 gathers it."""
        return [sum(b.padded_numel for b in unit if not b.persistent) for unit in self.units]


def cut(
    numels: Sequence[int],
    bucket_numel: int,
    world_size: int,
    rank: int = 0,
    *,
    trained: bool = True,
) -> tuple[BucketLayout, ...]:
    """Cut one unit's parameters into buckets, last parameter first.

    Args:
        numels: elements of each parameter, in the order of the model.
        bucket_numel: most elements a bucket may hold (DeepSpeed's `reduce_bucket_size`, which
            counts elements too); a longer parameter sits alone.
        world_size: into how many shards every bucket is cut.
        rank: whose shards are "own".
        trained: whether the optimizer updates these parameters.

    Example: lengths (4, 4, 9, 1, 2) with 8 a bucket and 4 ranks: buckets of 3, 9 and 8 elements,
    padded to 4, 12 and 8.
    """
    return _cut(numels, bucket_numel, world_size, rank, trained, persistent=False)


def _cut(
    numels: Sequence[int],
    bucket_numel: int,
    world_size: int,
    rank: int,
    trained: bool,
    persistent: bool,
) -> tuple[BucketLayout, ...]:
    """Cut parameters that may share buckets."""
    _at_least_one(bucket_numel=bucket_numel, world_size=world_size)
    return tuple(
        BucketLayout(
            tuple(numels[position] for position in positions), world_size, rank, trained, persistent
        )
        for positions in flat.plan_buckets(numels, bucket_numel)
    )


def layout_of(
    units: Sequence[Sequence[int]], bucket_numel: int, world_size: int, rank: int = 0
) -> Layout:
    """Lay out a model that is given as lengths.

    Args:
        units: for every unit, root first, the elements of each of its parameters; all trained.
        bucket_numel: most elements a bucket may hold (`reduce_bucket_size`).
        world_size: number of ranks.
        rank: whose shards to count.
    """
    return Layout(world_size, tuple(cut(u, bucket_numel, world_size, rank) for u in units if u))


def layout(
    model: nn.Module,
    bucket_numel: int,
    world_size: int,
    rank: int = 0,
    *,
    persistence_threshold: int = 0,
) -> Layout:
    """Count what the engine will cut `model` into; the meta device is enough.

    Args:
        model: its parameters that require a gradient are trained; all have one dtype, or the
            engine casts them to one.
        bucket_numel: most elements a bucket may hold (`reduce_bucket_size`).
        world_size: number of ranks.
        rank: whose shards to count.
        persistence_threshold: stage 3 keeps parameters of at most so many elements whole
            (`stage3_param_persistence_threshold`; 0 keeps none).
    """
    found = bucket.assign_params(model, bucket.find_blocks(model))
    kept = {param for param in model.parameters() if 0 < param.numel() <= persistence_threshold}
    units = []
    for _, _, params in found:
        pieces: list[BucketLayout] = []
        for numels, trained, persistent in _by_kind([param for _, param in params], kept):
            pieces += _cut(numels, bucket_numel, world_size, rank, trained, persistent)
        units.append(tuple(pieces))
    return Layout(world_size, tuple(unit for unit in units if unit))


def _by_kind(
    params: Sequence[nn.Parameter], kept: Set[nn.Parameter]
) -> Iterator[tuple[list[int], bool, bool]]:
    """Split a unit's parameters by what buckets must not mix, in order of appearance."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for param in params:
        groups.setdefault((param.requires_grad, param in kept), []).append(param.numel())
    for (trained, persistent), numels in groups.items():
        yield numels, trained, persistent


def _at_least_one(**counts: int) -> None:
    """Refuse counts that are too small."""
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"{name} {count} is below 1; give 1 or more")
