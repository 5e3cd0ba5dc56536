"""Chapter 0: cards, what the learner sees of a report, as HTML in a notebook and as text elsewhere.

Owns no state and no colours: a card takes JupyterLab's own, so that it fits the light and the
dark theme. The word for the outcome stands beside the colour. A `CheckFailed` shows nothing
but its card, and still fails the cell.
"""

import html
import linecache
import re
import sys
from dataclasses import dataclass
from typing import Any

from .exercise import Exercise
from .outcome import Outcome, Report

# JupyterLab's colours for success, error, warning; the plain border where there is no JupyterLab.
STRIPES = {
    Outcome.PASS: "--jp-success-color1",
    Outcome.FAIL: "--jp-error-color1",
    Outcome.EXCEPTION: "--jp-error-color1",
    Outcome.OOM: "--jp-error-color1",
    Outcome.TIMEOUT: "--jp-warn-color1",
    Outcome.DEADLOCK: "--jp-warn-color1",
    Outcome.UNATTEMPTED: "--jp-border-color1",
    Outcome.SKIPPED: "--jp-border-color1",
}
WORDS = {Outcome.OOM: "OUT OF MEMORY", Outcome.UNATTEMPTED: "NOT YET TRIED"}
BOX = (
    "border:1px solid var(--jp-border-color2,currentColor);border-left:6px solid {stripe};"
    "border-radius:4px;padding:8px 14px;margin:4px 0;max-width:54em;"
    "font-family:var(--jp-content-font-family,sans-serif);font-size:var(--jp-content-font-size1,14px);"
    "line-height:1.5;color:var(--jp-content-font-color1,inherit)"
)
LABEL = (
    "text-align:left;vertical-align:top;padding:1px 14px 1px 0;font-weight:600;white-space:nowrap"
)
VALUE = "text-align:left;vertical-align:top;padding:1px 0;overflow-wrap:anywhere"
MONO = "font-family:var(--jp-code-font-family,monospace);font-size:0.95em;white-space:pre-wrap"


@dataclass(frozen=True)
class Row:
    """One labelled line of a card."""

    label: str
    text: str
    code: bool = False  # shown in a fixed-width font


@dataclass(frozen=True)
class Card:
    """A heading, a sentence or two, labelled rows, a line below."""

    stripe: str  # name of one of JupyterLab's colour variables
    heading: str
    message: str = ""
    rows: tuple[Row, ...] = ()
    footer: str = ""

    def __repr__(self) -> str:
        parts = [self.heading, self.message]
        width = max((len(row.label) for row in self.rows), default=0)
        for row in self.rows:
            first, *rest = row.text.split("\n")
            parts.append(f"  {row.label:<{width}}  {first}")
            parts += [f"  {'':<{width}}  {line}" for line in rest]
        return "\n".join(part for part in [*parts, self.footer] if part)

    def _repr_html_(self) -> str:
        stripe = f"var({self.stripe},currentColor)"
        style = BOX.format(stripe=stripe)
        rows = "".join(map(_row_html, self.rows))
        parts = [
            f'<div role="status" style="{style}">',
            f'<div style="font-weight:700">{html.escape(self.heading)}</div>',
            f"<div>{text_html(self.message)}</div>" if self.message else "",
            f'<table style="margin:6px 0 2px;border-collapse:collapse">{rows}</table>'
            if rows
            else "",
            f'<div style="opacity:.8;font-size:.92em">{text_html(self.footer)}</div>'
            if self.footer
            else "",
            "</div>",
        ]
        return "".join(parts)


def _row_html(row: Row) -> str:
    value = html.escape(row.text)
    inner = f'<span style="{MONO}">{value}</span>' if row.code else text_html(row.text)
    return (
        f'<tr style="background:none"><th style="{LABEL}">{html.escape(row.label)}</th>'
        f'<td style="{VALUE}">{inner}</td></tr>'
    )


def text_html(text: str) -> str:
    """Escape prose; a table of ranks keeps its columns, `code` gets its font."""
    if "\n" in text:
        return f'<div style="{MONO};overflow-x:auto">{html.escape(text)}</div>'
    return re.sub(r"`([^`]+)`", rf'<code style="{MONO}">\1</code>', html.escape(text))


class CheckFailed(Exception):  # noqa: N818 - named for the learner who reads it
    """The check did not pass. The card has been shown already.

    Args:
        card: what was shown.
        in_full: say it again in the traceback, for a log in which nobody sees cards.
    """

    def __init__(self, card: Card, *, in_full: bool = False) -> None:
        super().__init__(repr(card))
        self.card = card
        self.in_full = in_full

    def _render_traceback_(self) -> list[str]:
        if self.in_full:
            return repr(self.card).splitlines()
        return [f"{self.card.heading}. The card above says why."]


def in_notebook() -> bool:
    """Whether somebody can see what IPython displays."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return get_ipython() is not None


def show(thing: Any) -> None:
    """Display an object in a notebook, print it elsewhere."""
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(thing)


def card_of(report: Report, exercise: Exercise, status: str) -> Card:
    """Return the card for a report.

    Args:
        report: what the check found.
        exercise: what was checked.
        status: the line that says whose functions the engine runs on.
    """
    word = WORDS.get(report.outcome, report.outcome.value)
    return Card(
        stripe=STRIPES[report.outcome],
        heading=f"{word}  {exercise.id} {exercise.name}",
        message=report.message,
        rows=tuple(_rows(report, exercise)),
        footer=status,
    )


def _rows(report: Report, exercise: Exercise) -> list[Row]:
    if report.outcome in (Outcome.PASS, Outcome.SKIPPED):
        return [*_proven(report), *_world(report), *_printed(report)]
    hint = Row("hint", f'lab.hint("{exercise.id}")', code=True)
    if report.outcome is Outcome.UNATTEMPTED:
        return [hint]
    rank = "" if report.rank is None else str(report.rank)
    line = f"{report.line}: {_source_line(report)}" if report.line else ""
    evidence = [
        Row("call", report.call, code=True),
        Row("rank", rank),
        Row("expected", report.expected, code=True),
        Row("observed", report.observed, code=True),
        Row("your line", line, code=True),
        Row("perhaps", report.misconception),
    ]
    shown = [row for row in evidence if row.text]
    return [*_proven(report), *shown, *_world(report), *_printed(report), hint]


def _proven(report: Report) -> list[Row]:
    return [Row("proven", fact) for fact in report.proven]


def _world(report: Report) -> list[Row]:
    return [Row("ranks", f"processes, {report.world}")] if report.world else []


def _printed(report: Report) -> list[Row]:
    return [Row("printed", report.output.rstrip(), code=True)] if report.output.strip() else []


def _source_line(report: Report) -> str:
    return linecache.getline(report.file, report.line).strip()
