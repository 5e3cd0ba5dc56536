"""Chapter 3: the live dashboard: memory bars, losses and the share of communication of a run.

Owns what it was told of the run so far. It is a picture that `lab.train(watch=...)` feeds, as
memory_bars is, and has one method more, `advance`. The data come from `bars` and `pulse`; the
curves are drawn by static/live_dashboard.js. What a saved notebook shows has no times in it.
"""

import math
from collections.abc import Sequence

import traitlets

from zerolab.records import Records

from . import picture, pulse, scripts
from .bars import mib
from .memory_bars import MemoryBars

STILL_ROWS = 8
LOCKSTEP_NOTE = (
    "Lockstep ranks are threads that run one at a time: their communication is copying in memory, "
    "and says nothing about a network."
)


class LiveDashboard(MemoryBars):
    """Memory bars of a run, with its losses and what its collectives cost, step by step.

    Args:
        capacity: the ceiling in bytes, None for none; `lab.train` sets it.
    """

    _esm = scripts.script("memory_bars", "live_dashboard", entry="renderDashboard")
    _css = scripts.style("memory_bars", "live_dashboard")

    losses = traitlets.List().tag(sync=True)  # [step, mean loss]
    shares = traitlets.List().tag(sync=True)  # [step, share of the time in collectives]
    moved = traitlets.Dict().tag(sync=True)  # op -> bytes, last step
    note = traitlets.Unicode("").tag(sync=True)

    def __init__(self, capacity: int | None = None) -> None:
        self._pulse = pulse.Pulse()
        self._losses: list[float] = []
        super().__init__(capacity)

    def advance(self, losses: Sequence[Sequence[float]], ranks: Sequence[Records]) -> None:
        """Take in how far the run has come.

        Args:
            losses: of every rank, step by step.
            ranks: the records of every rank; they grow while the run goes on.
        """
        if not ranks:
            return
        self._losses = pulse.mean_losses(losses)
        self._pulse.read(ranks)
        lockstep = ranks[0].world in ("lockstep", "")
        with self.hold_sync():
            points = pulse.thinned([round(loss, 5) for loss in self._losses])
            self.losses = [point for point in points if math.isfinite(point[1])]
            self.shares = pulse.thinned([round(share, 4) for share in self._pulse.shares])
            self.moved = dict(self._pulse.moved)
            self.note = LOCKSTEP_NOTE if lockstep else ""
            self._find()

    def _find(self) -> None:
        super()._find()
        training = pulse.finding(self._losses, self._pulse)
        self.finding = f"{self.finding} {training}".strip()

    def __repr__(self) -> str:
        return f"LiveDashboard: {self.finding}"

    def to_html(self) -> str:
        """Return the bars, losses and bytes moved without script, and without times."""
        return super().to_html() + _tables(self._losses, self._pulse.moved)


def _tables(losses: Sequence[float], moved: dict[str, int]) -> str:
    if not losses:
        return ""
    points = pulse.thinned(losses, STILL_ROWS)
    steps = picture.table(["step", "loss"], [[f"{i + 1:,}", f"{loss:.4f}"] for i, loss in points])
    ops = [[op, mib(size)] for op, size in sorted(moved.items())]
    return steps + (picture.table(["collective", "bytes a step"], ops) if ops else "")
