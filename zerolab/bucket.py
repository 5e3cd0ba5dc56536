"""Chapter 3: buckets, the only thing that is flat, padded, sharded and sent.

A `Bucket` owns up to `reduce_bucket_size` elements of one unit and one dtype: their
parameters (`flat_param`, `shard`), the fp32 copy the optimizer updates (`master`), and their
gradients on the way (`fresh`) and at home (`reduced`). A `Unit` is the buckets of one module,
usually a block. The cut into units and buckets is the same at every stage and in every
world, which is what makes the stages equal to the last bit.

Phases of a bucket's gradients in one step:

    EMPTY -> FILLING (backward leaves gradients in `fresh`) -> IN_FLIGHT (a collective runs)
    -> REDUCED (the mean over ranks lies in `reduced`) -> EMPTY (the optimizer used it)
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import device, flat

if TYPE_CHECKING:
    from .comm import Work


class GradState(Enum):
    """Where the gradients of a bucket are."""

    EMPTY = "empty"
    FILLING = "filling"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


@dataclass(slots=True)
class Slot:
    """One parameter's place in its bucket."""

    param: nn.Parameter
    name: str
    offset: int
    shape: torch.Size
    numel: int

    @property
    def span(self) -> flat.Range:
        """The positions that the parameter takes in the bucket."""
        return self.offset, self.offset + self.numel


@dataclass(slots=True)
class Segment:
    """The part of one parameter that lies in one shard: what the optimizer steps on."""

    slot: int  # position of the parameter in bucket.slots
    shard: int  # rank whose shard this is
    start: int  # first element, counted from the start of the region this rank owns
    param: nn.Parameter  # [numel], a view into bucket.target; numel may be 0


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Bucket:
    """Parameters that are reduced and gathered in one collective; see the module's docstring."""

    index: int  # buckets are reduced in this order on every rank
    name: str
    slots: list[Slot]
    dtype: torch.dtype
    device: torch.device
    world_size: int
    rank: int
    trainable: bool
    persistent: bool = False  # small parameters that stage 3 keeps whole
    numel: int = 0
    padded_numel: int = 0
    shard_numel: int = 0
    flat_param: torch.Tensor = field(init=False)  # [padded_numel] all parameters
    shard: torch.Tensor = field(init=False)  # [shard_numel] this rank's slice of them
    target: torch.Tensor = field(init=False)  # [owned] what the optimizer updates
    views: list[torch.Tensor] = field(default_factory=list)  # the parameters in flat_param
    master: torch.Tensor | None = None  # [owned] fp32, with mixed precision only
    segments: list[Segment] = field(default_factory=list)
    state: GradState = GradState.EMPTY
    fresh: torch.Tensor | None = None  # [padded_numel] local gradients
    incoming: torch.Tensor | None = None  # [owned] where the collective writes
    reduced: torch.Tensor | None = None  # [owned] mean over the ranks
    work: "Work | None" = None
    filled: set[int] = field(default_factory=set)  # slots with a gradient in `fresh`
    arrived: set[int] = field(default_factory=set)  # slots seen since the last flush
    used: set[int] = field(default_factory=set)  # slots seen since the last step

    def __post_init__(self) -> None:
        """Count the elements once."""
        self.numel = sum(slot.numel for slot in self.slots)
        self.padded_numel = flat.padded_numel(self.numel, self.world_size)
        self.shard_numel = self.padded_numel // self.world_size

    def __repr__(self) -> str:
        return f"<bucket {self.name}>"

    @property
    def complete(self) -> bool:
        """Whether every parameter has had its gradient since the last flush."""
        return len(self.arrived) == len(self.slots)

    @property
    def bounds(self) -> flat.Range:
        """The positions of this rank's shard."""
        return flat.shard_bounds(self.numel, self.world_size, self.rank)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Unit:
    """The parameters that are gathered and freed together: one module's, as buckets."""

    name: str
    module: nn.Module
    buckets: list[Bucket]

    def __repr__(self) -> str:
        """Name it; to print its module would read the parameters, which stage 3 notices."""
        return f"<unit {self.name}>"


def collect(bucket: Bucket, position: int, dtype: torch.dtype, kind: str) -> None:
    """Move the gradient that autograd just left in a parameter into the bucket's fresh buffer.

    A second gradient of the same parameter is added to the first. Afterwards the parameter's
    own `.grad` is None, so that its memory is free. The buffer is made for the first gradient
    and holds all of the bucket's. `position` is noted in three sets: `bucket.filled` (the buffer
    holds this gradient), `bucket.arrived` (it came in this backward) and `bucket.used` (it came
    since the last update). The bucket is FILLING then, unless it is IN_FLIGHT.

    Args:
        bucket: `bucket.fresh` is the buffer [padded_numel], None where there is none yet.
        position: of the parameter in `bucket.slots`, where its place in the buffer stands.
        dtype: of the buffer.
        kind: of memory, under which the buffer counts.
    """
    slot = bucket.slots[position]
    grad = slot.param.grad
    slot.param.grad = None
    assert grad is not None
    if bucket.fresh is None:
        with device.tag(kind):
            bucket.fresh = torch.empty(bucket.padded_numel, dtype=dtype, device=bucket.device)
    target = flat.view(bucket.fresh, slot.offset, slot.shape)
    dense = grad.to_dense() if grad.is_sparse else grad
    target.add_(dense) if position in bucket.filled else target.copy_(dense)
    bucket.filled.add(position)
    bucket.arrived.add(position)
    bucket.used.add(position)
    if bucket.state is not GradState.IN_FLIGHT:
        bucket.state = GradState.FILLING


