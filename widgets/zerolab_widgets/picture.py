"""Chapter 0: what small pictures have in common: a finding in words, papers, a still picture.

Owns the finding and the colours of paper of one picture. A picture derives from `Picture`, says
what it found when it is made, and returns from `to_html` what a saved notebook shows: tables and
images that need no script and are the same for the same data.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anywidget
import traitlets

from . import theme


class Picture(anywidget.AnyWidget):
    """A picture that says in one sentence what it shows."""

    finding = traitlets.Unicode("").tag(sync=True)
    theme = traitlets.Dict(theme.papers()).tag(sync=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.finding}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": repr(self), "text/html": self.to_html()}, metadata

    def to_html(self) -> str:
        """Return the picture without script."""
        return paragraph(self.finding)


def styles(named: Mapping[str, theme.KindStyle]) -> dict[str, Any]:
    """Return styles as plain data, for the scripts."""
    return {name: asdict(style) for name, style in named.items()}


# Pieces of still pictures.


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[int] = ()) -> str:
    """Return a table, flush left; the rows numbered in `bold` are printed so."""
    cells = [_row(head, "th", False)]
    cells += [_row(row, "td", number in bold) for number, row in enumerate(rows)]
    return f"<table>{''.join(cells)}</table>"


def _row(texts: Sequence[str], tag: str, bold: bool) -> str:
    weight = ";font-weight:bold" if bold else ""
    style = f"text-align:left;padding:1px 12px 1px 0{weight}"
    cells = (f'<{tag} style="{style}">{html.escape(text)}</{tag}>' for text in texts)
    return f"<tr>{''.join(cells)}</tr>"


def image(svg: str, alt: str) -> str:
    """Return an SVG as an image that untrusted notebooks show too."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(alt, quote=True)}" src="data:image/svg+xml;base64,{data}">'


class Svg:
    """A still drawing on light paper, put together shape by shape."""

    def __init__(self, width: int, height: int) -> None:
        """Begin with empty paper."""
        self.width, self.height = width, height
        self._shapes: list[str] = []
        self.rect(0, 0, width, height, theme.LIGHT.paper)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = ""
    ) -> None:
        """Add a rectangle."""
        edge = f' stroke="{stroke}"' if stroke else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            f' fill="{fill}"{edge}/>'
        )

    def text(
        self, x: float, y: float, text: str, fill: str = theme.LIGHT.ink, anchor: str = "start"
    ) -> None:
        """Add a line of text."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}"'
            f' font-family="sans-serif" font-size="11">{"".join(self._shapes)}</svg>'
        )
