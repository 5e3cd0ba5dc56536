"""Chapter 6: stage 3. Parameters are sharded as well: they appear for a unit's turn and go again.

Owns, beside what stage 2 owns, the shard of every bucket in place of the bucket, and a state
for every unit:

    SHARDED    only the own slice exists; the parameters are NaN scalars expanded to shape
    IN_FLIGHT  memory is there and a gather is filling it
    UNSHARDED  the parameters are whole and may be used

What changes against stage 2, moment by moment:

    pre_forward     unshard the unit, start gathering the one that follows
    post_forward    reshard it (the saved tensors of autograd keep pointing at its memory)
    pre_backward    unshard it again, into that very memory; start gathering the next
    post_backward   when all its gradients are there, reshard; the gradients go as in stage 2
    step            update the own slice; nothing to publish: the next forward gathers it

Each unit is gathered twice and reduced once: 3 Psi a step in place of 2.

A parameter that is read outside its unit's turn (`self.child.weight` in the parent's forward)
is noticed by the module's dictionary of parameters; its unit is then *borrowed*: whole until
the model's forward ends, and again from the start of backward to its end.

Source: ZeRO, section 5.3; DeepSpeed `stage: 3`; FSDP2's states and moments.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import comm, ddp, device, optim, sharded_param, zero2
from .bucket import Bucket, Slot, Unit
from .errors import UsageError


class ShardState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    IN_FLIGHT = "in flight"
    UNSHARDED = "unsharded"


@dataclass(slots=True)
class Turn:
    """What stage 3 remembers about one unit."""

    borrowed: bool = field(default=False, kw_only=True)  # read outside its own turn

    entries: list[tuple[nn.Parameter, torch.Tensor]]  # a parameter and its slice of the bucket
    state: ShardState = ShardState.SHARDED
    works: list[comm.Work] = field(default_factory=list)
    holds: int = 0  # `with` blocks that need it whole
    inputs_pending: int = 0  # forward calls whose inputs still wait for their gradients
    missing: set[int] = field(default_factory=set)  # ids of parameters without their gradient yet


def unshard_bucket(bucket: Bucket) -> comm.Work:
    """Give a bucket its memory back and start gathering all slices into it."""
    nbytes = bucket.padded_numel * bucket.flat_param.element_size()
    with device.tag("gathered"):
        bucket.flat_param.untyped_storage().resize_(nbytes)
    return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True, label=bucket.name)


def unit_numel(unit: Unit) -> int:
    """Return how many elements of a unit appear when it is unsharded."""
    return sum(bucket.padded_numel for bucket in unit.buckets if not bucket.persistent)


def reshard_bucket(bucket: Bucket) -> None:
    """Take the memory of a bucket's full parameters away; the tensors stay."""
    bucket.flat_param.untyped_storage().resize_(0)


