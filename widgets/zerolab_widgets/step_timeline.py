"""Chapter 3: the step timeline: what every rank computes, sends and copies in one step.

Owns the step that is shown. The data come from `lanes`, the colours from `theme`, the drawing is
static/step_timeline.js. In the process world the axis is measured time; in lockstep it is order,
and the picture says so. A saved notebook shows an image and a table without script.
"""

import html
from collections.abc import Sequence
from typing import Any

import traitlets

from . import lanes, picture, scripts, theme
from .bars import mib
from .lanes import RankStep
from .runs import run_of


class StepTimeline(picture.Picture):
    """Lanes of every rank for compute, communication and copies, over one training step.

    Args:
        run: what `lab.train` returned, or the `Records` of its ranks.
        step: which step, from 0; -1 for the last.

    Raises:
        UsageError: `run` is neither.
    """

    _esm = scripts.script("step_timeline", entry="renderSteps")
    _css = scripts.style("step_timeline")

    drawn = traitlets.Dict().tag(sync=True)  # see `lanes.as_state`
    step = traitlets.Int(0).tag(sync=True)
    steps = traitlets.Int(0).tag(sync=True)
    chosen = traitlets.List().tag(sync=True)  # [position of the rank, number of the piece]
    theme = traitlets.Dict(theme.as_state()).tag(sync=True)

    def __init__(self, run: Any, step: int = -1) -> None:
        self._run = run_of(run)
        self._windows = lanes.windows_of(self._run)
        self._ranks: list[RankStep] = []
        steps = len(self._windows)
        first = max(0, min(steps - 1, steps + step if step < 0 else step))
        super().__init__(steps=steps, step=first)
        self._show()
        self.observe(self._moved, names="step")

    def _moved(self, change: Any) -> None:
        with self.hold_sync():
            self.chosen = []
            self._show()

    def _show(self) -> None:
        in_order = self._run.in_order_only
        if self.steps:
            self.step = max(0, min(self.steps - 1, self.step))
            labels = [f"rank {records.rank}" for records in self._run.ranks]
            self._ranks = [
                lanes.rank_step(label, window)
                for label, window in zip(labels, self._windows[self.step], strict=True)
            ]
        self.drawn = lanes.as_state(self._ranks, in_order)
        self.finding = lanes.finding(self._ranks, self.step, self.steps, in_order)

    def to_html(self) -> str:
        """Return the step without script: an image, and a table of what communication cost."""
        if not self._ranks:
            return picture.paragraph(self.finding)
        image = picture.image(to_svg(self._ranks), self.finding)
        heading = f"<p><b>{html.escape(self.finding)}</b></p>"
        return heading + image + to_table(self._ranks, self._run.in_order_only)


def to_table(ranks: Sequence[RankStep], in_order: bool) -> str:
    """Return a row a rank: data collectives, how many are exposed, bytes, and time if known."""
    head = ["", "data collectives", "hidden", "exposed", "bytes"]
    rows = []
    for rank in ranks:
        hidden = rank.calls - rank.exposed_calls
        counts = [str(number) for number in (rank.calls, hidden, rank.exposed_calls)]
        time = [] if in_order else [f"{rank.exposed:.1f} of {rank.length:.1f} ms"]
        rows.append([rank.label, *counts, mib(rank.nbytes), *time])
    return picture.table(head if in_order else [*head, "exposed time"], rows)


# The still picture: three lanes a rank, on light paper.

WIDTH, LANE, LEFT, GAP, LEGEND = 640, 14, 64, 12, 22


def _last_row(rank: RankStep, lane: str) -> int:
    """Return the last row of a lane; what overlaps lies in different ones."""
    return max((piece.row for piece in rank.pieces if piece.lane == lane), default=0)


def to_svg(ranks: Sequence[RankStep]) -> str:
    """Return the still picture as SVG text."""
    height = len(ranks) * (3 * LANE + GAP) + GAP + LEGEND
    svg = picture.Svg(LEFT + WIDTH + GAP, height)
    scale = WIDTH / (max(rank.length for rank in ranks) or 1)
    used: dict[str, None] = {}
    for i, rank in enumerate(ranks):
        top = GAP + i * (3 * LANE + GAP)
        svg.text(4, top + 12, rank.label)
        svg.rect(LEFT, top, WIDTH, 3 * LANE, theme.LIGHT.track)
        rows = {lane: 1 + _last_row(rank, lane) for lane in lanes.LANES}
        for piece in sorted(rank.pieces, key=lambda piece: piece.what == "exposed"):
            used[piece.what] = None
            thick = (LANE - 2) / rows[piece.lane]
            y = top + lanes.LANES.index(piece.lane) * LANE + 1 + piece.row * thick
            width = max((piece.end - piece.start) * scale, 1)
            fill = theme.LANES[piece.what].fill
            svg.rect(LEFT + piece.start * scale, y, width, thick, fill)
    x = LEFT
    for what in (name for name in theme.LANES if name in used):
        label = theme.LANES[what].label
        svg.rect(x, height - 14, 10, 10, theme.LANES[what].fill)
        svg.text(x + 13, height - 5, label)
        x += 26 + 6 * len(label)
    return str(svg)
