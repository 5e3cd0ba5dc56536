"""Chapter 0: a picture that is drawn while ranks run.

Owns the thread that looks at the virtual GPUs ten times a second, and less often when drawing
would take more than one percent of what the process computes: that bounds what being watched can
cost. It looks from outside. Only lockstep ranks can be looked at: they are threads of this
process. The picture is any object with the two methods of `Picture`, or the three of
`Dashboard`; the lab knows no widget.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .. import device
from ..records import Records
from . import cards

REDRAW_SECONDS = 0.1
DRAWING_SHARE = 0.01  # of the processor time of this process, at most


class Picture(Protocol):
    """What can be drawn while ranks run, such as `zerolab_widgets.MemoryBars`."""

    capacity: int

    def show(
        self, held: Sequence[Mapping[str, int]], phases: Sequence[str], peaks: Sequence[int]
    ) -> None:
        """Draw what every rank holds now."""
        ...

    def finish(
        self, ranks: Sequence[Records], failed: int | None = None, message: str = ""
    ) -> None:
        """Draw the run as it ended."""
        ...


@runtime_checkable
class Dashboard(Picture, Protocol):
    """A picture that also wants to know how training goes, such as `LiveDashboard`."""

    def advance(self, losses: Sequence[Sequence[float]], ranks: Sequence[Records]) -> None:
        """Take in the losses of every rank, step by step, and its records, as far as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Started:
    """News from a lockstep rank: its GPU and its losses, which can be looked at while it runs."""

    rank: int
    gpu: device.VirtualGPU
    losses: list[float] = field(default_factory=list)


def look(watch: Picture, ranks: Sequence[Started]) -> None:
    """Draw what the ranks hold now, and how far they have come."""
    if isinstance(watch, Dashboard):
        watch.advance([rank.losses for rank in ranks], [rank.gpu.records for rank in ranks])
    watch.show(
        [rank.gpu.by_kind() for rank in ranks],
        [rank.gpu.phase for rank in ranks],
        [rank.gpu.peak_bytes for rank in ranks],
    )


@contextmanager
def redrawn(watch: Picture, world_size: int) -> Iterator[Callable[[Started], None]]:
    """Redraw the picture ten times a second, from a thread of its own; empty bars at first."""
    ranks = [
        Started(rank, device.VirtualGPU(index=rank, timeline=False)) for rank in range(world_size)
    ]
    over = threading.Event()

    def redraw() -> None:
        due = 0.0  # processor time of the process at which the next picture is paid for
        while not over.wait(REDRAW_SECONDS):
            if time.process_time() < due:
                continue
            began = time.thread_time()
            look(watch, ranks)
            due = time.process_time() + (time.thread_time() - began) / DRAWING_SHARE

    thread = threading.Thread(target=redraw, name="memory picture", daemon=True)
    thread.start()
    try:
        yield lambda news: ranks.__setitem__(news.rank, news)
    finally:
        over.set()
        thread.join()


@contextmanager
def shown(picture: Picture) -> Iterator[None]:
    """Show the picture below the cell, and its last state to those who open the file later."""
    if not cards.in_notebook():
        yield
        return
    from IPython.display import display

    handle = display(picture, display_id=True)
    yield
    if handle is not None:
        handle.update(picture)