class Zero3(zero2.Zero2):
    """Stage 3: optimizer states, gradients and parameters are sharded."""

    stage = 3

    def __init__(self, root: nn.Module, units: list[Unit], options: ddp.StageOptions) -> None:
        """Shard every bucket, then let modules announce themselves."""
        self.unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self.follower: dict[tuple[Unit, bool], Unit] = {}  # (unit, in backward?) -> next
        self.previous: tuple[Unit, bool] | None = None
        sharded_param.lost_writes()  # of another engine, to which they are no news
        self.forwards = 0  # forwards of the whole model that are running
        self.forward_order: list[Unit] = []  # of the last whole forward
        self.taken: list[Unit] = []  # of the running one
        super().__init__(root, units, options)
        self.turns = {unit: Turn(entries=_entries(unit)) for unit in units}

    # -- layout -----------------------------------------------------------------------------

    def place(self, bucket: Bucket) -> None:
        """Lay a bucket out, keep a copy of the own slice, and let go of the rest."""
        super().place(bucket)
        if bucket.persistent:
            return
        device.set_kind(bucket.flat_param, "gathered")
        device.name_storage(bucket.flat_param, bucket.name.rpartition("/")[0])
        for slot in bucket.slots:
            slot.param.data = sharded_param.placeholder(slot.param)
        reshard_bucket(bucket)

    def place_shard(self, bucket: Bucket) -> torch.Tensor:
        """Copy the own slice out of the bucket, whose memory will go."""
        if bucket.persistent:
            return super().place_shard(bucket)
        with device.tag("param"):
            return bucket.flat_param[slice(*bucket.bounds)].clone()

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """Return the own slice [shard_numel], which now is a tensor of its own."""
        return bucket.shard

    # -- unshard and reshard ----------------------------------------------------------------

    @torch.no_grad()
    def fetch(self, unit: Unit) -> None:
        """Start gathering a sharded unit."""
        turn = self.turns[unit]
        if turn.state is ShardState.SHARDED:
            turn.state = ShardState.IN_FLIGHT
            with self.whole_or_sharded(unit):
                for bucket in unit.buckets:
                    if not bucket.persistent:
                        turn.works.append(unshard_bucket(bucket))

    @torch.no_grad()
    def unshard(self, unit: Unit) -> None:
        """Make a unit's parameters whole; returns when they may be used."""
        turn = self.turns[unit]
        self.fetch(unit)
        if turn.state is ShardState.IN_FLIGHT:
            with self.whole_or_sharded(unit):
                for work in turn.works:
                    work.wait()
            turn.works = []
            for param, view in turn.entries:
                param.data = view
            turn.missing = {id(slot.param) for slot in _slots(unit) if slot.param.requires_grad}
            turn.state = ShardState.UNSHARDED

    @contextlib.contextmanager
    def whole_or_sharded(self, unit: Unit) -> Iterator[None]:
        """If gathering breaks off in the middle, such as for want of memory, free what there is."""
        try:
            yield
        except BaseException:
            turn = self.turns[unit]
            ddp.settle(turn.works)
            turn.works = []
            self.reshard(unit)
            raise

    @torch.no_grad()
    def reshard(self, unit: Unit) -> None:
        """Free a unit's full parameters; using one now gives NaN, never an old value."""
        turn = self.turns[unit]
        if turn.holds:
            return
        for work in turn.works:
            work.wait()
        turn.works = []
        for param, _ in turn.entries:
            param.data = sharded_param.placeholder(param)
        for bucket in unit.buckets:
            if not bucket.persistent:
                reshard_bucket(bucket)
        turn.state = ShardState.SHARDED

    def hold(self, unit: Unit) -> bool:
        """Make a unit whole until `release`, whoever has turns; return whether it was sharded."""
        turn = self.turns[unit]
        was_sharded = turn.state is not ShardState.UNSHARDED
        self.unshard(unit)
        turn.holds += 1
        return was_sharded

    def release(self, unit: Unit, was_sharded: bool) -> None:
        """Undo a `hold`, given what it returned."""
        self.turns[unit].holds -= 1
        if was_sharded:
            self.reshard(unit)

    def take_turn(self, unit: Unit, in_backward: bool) -> None:
        """Unshard a unit and start gathering the one that followed it last time."""
        self.unshard(unit)
        now = (unit, in_backward)
        before = self.previous
        if before is not None and before[0] is not unit and before[1] == in_backward:
            self.follower[before] = unit
        self.previous = now
        if not in_backward:
            self.taken.append(unit)
        for follower in self.ahead(now):
            self.fetch(follower)

    def ahead(self, now: tuple[Unit, bool]) -> list[Unit]:
        """Return the units to gather ahead: one, or as many as `prefetch_numel` allows."""
        limit, units, numel = self.options.prefetch_numel, [], 0
        while self.options.prefetch and (follower := self.follower.get(now)) is not None:
            numel += unit_numel(follower)
            if follower in units or (limit is not None and numel > limit):
                break
            units.append(follower)
            now = (follower, now[1])
            if limit is None:
                break
        return units

    # -- hooks ------------------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Beside the gradients' hooks, ask every unit's module to announce its forward."""
        super().register_hooks()
        stage_ref = weakref.ref(self)
        for unit in self.units:
            unit_ref = weakref.ref(unit)
            before = partial(_before_forward, stage_ref, unit_ref)
            after = partial(_after_forward, stage_ref, unit_ref)
            self.handles += [
                unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                unit.module.register_forward_hook(after, always_call=True),
            ]
        unit_of = {id(slot.param): unit for b, unit in self.unit_of.items() for slot in b.slots}
        for module in self.root.modules():
            watched = WatchedParameters(module._parameters)
            watched.watch(stage_ref, unit_of)
            module._parameters = watched

    def remove_hooks(self) -> None:
        """Take every hook out again, and the watch on parameters."""
        super().remove_hooks()
        for module in self.root.modules():
            module._parameters = dict(module._parameters)

    # -- the moments ------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """Make the unit whole before its module runs; inside backward it is being recomputed."""
        self.take_turn(unit, in_backward=in_backward())

    def post_forward(self, unit: Unit) -> None:
        """Free the unit after its module ran, unless backward is about to use it."""
        keep = in_backward() or self.turns[unit].borrowed or self.reused_soon(unit)
        if self.options.reshard_after_forward and not keep:
            self.reshard(unit)

    def reused_soon(self, unit: Unit) -> bool:
        """Whether a unit may stay whole until its backward, by `max_live` and `max_reuse`."""
        if not torch.is_grad_enabled() or unit not in self.forward_order:
            return False
        later = self.forward_order[self.forward_order.index(unit) + 1 :]
        distance = 2 * sum(unit_numel(other) for other in later)
        live = sum(
            unit_numel(other)
            for other, turn in self.turns.items()
            if turn.state is ShardState.UNSHARDED
        )
        return live <= self.options.max_live and distance <= self.options.max_reuse

    def read_param(self, unit: Unit) -> None:
        """Somebody reads a parameter of a unit: if it is not its turn, borrow the unit."""
        turn = self.turns[unit]
        running = self.forwards > 0 or in_backward()
        if running and turn.state is not ShardState.UNSHARDED:
            turn.borrowed = True
            self.unshard(unit)

    def watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Count a forward call as pending until the gradients of all its inputs are there."""
        leaves = grad_leaves(inputs)
        if not leaves or in_backward() or not torch.is_grad_enabled():
            return
        self.turns[unit].inputs_pending += 1
        action = partial(_input_grad, weakref.ref(self), weakref.ref(unit), [len(leaves)])
        for leaf in leaves:
            Arrival.of(leaf).free.append(action)

    def watch_outputs(self, unit: Unit, outputs: Any) -> None:
        """Ask for `pre_backward` when the first gradient reaches an output of the unit."""
        if in_backward():
            return
        action = partial(_first_grad, weakref.ref(self), weakref.ref(unit))
        for leaf in grad_leaves(outputs):
            Arrival.of(leaf).fetch.append(action)

    def pre_backward(self, unit: Unit) -> None:
        """Make the unit whole again before backward goes through it."""
        self.take_turn(unit, in_backward=True)

    def grad_ready(self, bucket: Bucket, position: int) -> None:
        """Take the gradient; with the last one of its unit, free the unit's parameters."""
        super().grad_ready(bucket, position)
        unit = self.unit_of[bucket]
        self.turns[unit].missing.discard(id(bucket.slots[position].param))
        self.reshard_if_done(unit)

    def reshard_if_done(self, unit: Unit) -> None:
        """Free a unit in backward once its gradients and those of its inputs are there."""
        turn = self.turns[unit]
        # With grad enabled backward builds a graph of its own, which will use the parameters.
        keep = turn.borrowed or torch.is_grad_enabled()
        done = not turn.missing and turn.inputs_pending <= 0
        if done and not keep and turn.state is ShardState.UNSHARDED:
            self.reshard(unit)

    def before_model(self) -> None:
        """Begin a new row of turns."""
        self.previous = None
        self.taken = []
        self.forwards += 1

    def after_model(self) -> None:
        """Free what was gathered ahead and then not used, and what was borrowed."""
        self.forwards -= 1
        self.forward_order = self.taken
        for unit, turn in self.turns.items():
            idle = turn.state is ShardState.IN_FLIGHT
            lent = turn.borrowed and self.options.reshard_after_forward
            if idle or (lent and not in_backward()):
                self.reshard(unit)

    def before_backward(self) -> None:
        """Make borrowed units whole: no hook announces the operations that use them."""
        for unit, turn in self.turns.items():
            if turn.borrowed:
                self.unshard(unit)

    def finish_backward(self) -> None:
        """Free whatever is still whole, then reduce what is left."""
        self.reshard_all()
        super().finish_backward()

    def abandon(self) -> None:
        """Free every unit as well."""
        for turn in self.turns.values():
            ddp.settle(turn.works)
            turn.works = []
        self.reshard_all()
        super().abandon()

    def reshard_all(self) -> None:
        """Free every unit, also one that was gathered ahead and then not used."""
        self.previous = None
        for unit, turn in self.turns.items():
            turn.inputs_pending = 0
            turn.borrowed = False
            if turn.state is not ShardState.SHARDED:
                self.reshard(unit)

    def step(
        self,
        groups: optim.BucketGroups,
        unused: dict[Bucket, set[int]],
        factor: torch.Tensor | None = None,
    ) -> None:
        """Update the own slices, unless somebody believes to have changed the parameters."""
        if sharded_param.lost_writes():
            raise UsageError(
                "a parameter was written to while it was sharded, and the change is lost: put it "
                "into `with zero.GatheredParameters(params, modifier_rank=0):`"
            )
        super().step(groups, unused, factor)

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Nothing to do: the next forward gathers the updated slices. A held unit has them now."""
        if not bucket.persistent and not self.turns[self.unit_of[bucket]].holds:
            return None
        return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True, label=bucket.name)


class Arrival:
    """What to do when the gradient of one tensor arrives: free first, then fetch.

    The tensor between two units is the output of one and the input of the other. Autograd calls
    hooks in the order of registration, which would fetch the one before freeing the other.
    """

    __slots__ = ("fetch", "free")

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self.free: list[Callable[[], None]] = []
        self.fetch: list[Callable[[], None]] = []

    @classmethod
    def of(cls, tensor: Any) -> "Arrival":
        """Return the tensor's own, registered with autograd when first asked for."""
        arrival = getattr(tensor, "zerolab_arrival", None)
        if arrival is None:
            arrival = tensor.zerolab_arrival = cls()
            tensor.register_hook(arrival)
        return arrival

    def __call__(self, grad: torch.Tensor) -> None:
        """Be the hook."""
        for action in (*self.free, *self.fetch):
            action()


