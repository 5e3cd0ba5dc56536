"""Chapter 2: the switch between a world's own collectives and the ring of `ring`.

Owns nothing: whether a rank's collectives go round the ring is written in its group, and whether
new groups begin so, in `composed.begin_with_ring`. Outside a run the switch holds for the runs
that are started meanwhile, in every world: it travels to rank processes with them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from . import composed, current, travel


@contextmanager
def use_ring() -> Iterator[None]:
    """Let all_reduce, reduce_scatter and all_gather be the functions of `comm.ring`.

    Inside a rank this holds for the rank until the `with` block ends, outside for every rank of
    the runs that the block starts. All ranks of a run must do the same. "max" stays the world's
    own, and on nccl everything does: its kernels go round a ring by themselves.

    An asynchronous call sends nothing before a `wait()` or another call of the rank; so nothing
    overlaps. Sums are in ring order, see `comm.ring`.
    """
    group = current.current()
    alone = group.world == "solo"
    before, began_with = group.ring, composed.begin_with_ring
    group.ring = True
    composed.begin_with_ring = began_with or alone
    try:
        yield
        composed.finish(group)
    finally:
        group.ring, composed.begin_with_ring = before, began_with


def _luggage() -> Callable[[], AbstractContextManager[None]] | None:
    """Return what a rank process enters around the user's function."""
    return use_ring if composed.begin_with_ring else None


travel.register_luggage("comm.ring", _luggage)
