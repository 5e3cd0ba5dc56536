"""Chapter 6: what stage 3 needs beside its moments: shards, turns, and who needs a unit when.

Owns, beside what stage 2 owns, the shard of every bucket in place of the bucket, a `Turn` for
every unit, and the order in which units had their turns. `zero3.Zero3` derives from it and
says what happens at each moment of a step.

A parameter that is read outside its unit's turn (`self.child.weight` in the parent's forward)
is noticed by the module's dictionary of parameters; its unit is then *borrowed*: whole until
the model's forward ends, and again from the start of backward to its end.
"""

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from . import (
    absent,
    ddp,
    device,
    optim,
    reducing,
    sharded_param,
    turns,
    watching,
    zero2,
)
from .bucket import Bucket, Slot, Unit
from .errors import UsageError
from .turns import ShardState
from .watching import Arrival, WatchedParameters


class UnitSharding(zero2.Zero2):
    """Stage 2 with parameters that come and go by units; the moments are `zero3.Zero3`'s."""

    def __init__(self, root: nn.Module, units: list[Unit], options: ddp.StageOptions) -> None:
        """Shard every bucket, then let modules announce themselves."""
        self.unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self.turns = {unit: turns.Turn(unit) for unit in units}
        self.followers: dict[bool, dict[Unit, Unit]] = {False: {}, True: {}}  # in backward?
        self.previous: tuple[Unit, bool] | None = None
        sharded_param.lost_writes()  # of another engine, to which they are no news
        self.forwards = 0  # forwards of the whole model that are running
        self.forward_order: list[Unit] = []  # of the last whole forward
        self.taken: list[Unit] = []  # of the running one
        super().__init__(root, units, options)
        for turn in self.turns.values():
            absent.begin(_params(turn))

    # -- layout -----------------------------------------------------------------------------

    def place(self, bucket: Bucket) -> None:
        """Lay a bucket out, keep a copy of the own slice, and let go of the rest."""
        super().place(bucket)
        if not bucket.persistent:
            device.set_kind(bucket.flat_param, "gathered")
            device.name_storage(bucket.flat_param, bucket.name.rpartition("/")[0])
            turns.reshard_bucket(bucket)

    def place_shard(self, bucket: Bucket) -> torch.Tensor:
        """Copy the own slice out of the bucket, whose memory will go."""
        if bucket.persistent:
            return super().place_shard(bucket)
        with device.tag("param"):
            return bucket.flat_param[slice(*bucket.bounds)].clone()

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """Return the own slice [shard_numel], which now is a tensor of its own."""
        return bucket.shard

    # -- a unit comes and goes --------------------------------------------------------------

    @torch.no_grad()
    def fetch(self, unit: Unit) -> None:
        """Start gathering a sharded unit."""
        with watching.outside_transforms(), self.whole_or_sharded(unit):
            self.turns[unit].fetch()

    @torch.no_grad()
    def unshard(self, unit: Unit) -> None:
        """Make a unit's parameters whole; returns when they may be used."""
        turn = self.turns[unit]
        if turn.state is not ShardState.UNSHARDED:
            watching.refuse_mixed_levels()
            with watching.outside_transforms(), self.whole_or_sharded(unit):
                absent.end(_params(turn))
                turn.unshard()
            turn.missing = {id(slot.param) for slot in _slots(unit) if slot.param.requires_grad}

    @torch.no_grad()
    def reshard(self, unit: Unit) -> None:
        """Free a unit's full parameters, unless somebody holds them."""
        turn = self.turns[unit]
        if not turn.holds:
            with watching.outside_transforms():
                turn.reshard()
            absent.begin(_params(turn))

    @contextlib.contextmanager
    def whole_or_sharded(self, unit: Unit) -> Iterator[None]:
        """If gathering breaks off in the middle, such as for want of memory, free what there is."""
        try:
            yield
        except BaseException:
            turn = self.turns[unit]
            reducing.settle(turn.works)
            turn.works = []
            self.reshard(unit)
            raise

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

    def reshard_all(self) -> None:
        """Free every unit, also one that was gathered ahead and then not used."""
        self.previous = None
        for unit, turn in self.turns.items():
            turn.inputs_pending = 0
            turn.borrowed = False
            if turn.state is not ShardState.SHARDED:
                self.reshard(unit)

    # -- who comes after whom, and who is needed again ---------------------------------------

    def note_turn(self, unit: Unit, in_backward: bool) -> None:
        """Remember that a unit has its turn, and after which other one."""
        before = self.previous
        if before is not None and before[0] is not unit and before[1] == in_backward:
            self.followers[in_backward][before[0]] = unit
        self.previous = (unit, in_backward)
        if not in_backward:
            self.taken.append(unit)

    def needed_again(self, unit: Unit) -> bool:
        """Whether a unit stays whole after its forward.

        Because backward runs it once more and will use it at once; because it is borrowed; or
        because the configuration lets it stay.
        """
        if watching.in_backward() or self.turns[unit].borrowed:
            return True
        return not self.options.reshard_after_forward or self.reused_soon(unit)

    def reused_soon(self, unit: Unit) -> bool:
        """Whether a unit may stay whole until its backward, by `max_live` and `max_reuse`."""
        if not torch.is_grad_enabled() or unit not in self.forward_order:
            return False
        later = self.forward_order[self.forward_order.index(unit) + 1 :]
        distance = 2 * sum(turns.unit_numel(other) for other in later)
        live = sum(
            turns.unit_numel(other)
            for other, turn in self.turns.items()
            if turn.state is ShardState.UNSHARDED
        )
        return live <= self.options.max_live and distance <= self.options.max_reuse

    def done_with(self, unit: Unit) -> bool:
        """Whether backward has left a unit: its gradients and those of its inputs are there.

        With grad enabled backward builds a graph of its own, which will use the parameters.
        """
        turn = self.turns[unit]
        if turn.borrowed or torch.is_grad_enabled() or turn.state is not ShardState.UNSHARDED:
            return False
        return not turn.missing and turn.inputs_pending <= 0

    # -- hooks ------------------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Beside the gradients' hooks, ask every unit's module to announce its forward."""
        super().register_hooks()
        stage_ref = weakref.ref(self)
        for unit in self.units:
            unit_ref = weakref.ref(unit)
            before = watching.ModuleHook(watching.before_forward, stage_ref, unit_ref)
            after = watching.ModuleHook(watching.after_forward, stage_ref, unit_ref)
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

    def read_param(self, unit: Unit) -> None:
        """Somebody reads a parameter of a unit: if it is not its turn, borrow the unit."""
        turn = self.turns[unit]
        if self.running and turn.state is not ShardState.UNSHARDED:
            turn.borrowed = True
            self.unshard(unit)

    @property
    def running(self) -> bool:
        """Whether a forward of the whole model is running, or backward."""
        return self.forwards > 0 or watching.in_backward()

    def watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Count a forward call as pending until the gradients of all its inputs are there."""
        leaves = watching.grad_leaves(inputs)
        if not leaves or watching.in_backward() or not torch.is_grad_enabled():
            return
        self.turns[unit].inputs_pending += 1
        left = [len(leaves)]
        action = partial(watching.input_grad, weakref.ref(self), weakref.ref(unit), left)
        for leaf in leaves:
            Arrival.of(leaf).free.append(action)

    def watch_outputs(self, unit: Unit, outputs: Any) -> None:
        """Ask for `pre_backward` when the first gradient reaches an output of the unit.

        Outputs without a tensor to be found cannot tell, nor can those of a transform, which are
        wrapped: the unit is whole all through backward.
        """
        if watching.in_backward() or not torch.is_grad_enabled():
            return
        found = watching.tensors_of_outputs(outputs)
        self.turns[unit].borrowed |= not found or watching.in_transform()
        action = partial(watching.first_grad, weakref.ref(self), weakref.ref(unit))
        for leaf in watching.grad_leaves(found):
            Arrival.of(leaf).fetch.append(action)

    # -- around the model's forward and backward ----------------------------------------------

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
            if idle or (lent and not watching.in_backward()):
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
            reducing.settle(turn.works)
            turn.works = []
        self.reshard_all()
        super().abandon()

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


def _params(turn: turns.Turn) -> Iterator[nn.Parameter]:
    """Return the parameters that come and go with a turn."""
    return (slot.param for bucket in turn.buckets for slot in bucket.slots)


def _slots(unit: Unit) -> Iterator[Slot]:
    """Return the places of all parameters of a unit."""
    return (slot for bucket in unit.buckets for slot in bucket.slots)
