"""Chapter 0: progress, the learner's own log: one line of JSON for each attempt and hint.

Owns one file, progress.jsonl in the learner's workspace. Lines are only ever appended, so a
crash costs at most the line being written. It is never sent anywhere, and without a workspace
(ZEROLAB_WORKSPACE, which `zerolab learn` sets) nothing is written.

A line has `time` (seconds since 1970, UTC), `event` ("attempt" or "hint") and `exercise`; an
attempt also `outcome` and `mutant` (the known wrong answer it equals, or ""), a hint `number`.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .outcome import Outcome, Report

FILE = "progress.jsonl"


def path() -> Path | None:
    """Return where the log lies, None without a workspace."""
    workspace = os.environ.get("ZEROLAB_WORKSPACE")
    return Path(workspace) / FILE if workspace else None


def note_attempt(report: Report) -> None:
    """Write down how an attempt ended."""
    _append(
        event="attempt",
        exercise=report.exercise,
        outcome=report.outcome.value,
        mutant=report.mutant,
    )


def note_hint(exercise_id: str, number: int) -> None:
    """Write down that a hint was shown."""
    _append(event="hint", exercise=exercise_id, number=number)


def read(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log, in order; a line that a crash cut short is passed over."""
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            yield entry


def passed(log: Path) -> set[str]:
    """Return the exercises that have been passed."""
    return {e["exercise"] for e in read(log) if e.get("outcome") == Outcome.PASS.value}


def _append(**entry: Any) -> None:
    log = path()
    if log is None:
        return
    line = json.dumps({"time": round(time.time(), 3), **entry}) + "\n"
    with log.open("a", encoding="utf-8") as file:
        file.write(line)
