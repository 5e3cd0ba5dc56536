"""Chapter 0: a picture that is drawn while ranks run.

Owns the thread that looks at the virtual GPUs ten times a second. It looks from outside, so the
ranks pay nothing for being watched. Only lockstep ranks can be looked at: they are threads of
this process. The picture is any object with the two methods of `Picture`; the lab knows no
widget.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from .. import device
from ..records import Records
from . import cards

REDRAW_SECONDS = 0.1


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


@dataclass(frozen=True, slots=True)
class Started:
    """News from a lockstep rank: this is its GPU, which can be looked at while it runs."""

    rank: int
    gpu: device.VirtualGPU


@contextmanager
def redrawn(watch: Picture, world_size: int) -> Iterator[Callable[[Started], None]]:
    """Redraw the picture ten times a second, from a thread of its own; empty bars at first."""
    gpus = [device.VirtualGPU(index=rank, timeline=False) for rank in range(world_size)]
    over = threading.Event()

    def redraw() -> None:
        while not over.wait(REDRAW_SECONDS):
            watch.show(
                [gpu.by_kind() for gpu in gpus],
                [gpu.phase for gpu in gpus],
                [gpu.peak_bytes for gpu in gpus],
            )

    thread = threading.Thread(target=redraw, name="memory picture", daemon=True)
    thread.start()
    try:
        yield lambda news: gpus.__setitem__(news.rank, news.gpu)
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