class WatchedParameters(dict):
    """A module's dictionary of parameters that tells the stage when one is read."""

    def watch(self, stage_ref: "Ref", unit_of: dict[int, Unit]) -> None:
        """Say whom to tell, and which units there are to tell of."""
        self._stage_ref = stage_ref
        self._unit_refs = {
            name: weakref.ref(unit_of[id(param)])
            for name, param in self.items()
            if id(param) in unit_of
        }

    def __getitem__(self, name: str) -> Any:
        """Return the parameter, whole if the model is running."""
        unit_ref = self._unit_refs.get(name)
        stage = self._stage_ref()
        if unit_ref is not None and stage is not None:
            stage.read_param(unit_ref())
        return super().__getitem__(name)

    def __reduce__(self) -> tuple:
        """Copy and pickle as a plain dictionary: a copy of the model belongs to no stage."""
        return (dict, (dict(self),))


def in_backward() -> bool:
    """Whether autograd is running backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def grad_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure that take part in backward."""
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _slots(unit: Unit) -> Iterator[Slot]:
    """Return the places of all parameters of a unit."""
    return (slot for bucket in unit.buckets for slot in bucket.slots)


def _entries(unit: Unit) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return (parameter, its slice of the bucket) for every parameter of the unit."""
    return [
        (slot.param, view)
        for bucket in unit.buckets
        if not bucket.persistent
        for slot, view in zip(bucket.slots, bucket.views, strict=True)
    ]


Ref = Callable[[], Any]


def _before_forward(stage_ref: Ref, unit_ref: Ref, _: nn.Module, args: Any, kwargs: Any) -> None:
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.pre_forward(unit)
        stage.watch_inputs(unit, (args, kwargs))


def _after_forward(stage_ref: Ref, unit_ref: Ref, _: nn.Module, args: Any, outputs: Any) -> None:
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.post_forward(unit)
        stage.watch_outputs(unit, outputs)


def _first_grad(stage_ref: Ref, unit_ref: Ref) -> None:
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.pre_backward(unit)


def _input_grad(stage_ref: Ref, unit_ref: Ref, left: list[int]) -> None:
    stage, unit = stage_ref(), unit_ref()
    left[0] -= 1
    if stage is not None and left[0] == 0:
        stage.turns[unit].inputs_pending -= 1
        stage.reshard_if_done(unit)
