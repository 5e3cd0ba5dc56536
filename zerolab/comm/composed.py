"""Chapter 2: a collective composed of messages: the ring in the place of the world's own.

Owns the line of composed calls that a rank has launched and not finished, kept in its group.
The functions of `ring` are looked up there at every call, so what a learner has plugged in
carries the training. Three rules:

    launch   sends nothing: a ring needs many rounds, and launching must not wait
    finish   runs the calls of the line in the order of their launch, as a stream does; at
             `wait()`, and before any other call of the rank, so that all ranks' messages
             meet in one order however they wait
    record   the call is one event, its messages are `Records.parts`

A message carries what it is a part of in its signature: ranks that call different collectives
are told so, as everywhere.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import device
from . import reduction, ring
from .work import Work

if TYPE_CHECKING:
    from .group import Call, Group

OPS = ("all_reduce", "reduce_scatter", "all_gather")
begin_with_ring = False  # what new groups begin with; `switch` turns it


class ComposedWork(Work):
    """A call in the line of its group."""

    def __init__(self, group: "Group", call: "Call", purpose: str) -> None:
        """Join the line, and hold the tensors until the call has run."""
        self._group = group
        self._call: Call | None = call
        self._purpose = purpose
        group.line.append(self)

    def wait(self) -> None:
        """Finish the line up to this call; calling it again does nothing."""
        if self._call is not None:
            finish(self._group, self)

    @torch.no_grad()
    def run(self) -> None:
        """Exchange the messages of the call, unseen by the ledger as every transfer is."""
        call, self._call = self._call, None
        assert call is not None
        self._group.composing = (call.without_tensors(), self._purpose)
        try:
            with device.paused():
                _STEPS[call.op](call)
                if call.reduction == "avg":
                    reduction.divide(_flat(call.output), self._group.world_size)
        finally:
            self._group.composing = None


def applies(group: "Group", call: "Call") -> bool:
    """Tell whether a call is to be composed: not a maximum, and not where NCCL does it better."""
    wanted = group.ring and group.composing is None and group.world != "nccl"
    return wanted and call.op in OPS and call.reduction != "max"


def finish(group: "Group", last: ComposedWork | None = None) -> None:
    """Run the calls in the line, all of them or up to `last`."""
    while group.line and group.composing is None:
        work = group.line.popleft()
        work.run()
        if work is last:
            return


def _flat(tensor: Tensor | None) -> Tensor:
    """View a contiguous tensor as [numel], out of autograd's sight."""
    assert tensor is not None
    return tensor.detach().view(-1)


def _all_reduce(call: "Call") -> None:
    given, output = _flat(call.tensor), _flat(call.output)
    if given.data_ptr() != output.data_ptr():  # what the call was given was set aside
        output.copy_(given)
    ring.all_reduce(output)


def _reduce_scatter(call: "Call") -> None:
    ring.reduce_scatter(_flat(call.output), _flat(call.tensor))


def _all_gather(call: "Call") -> None:
    ring.all_gather(_flat(call.output), _flat(call.tensor))


_STEPS: dict[str, Callable[["Call"], None]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
