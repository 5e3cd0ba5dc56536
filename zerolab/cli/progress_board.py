"""Chapter 12: `zerolab progress`, what a learner's log adds up to, as tables or as JSON.

Owns no facts: it prints what `lab.progress_summary` counted. A damaged log is told of on stderr,
line by line; what can be read is shown all the same.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from . import learner

if TYPE_CHECKING:
    from ..lab.progress import Log
    from ..lab.progress_summary import ChapterRow

DAMAGE_SHOWN = 10  # lines; the rest is counted


def progress(
    workspace: learner.Workspace = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Show what you have done: exercises, hints, time, quizzes. It never leaves this machine."""
    from ..lab import progress as log_file
    from ..lab import progress_summary

    path = learner.use(workspace)
    log = log_file.load(path) if path is not None and path.exists() else log_file.Log()
    rows = progress_summary.summarise(log.entries)
    if as_json:
        print(to_json(path, log, rows))
    else:
        show(path, log, rows)
    complain(log)
    return 0


def show(path: Path | None, log: "Log", rows: "Sequence[ChapterRow]") -> None:
    """Print the tables."""
    console = Console(highlight=False)
    if not log.entries:
        where = "no workspace here; `zerolab learn` makes one" if path is None else str(path)
        console.print(f"Nothing written down yet: {escape(where)}", soft_wrap=True)
    console.print(chapter_table(rows))
    for row in rows:
        if row.exercises:
            console.print(exercise_table(row))
        if any(one.tries for one in row.predictions):
            console.print(prediction_table(row))
        if row.hunts:
            console.print(hunt_table(row))
    for row in rows:
        if row.quiz.misconceptions:
            names = ", ".join(row.quiz.misconceptions[:5])
            console.print(f"To look at again in quiz {row.chapter}: {escape(names)}")


def chapter_table(rows: "Sequence[ChapterRow]") -> Any:
    """Show one line a chapter."""
    from .tables import new_table

    columns = ["chapter", "exercises passed", "minutes", "quiz right", "first try"]
    table = new_table("chapters", columns)
    for row in rows:
        table.add_row(
            f"{row.chapter} {row.title}".strip(),
            f"{row.passed} of {len(row.exercises)}" if row.exercises else "-",
            f"{row.minutes:.0f}",
            f"{row.quiz.right} of {row.quiz.questions}" if row.quiz.questions else "-",
            str(row.quiz.first_try) if row.quiz.tried else "-",
        )
    return table


def exercise_table(row: "ChapterRow") -> Any:
    """Show one line an exercise."""
    from .tables import new_table

    columns = ["exercise", "outcome", "attempts", "hints", "minutes", "tripped over"]
    table = new_table(f"chapter {row.chapter}", columns)
    last = table.columns[-1]
    last.no_wrap, last.justify = False, "left"  # the only text that may need several lines
    for one in row.exercises:
        table.add_row(
            f"{one.id} {one.name}",
            "not yet tried" if one.outcome == "UNATTEMPTED" else one.outcome,
            str(one.attempts),
            str(one.hints),
            f"{one.minutes:.0f}",
            ", ".join(one.mutants) or "-",
        )
    return table


def prediction_table(row: "ChapterRow") -> Any:
    """Show one line a number to predict: the first try counts."""
    from .tables import new_table

    columns = ["prediction", "predicted", "measured", "unit", "tries"]
    table = new_table(f"predictions of chapter {row.chapter}", columns)
    for one in row.predictions:
        numbers = [number(one.predicted), number(one.measured)]
        table.add_row(one.id, *numbers, escape(one.unit), str(one.tries or "-"))
    return table


def number(value: float | None) -> str:
    """Write a number with five digits; a dash for what is not there."""
    return "-" if value is None else f"{value:,.5g}"


def hunt_table(row: "ChapterRow") -> Any:
    """Show one line a bug that was looked for."""
    from .tables import new_table

    table = new_table(f"bug hunts of chapter {row.chapter}", ["bug in", "wrong names", "named"])
    table.add_column("mended", justify="right")
    table.add_column("it was", overflow="fold")
    for one in row.hunts:
        answers = ["yes" if done else "not yet" for done in (one.named, one.mended)]
        table.add_row(one.exercise, str(one.wrong_names), *answers, one.bug or "-")
    return table


def to_json(path: Path | None, log: "Log", rows: "Sequence[ChapterRow]") -> str:
    """Write everything as one line of JSON."""
    return json.dumps(
        {
            "file": None if path is None else str(path),
            "entries": len(log.entries),
            "damage": [{"line": d.line, "reason": d.reason, "text": d.text} for d in log.damage],
            "chapters": [asdict(row) | {"passed": row.passed} for row in rows],
        }
    )


def complain(log: "Log") -> None:
    """Say on stderr what could not be read, and that it is still there."""
    for damage in log.damage[:DAMAGE_SHOWN]:
        print(f"damaged: {damage}", file=sys.stderr)
    if log.damage:
        more = len(log.damage) - DAMAGE_SHOWN
        count = f" and {more} more lines" if more > 0 else ""
        print(
            f"These{count} were left as they are and are not counted; mend or delete them.",
            file=sys.stderr,
        )