def seal(bucket: Bucket, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return the fresh buffer [padded_numel] ready to be sent: zeros where nothing arrived."""
    if bucket.fresh is None:
        with device.tag(kind):
            bucket.fresh = torch.zeros(bucket.padded_numel, dtype=dtype, device=bucket.device)
        return bucket.fresh
    for position, slot in enumerate(bucket.slots):
        if position not in bucket.filled:
            bucket.fresh[slot.offset : slot.offset + slot.numel].zero_()
    bucket.fresh[bucket.numel :].zero_()
    return bucket.fresh


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model, outermost first: the natural units.

    A block is a child of an `nn.ModuleList` or `nn.Sequential` that has parameters and at
    least one sibling of the same class.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        repeated = _repeated(child for _, child in children)
        for name, child in children:
            path = f"{prefix}{name}"
            listed = isinstance(module, nn.ModuleList | nn.Sequential)
            if listed and type(child) in repeated and any(True for _ in child.parameters()):
                blocks.append((path, child))
            else:
                walk(child, f"{path}.")

    walk(model, "")
    return blocks


def _repeated(modules: Iterable[nn.Module]) -> set[type]:
    """Return the classes that occur more than once."""
    kinds = [type(module) for module in modules]
    return {kind for kind in kinds if kinds.count(kind) > 1}


def assign_params(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]]:
    """Give every parameter to one unit: its block, or the root if it is in none or in several.

    A tied parameter is listed once, under its first name. The root comes first: forward needs
    it first.
    """
    home: dict[nn.Parameter, set[int]] = {}
    for number, (_, block) in enumerate(blocks):
        for param in block.parameters():
            home.setdefault(param, set()).add(number)
    named: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(blocks) + 1)]
    for name, param in model.named_parameters():
        homes = home.get(param, set())
        named[homes.copy().pop() + 1 if len(homes) == 1 else 0].append((name, param))
    modules = [("root", model), *blocks]
    return [(name, module, own) for (name, module), own in zip(modules, named, strict=True)]


def build_units(
    model: nn.Module,
    trainable: set[nn.Parameter],
    *,
    limit: int,
    dtype: torch.dtype | None,
    world_size: int,
    rank: int,
    blocks: Sequence[tuple[str, nn.Module]] | None = None,
    persistent: Set[nn.Parameter] = frozenset(),
) -> list[Unit]:
    """Cut a model into units and these into buckets, numbered in the order of backward.

    Args:
        model: the module; its parameters are not touched yet.
        trainable: the parameters the optimizer updates; a bucket holds only these or only others.
        limit: most elements a bucket may hold.
        dtype: dtype of all floating parameters, or None to keep each one's own.
        world_size: number of shards.
        rank: this rank.
        blocks: the units' modules by name; found automatically when None.
        persistent: parameters that stage 3 does not shard; a bucket holds only these or none.

    Returns:
        Units in the order of forward, root first; only those that hold parameters.
    """
    found = assign_params(model, find_blocks(model) if blocks is None else blocks)
    units: list[Unit] = []
    for name, module, params in reversed(found):
        unit = Unit(name, module, [])
        for same in _by_kind(params, trainable, persistent, dtype):
            for group in flat.plan_buckets([param.numel() for _, param in same], limit):
                index = sum(len(other.buckets) for other in units) + len(unit.buckets)
                slots = _lay_out([same[position] for position in group])
                first = same[group[0]][1]
                unit.buckets.append(
                    Bucket(
                        index=index,
                        name=f"{name}/{len(unit.buckets)}",
                        slots=slots,
                        dtype=_cast(first, dtype),
                        device=first.device,
                        world_size=world_size,
                        rank=rank,
                        trainable=first in trainable,
                        persistent=first in persistent,
                    )
                )
        units.append(unit)
    return [unit for unit in reversed(units) if unit.buckets]


def _cast(param: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype a parameter will have."""
    return dtype if dtype is not None and param.is_floating_point() else param.dtype


def _by_kind(
    params: list[tuple[str, nn.Parameter]],
    trainable: Set[nn.Parameter],
    persistent: Set[nn.Parameter],
    dtype: torch.dtype | None,
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Split a unit's parameters by what buckets must not mix, in order of appearance."""
    groups: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        key = (param in trainable, param in persistent, _cast(param, dtype), param.device)
        groups.setdefault(key, []).append((name, param))
    yield from groups.values()


def _lay_out(params: list[tuple[str, nn.Parameter]]) -> list[Slot]:
    """Lay parameters end to end."""
    starts = flat.offsets([param.numel() for _, param in params])
    return [
        Slot(param, name, start, param.shape, param.numel())
        for (name, param), start in zip(params, starts, strict=True)
    ]
