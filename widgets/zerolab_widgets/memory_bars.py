"""Chapter 0: memory bars, one stacked bar a GPU under its ceiling, live while ranks run.

Owns the synced state of one picture: the bars, the ceiling, the recorded moments and what the
reader chose (moment, ceiling, segment). The data come from `bars`, the colours from `theme`,
the drawing is static/memory_bars.js. Phases: `show` while a run goes on, `finish` with the
records when it ended; a saved notebook shows `to_html`, a picture and a table without script.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anywidget
import traitlets

from zerolab.records import Records

from . import bars as data
from . import picture, scripts, theme
from .bars import GIB, MIB, Bar, bar_of_records, frames_of_records, in_order, mib


class MemoryBars(anywidget.AnyWidget):
    """Bytes per GPU by kind, with a ceiling and, after a run, a slider over its moments.

    Args:
        capacity: the ceiling in bytes, None for none.
        slider: what the slider moves: "time" through a recorded run, or the "ceiling"; "none"
            where other controls move the bars under a ceiling.
    """

    _esm = scripts.script("memory_bars", entry="renderBars")
    _css = scripts.style("memory_bars")

    bars = traitlets.List().tag(sync=True)
    frames = traitlets.List().tag(sync=True)
    frame = traitlets.Int(-1).tag(sync=True)  # -1: the peak of every rank
    capacity = traitlets.Int(0).tag(sync=True)
    slider = traitlets.Enum(["time", "ceiling", "none"], "time").tag(sync=True)
    selected = traitlets.List().tag(sync=True)  # [position of the bar, kind]
    finding = traitlets.Unicode("Nothing has run yet.").tag(sync=True)
    message = traitlets.Unicode("").tag(sync=True)
    theme = traitlets.Dict(theme.as_state()).tag(sync=True)

    def __init__(self, capacity: int | None = None, slider: str = "time") -> None:
        self._last: list[Bar] = []
        super().__init__(capacity=capacity or 0, slider=slider)

    @traitlets.observe("capacity")
    def _ceiling_moved(self, change: Any) -> None:
        if self._last:
            self._find()

    @classmethod
    def of_bars(cls, bars: Sequence[Bar], capacity: int) -> "MemoryBars":
        """Draw bars side by side under a ceiling that the reader moves."""
        picture = cls(capacity, slider="ceiling")
        picture._draw([replace(bar, segments=in_order(bar.segments)) for bar in bars])
        return picture

    def show(
        self, held: Sequence[Mapping[str, int]], phases: Sequence[str], peaks: Sequence[int]
    ) -> None:
        """Draw what every rank holds now, while the run goes on.

        Args:
            held: bytes by kind, one mapping a rank.
            phases: what each rank is doing.
            peaks: the most each rank has held so far.
        """
        labels = (f"rank {rank}" for rank in range(len(held)))
        self._draw(
            [Bar(label, in_order(dict(by_kind)), peak, phase)
             for label, by_kind, phase, peak in zip(labels, held, phases, peaks, strict=True)]
        )  # fmt: skip

    def finish(
        self, ranks: Sequence[Records], failed: int | None = None, message: str = ""
    ) -> None:
        """Draw the finished run: every rank at its peak, and the moments on the slider.

        Args:
            ranks: the records of every rank.
            failed: position of the rank that ran out of memory, None if none did.
            message: the first line of its error.
        """
        ranks = [replace(records, memory=list(records.memory)) for records in ranks]  # read once
        bars = [bar_of_records(records, failed=i == failed) for i, records in enumerate(ranks)]
        with self.hold_sync():
            self.frames = frames_of_records(ranks)
            self.frame = -1
            self.message = message
            self._draw(bars)

    def _draw(self, bars: Sequence[Bar]) -> None:
        self._last = list(bars)
        self._find()
        self.bars = [bar.as_state() for bar in bars]

    def _find(self) -> None:
        if self.slider != "time":
            self.finding = data.finding_under(self._last, self.capacity)
        else:
            self.finding = data.finding(self._last, self.capacity or None)

    def __repr__(self) -> str:
        return f"MemoryBars: {self.finding}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": repr(self), "text/html": self.to_html()}, metadata

    def to_html(self) -> str:
        """Return the picture without script: an image and the numbers behind it as a table."""
        bars = self._last
        if not bars:
            return f"<p>{self.finding}</p>"
        image = picture.image(to_svg(bars, self.capacity), self.finding)
        note = f"<p>{html.escape(self.message)}</p>" if self.message else ""
        return image + note + to_table(bars)


def to_table(bars: Sequence[Bar]) -> str:
    """Return the bars as an HTML table: a row a kind, a column a GPU, the sum below."""
    kinds = in_order({kind: 1 for bar in bars for kind in bar.segments})
    rows = [["", *(bar.label for bar in bars)]]
    for kind in kinds:
        sizes = (bar.segments.get(kind, 0) for bar in bars)
        rows.append([theme.KINDS[kind].label, *(mib(size) if size else "-" for size in sizes)])
    rows.append(["sum", *(mib(bar.total) for bar in bars)])
    return f"<table>{_row(rows[0], 'th')}{''.join(_row(row, 'td') for row in rows[1:])}</table>"


def _row(texts: Sequence[str], tag: str) -> str:
    first, *others = (html.escape(text) for text in texts)
    cells = "".join(
        f'<{tag} style="text-align:right;padding:1px 0 1px 12px">{text}</{tag}>' for text in others
    )
    return f"<tr><th>{first}</th>{cells}</tr>"


# The still picture: the same bars as the script draws, as SVG on light paper.

BAR_WIDTH, GAP, HEIGHT, TOP, BOTTOM, GUTTER = 112, 24, 200, 12, 40, 84
LONGEST = 15  # letters of a label that fit into a bar beside a number


def to_svg(bars: Sequence[Bar], capacity: int) -> str:
    """Return the still picture as SVG text, on light paper."""
    scale = HEIGHT / (max([capacity, *(bar.total for bar in bars)]) * 1.04 or 1)
    width = GAP + len(bars) * (BAR_WIDTH + GAP) + GUTTER
    body = [_svg_bar(bar, GAP + i * (BAR_WIDTH + GAP), scale) for i, bar in enumerate(bars)]
    if capacity:
        body.append(_svg_ceiling(capacity, width, scale))
    paper = f'<rect width="100%" height="100%" fill="{theme.LIGHT.paper}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}"'
        f' font-family="sans-serif" font-size="11">{paper}{"".join(body)}</svg>'
    )


def _svg_bar(bar: Bar, left: int, scale: float) -> str:
    floor = TOP + HEIGHT
    parts = [_svg_rect(left, TOP, HEIGHT, theme.LIGHT.track)]
    for kind, size in bar.segments.items():
        style, height = theme.KINDS[kind], size * scale
        floor -= height
        parts.append(_svg_rect(left, floor, height, style.fill))
        if height >= 14:
            unit = next((size for size in (GIB, MIB) if HEIGHT / scale >= size), 1024)
            name = style.label if len(style.label) <= LONGEST else kind
            text = f"{name} {size / unit:.1f}"
            parts.append(_svg_text(left + BAR_WIDTH / 2, floor + height / 2 + 4, text, style.ink))
    colour = theme.LIGHT.alarm if bar.failed else theme.LIGHT.ink
    state = f"{mib(bar.total)}, out of memory" if bar.failed else mib(bar.total)
    middle = left + BAR_WIDTH / 2
    parts.append(_svg_text(middle, TOP + HEIGHT + 16, bar.label, theme.LIGHT.ink))
    parts.append(_svg_text(middle, TOP + HEIGHT + 32, state, colour))
    return "".join(parts)


def _svg_rect(left: float, top: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{left}" y="{top:.1f}" width="{BAR_WIDTH}" height="{height:.1f}" fill="{fill}"'
        f' stroke="{theme.LIGHT.paper}"/>'
    )


def _svg_text(x: float, y: float, text: str, fill: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" text-anchor="middle" fill="{fill}">{text}</text>'


def _svg_ceiling(capacity: int, width: int, scale: float) -> str:
    y = TOP + HEIGHT - capacity * scale
    line = (
        f'<line x1="0" x2="{width - GUTTER}" y1="{y:.1f}" y2="{y:.1f}"'
        f' stroke="{theme.LIGHT.alarm}" stroke-width="2" stroke-dasharray="6 4"/>'
    )
    middle = width - GUTTER / 2
    label = _svg_text(middle, y, "ceiling", theme.LIGHT.alarm)
    return line + label + _svg_text(middle, y + 14, mib(capacity), theme.LIGHT.alarm)
