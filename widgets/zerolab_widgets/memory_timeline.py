"""Chapter 1: the memory timeline: every rank's bytes by kind over a whole run, with a scrubber.

Owns the picture of one run and what the reader chose: the moment and the rank. The data come
from `curves`, the colours from `theme`, the drawing is static/memory_timeline.js. A saved
notebook shows `to_html`: the same curves as an image, and a table of the peaks.
"""

import html
from collections.abc import Sequence
from typing import Any

import traitlets

from . import curves, picture, scripts, theme
from .bars import mib
from .curves import Chart, Curve
from .runs import run_of

STILL_MOMENTS = 60


class MemoryTimeline(picture.Picture):
    """Bytes on every GPU by kind, event by event, under the capacity line.

    Args:
        run: what `lab.train` returned, or the `Records` of its ranks.

    Raises:
        UsageError: `run` is neither.
    """

    _esm = scripts.script("memory_timeline", entry="renderTimeline")
    _css = scripts.style("memory_timeline")

    drawn = traitlets.Dict().tag(sync=True)  # see `curves.Chart.as_state`
    capacity = traitlets.Int(0).tag(sync=True)
    failure = traitlets.Dict().tag(sync=True)  # rank, requested, text; {} for a run that fitted
    moment = traitlets.Int(0).tag(sync=True)
    rank = traitlets.Int(0).tag(sync=True)  # position of the rank that is looked into
    theme = traitlets.Dict(theme.as_state()).tag(sync=True)

    def __init__(self, run: Any) -> None:
        self._run = run_of(run)
        self._chart = curves.chart_of(self._run)
        rank = _first_look(self._chart, self._run.failed)
        shown = self._chart.curves
        super().__init__(
            drawn=self._chart.as_state(),
            capacity=self._run.capacity,
            failure=self._failure(),
            rank=rank,
            moment=max(shown[rank].peak_moment, 0) if shown else 0,
            finding=curves.finding(self._run, self._chart),
        )

    def _failure(self) -> dict[str, Any]:
        run = self._run
        if run.failed is None:
            return {}
        return {
            "rank": run.failed,
            "moment": curves.failure_moment(run, self._chart.curves[run.failed]),
            "held": run.held,
            "requested": run.requested,
            "text": run.message,
        }

    def to_html(self) -> str:
        """Return the picture without script: an image, and the peak of every rank as a table."""
        if not any(curve.at for curve in self._chart.curves):
            return f"<p>{html.escape(self.finding)}</p>"
        still = curves.chart_of(self._run, STILL_MOMENTS)
        failed = self._run.failed
        at = -1 if failed is None else curves.failure_moment(self._run, still.curves[failed])
        image = picture.image(to_svg(still, self.capacity, failed, at), self.finding)
        text = self.failure.get("text", "")
        note = f"<p>{html.escape(text)}</p>" if text else ""
        return f"<p><b>{html.escape(self.finding)}</b></p>{image}{note}{to_table(self._chart)}"


def _first_look(drawn: Chart, failed: int | None) -> int:
    """Return which rank to look into first: the one that failed, else the fullest."""
    if failed is not None:
        return failed
    peaks = [curve.peak for curve in drawn.curves]
    return peaks.index(max(peaks)) if peaks else 0


def to_table(drawn: Chart) -> str:
    """Return the peak of every rank: how much, at which event, in which phase, allocated where."""
    heading = ("", "peak", "event", "phase", "last allocated")
    rows = ["".join(f"<th>{text}</th>" for text in heading)]
    for curve in drawn.curves:
        if curve.at:
            rows.append(_row(curve, drawn.births))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _row(curve: Curve, births: Sequence[Any]) -> str:
    moment = curve.peak_moment
    phase = next(phase for phase, first, last in curve.phases if first <= moment <= last)
    birth = curve.births[moment]
    event = f"{curve.at[moment] + 1:,} of {curve.events:,}"
    born = curves.birth_text(births[birth]) if birth >= 0 else ""
    cells = "".join(
        f'<td style="padding:1px 12px 1px 0">{html.escape(text)}</td>'
        for text in (mib(curve.peak), event, phase, born)
    )
    return f"<th>{curve.label}</th>{cells}"


