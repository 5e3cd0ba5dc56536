"""Chapter 2: the lockstep world: all ranks in this process, one thread each, one running at a time.

Owns the slots in which calls meet. A call joins the slot of its number; the last rank to join
computes the result, once, and every rank copies its part out when it waits. Three rules:

    launch  never lets another rank run. An asynchronous call copies its inputs and fills its
            outputs with NaN, so that a forgotten `wait()` cannot pass unnoticed.
    wait    writes the result, and hands the baton on while it is not there yet.
    sums    in rank order and fp32 (`reduction`), the same for every collective that adds.

Who runs, and what happens when nobody can, is in `baton`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import device
from . import reduction
from .baton import Baton
from .group import Call, Group, Work


@dataclass(slots=True)
class Slot:
    """Where the ranks' calls with one number meet."""

    ranks: tuple[int, ...]  # who takes part, in the order of the sum
    calls: dict[int, Call] = field(default_factory=dict)
    result: Tensor | None = None
    complete: bool = False


class LockstepWorld:
    """What the groups of one run share: the baton and the slots that are not complete."""

    def __init__(self, world_size: int) -> None:
        """Prepare a run of `world_size` ranks."""
        self.world_size = world_size
        self.baton = Baton(world_size)
        self.everyone = tuple(range(world_size))
        self.slots: dict[str, Slot] = {}
        self.began = time.perf_counter()  # one clock for all ranks

    def join(self, rank: int, call: Call) -> Slot:
        """Put a call into its slot; the last one to come computes the result."""
        key = call.key(rank)
        slot = self.slots.setdefault(key, Slot(self._participants(rank, call)))
        slot.calls[rank] = call
        first = next(iter(slot.calls.values()))
        if first.signature() != call.signature():
            raise self.baton.mismatch(rank, slot.calls)
        if len(slot.calls) == len(slot.ranks):
            del self.slots[key]
            slot.result = _RESULTS[call.op](slot)
            slot.complete = True
        return slot

    def _participants(self, rank: int, call: Call) -> tuple[int, ...]:
        """Return who must make the call: for a message the sender, then the receiver."""
        if call.op == "send":
            return (rank, call.peer)
        return (call.peer, rank) if call.op == "recv" else self.everyone


class LockstepGroup(Group):
    """One rank's view of a lockstep run. A world of one rank needs no run: see `current`."""

    world = "lockstep"

    def __init__(self, rank: int, shared: LockstepWorld) -> None:
        """Join the shared world as `rank`."""
        super().__init__(rank, shared.world_size)
        self.shared = shared
        self.began = shared.began

    def elsewhere(self) -> float:
        """Return the seconds in which other ranks ran while this one waited for its turn."""
        return self.shared.baton.seats[self.rank].elsewhere

    @torch.no_grad()
    def note(self, call: Call, asynchronous: bool) -> None:
        """Treat the tensors as those of any asynchronous call: outputs are NaN until `wait`."""
        self.shared.baton.enter(self.rank, call)
        if asynchronous:
            with device.paused():
                _snapshot(call)

    @torch.no_grad()
    def _launch(self, call: Call, asynchronous: bool) -> Work:
        """Join the slot; never switches."""
        self.shared.baton.enter(self.rank, call)
        with device.paused():
            held = (call.tensor, call.output)
            if asynchronous:
                _snapshot(call)
            return LockstepWork(self, call, self.shared.join(self.rank, call), held)


class LockstepWork(Work):
    """A call that has joined its slot."""

    def __init__(self, group: LockstepGroup, call: Call, slot: Slot, held: tuple) -> None:
        """Hold the caller's tensors until `wait`, as the process world must."""
        self._pending: tuple[LockstepGroup, Call, Slot] | None = (group, call, slot)
        self._held = held

    @torch.no_grad()
    def wait(self) -> None:
        """Let the other ranks run until the result is there, then write it."""
        if self._pending is None:
            return
        group, call, slot = self._pending
        group.shared.baton.wait(group.rank, call, lambda: slot.complete)
        if call.output is not None:
            with device.paused():
                _deliver(slot, group.rank, call)
        call.tensor = call.output = None  # the table of ranks keeps the call, not its memory
        self._pending, self._held = None, ()


def _snapshot(call: Call) -> None:
    """Keep what the inputs are now, and make the outputs unusable until they are waited for."""
    given, output = call.tensor, call.output
    if given is not None:
        call.tensor = given.clone()
    if output is None:
        return
    output.fill_(_poison(output.dtype))
    if call.op == "all_gather" and given is not None and _shares_memory(given, output):
        given.copy_(_flat(call.tensor).view_as(given))  # the own slice stays readable


def _poison(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no correct result is likely to have."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _shares_memory(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are views of one storage."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


# ---------------------------------------------------------------- results, computed once a slot


def _flat(tensor: Tensor | None) -> Tensor:
    """View a tensor as [numel]; callers know that it is there."""
    assert tensor is not None
    return tensor.reshape(-1)


def _reduced(slot: Slot) -> Tensor:
    """Add (or average, or compare) the tensors of all ranks: [numel]."""
    calls = [slot.calls[rank] for rank in slot.ranks]
    rows = [_flat(call.tensor) for call in calls]
    total = torch.empty_like(rows[0])
    reduction.reduce_rows(rows, calls[0].reduction, total)
    return total


def _gathered(slot: Slot) -> Tensor:
    """Lay the ranks' tensors end to end: [world_size * shard_numel]."""
    return torch.cat([_flat(slot.calls[rank].tensor) for rank in slot.ranks])


def _sent(slot: Slot) -> Tensor:
    """Copy what the source gave: its tensor may change before the others read it."""
    call = slot.calls[slot.ranks[0]]
    src = call.peer if call.op == "broadcast" else slot.ranks[0]
    return _flat(slot.calls[src].tensor).clone()


_RESULTS: dict[str, Callable[[Slot], Tensor | None]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _reduced,
    "all_gather": _gathered,
    "broadcast": _sent,
    "send": _sent,
    "recv": _sent,
    "barrier": lambda slot: None,
}


def _deliver(slot: Slot, rank: int, call: Call) -> None:
    """Copy this rank's part of the result into its output."""
    result = slot.result
    assert result is not None and call.output is not None
    numel = call.output.numel()
    if call.op == "reduce_scatter":
        result = result[rank * numel : (rank + 1) * numel]  # [shard_numel]
    _flat(call.output).copy_(result)