# The still picture: one strip a rank, on light paper. Areas are painted largest first, each over
# the one before, so that every kind needs one boundary only.

WIDTH, STRIP, LEFT, GAP = 640, 84, 64, 10
IN_A_ROW = 5  # kinds in the legend
CELL = "padding:1px 12px 1px 0"


def to_svg(drawn: Chart, capacity: int, failed: int | None = None, at: int = -1) -> str:
    """Return the still picture as SVG text; rank `failed` ran out of memory at moment `at`."""
    paper, count = theme.LIGHT, len(drawn.curves)
    top = max([capacity, *(curve.peak for curve in drawn.curves)]) * 1.05 or 1
    kinds = [kind for kind in theme.KINDS if any(kind in curve.sizes for curve in drawn.curves)]
    strips = [
        _strip(
            curve, i * (STRIP + GAP) + GAP, drawn.moments, top, capacity, at if i == failed else -1
        )
        for i, curve in enumerate(drawn.curves)
    ]
    floor = count * (STRIP + GAP) + GAP
    height = floor + 8 + 14 * -(-len(kinds) // IN_A_ROW)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + GAP}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" '
        f'fill="{paper.paper}"/>{"".join(strips)}{_legend(kinds, floor + 4)}</svg>'
    )


def _strip(curve: Curve, above: int, moments: int, top: float, capacity: int, end: int) -> str:
    paper, floor = theme.LIGHT, above + STRIP
    parts = [
        f'<rect x="{LEFT}" y="{above}" width="{WIDTH}" height="{STRIP}" fill="{paper.track}"/>'
    ]
    kinds, step = list(curve.sizes), WIDTH / max(moments, 1)
    for i in reversed(range(len(kinds))):
        heights = [
            sum(column) for column in zip(*(curve.sizes[k] for k in kinds[: i + 1]), strict=True)
        ]
        path = _steps(heights, step, floor, STRIP * 1024 / top)
        parts.append(f'<path d="{path}" fill="{theme.KINDS[kinds[i]].fill}"/>')
    if capacity:
        y = floor - STRIP * capacity / top
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{paper.alarm}" stroke-width="2" stroke-dasharray="6 4"/>'
        )
    if end >= 0:
        x = LEFT + (end + 1) * step
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{above}" y2="{floor}" stroke="{paper.alarm}" '
            f'stroke-width="2"/><text x="{x + 4:.1f}" y="{above + 28}" fill="{paper.alarm}">'
            "out of memory</text>"
        )
    parts.append(f'<text x="4" y="{above + 14}" fill="{paper.ink}">{curve.label}</text>')
    parts.append(f'<text x="4" y="{above + 30}" fill="{paper.muted}">{mib(curve.peak)}</text>')
    return "".join(parts)


def _steps(heights: list[int], step: float, floor: int, scale: float) -> str:
    """Return a staircase as an SVG path, closed along the floor."""
    points = [f"M{LEFT},{floor}"]
    for i, height in enumerate(heights):
        points.append(f"V{floor - height * scale:.1f}H{LEFT + (i + 1) * step:.0f}")
    return "".join([*points, f"V{floor}Z"])


def _legend(kinds: list[str], y: int) -> str:
    parts = []
    for i, kind in enumerate(kinds):
        x, top = LEFT + i % IN_A_ROW * WIDTH // IN_A_ROW, y + i // IN_A_ROW * 14
        style = theme.KINDS[kind]
        parts.append(f'<rect x="{x}" y="{top}" width="10" height="10" fill="{style.fill}"/>')
        parts.append(
            f'<text x="{x + 13}" y="{top + 9}" fill="{theme.LIGHT.ink}">{style.label}</text>'
        )
    return "".join(parts)
