"""Chapter 0: a whole run, the learner's own notebook from top to bottom in a process of its own.

Owns what came of it, a `WholeRun`: one row an exercise. pytest with nbval runs a copy that lies
beside the notebook, without outputs and without tags, so that neither an old output nor a tag
decides anything. Whether an exercise passed is read from the log that its `lab.check` wrote in
this very run, never from a cell that merely raised nothing. Phases: copy, run, read the log and
pytest's report, put the rows together.

`ZEROLAB_WORLD` decides where the notebook's own runs train and where the evidence inside
`lab.check` comes from: threads, gloo or nccl ranks. An exercise that needs more GPUs than there
are is skipped, with the reason; that is no failure, and no pass either.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..errors import UsageError
from . import exercise, progress
from .exercise import Exercise

WORLDS = ("lockstep", "gloo", "nccl")
CELL_SECONDS = 300
PASSED, FAILED, NOT_ATTEMPTED, SKIPPED = "passed", "failed", "not attempted", "skipped"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Row:
    """How one exercise ended."""

    id: str
    name: str
    outcome: str  # PASSED, FAILED, NOT_ATTEMPTED or SKIPPED
    message: str = ""  # what is wrong, or why it was skipped


@dataclass(frozen=True, slots=True)
class CellFailure:
    """A cell of the course, no exercise, that raised."""

    cell: str  # its id
    message: str


@dataclass(slots=True)
class WholeRun:
    """What came of one run of a notebook."""

    chapter: str
    world: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    failures: list[CellFailure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no exercise is open or wrong, and every other cell of the course ran."""
        return not self.failures and all(row.outcome in (PASSED, SKIPPED) for row in self.rows)


def run(chapter: str, notebook: Path, world: str, course: Path) -> WholeRun:
    """Run a learner's notebook and say how each of its exercises ended.

    Args:
        chapter: such as "00".
        notebook: the learner's file.
        world: one of `WORLDS`.
        course: the course's own edition of it, whose cells have to run.

    Raises:
        UsageError: the file is no notebook, or pytest could not run it.
    """
    started = time.monotonic()
    cells = code_cells(notebook)
    with tempfile.TemporaryDirectory() as scratch:
        reports = _execute(notebook, cells, world, Path(scratch))
        log = Path(scratch) / progress.FILE
        entries = list(progress.read(log)) if log.exists() else []
    result = WholeRun(chapter, world, round(time.monotonic() - started, 1))
    found = exercise.in_chapter(chapter)
    result.rows = [_row(one, cells, reports, entries) for one in found]
    course_ids = {cell["id"] for cell in code_cells(course)}
    known = exercise.every()  # those of earlier chapters too, which may be written once more
    result.failures = [
        CellFailure(cell["id"], last_line(text))
        for cell, text in zip(cells, reports, strict=True)
        if text and cell["id"] in course_ids and not any(checks(cell, one) for one in known)
    ]
    return result


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """Return a notebook's code cells, bare: id and text."""
    try:
        cells = json.loads(notebook.read_bytes())["cells"]
        return [
            {"id": cell.get("id", ""), "source": "".join(cell["source"])}
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{notebook.name} is no notebook ({type(error).__name__}: {error}); the copies in "
            ".zerolab/base and .zerolab/backup of the workspace may help"
        ) from error


def _execute(notebook: Path, cells: list[dict[str, Any]], world: str, scratch: Path) -> list[str]:
    """Run the cells under nbval; returns what each raised, "" where it raised nothing."""
    copy = notebook.with_name(f".check-{os.getpid()}-{notebook.name}")
    report = scratch / "report.xml"
    (scratch / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q"]
    words += [f"--nbval-cell-timeout={CELL_SECONDS}", "-p", "no:cacheprovider"]
    words += ["-c", str(scratch / "pytest.ini"), "--rootdir", str(notebook.parent)]
    words += [f"--junitxml={report}", str(copy)]
    ours = {"ZEROLAB_STRICT": "1", "ZEROLAB_WORLD": world, "ZEROLAB_WORKSPACE": str(scratch)}
    try:
        copy.write_text(json.dumps(_bare(cells)), encoding="utf-8")
        done = subprocess.run(
            words,
            env={**os.environ, **ours},
            cwd=notebook.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        copy.unlink(missing_ok=True)
    reports = list(_read_report(report)) if report.exists() else []
    if len(reports) != len(cells):
        said = (done.stdout + done.stderr).strip()
        raise UsageError(f"pytest could not run {notebook.name}: {last_line(said)}")
    return reports


def _bare(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the notebook that is run: code and nothing else."""
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    built = [{**empty, "id": f"cell-{i}", "source": c["source"]} for i, c in enumerate(cells)]
    return {"cells": built, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _read_report(report: Path) -> Iterator[str]:
    """Yield what each cell raised, in order."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        text = "\n".join(part.text or "" for part in case if part.tag in ("failure", "error"))
        plain = COLOURS.sub("", text).rpartition("\nTraceback:\n")[2].strip()
        yield plain or ("it failed" if text else "")


def checks(cell: dict[str, Any], found: Exercise) -> bool:
    """Tell whether a cell is where an exercise is answered."""
    call = rf"\blab\.check\(\s*['\"]{re.escape(found.id)}['\"]"
    return cell["id"] == f"exercise-{found.name}" or bool(re.search(call, cell["source"]))


def _row(
    found: Exercise,
    cells: list[dict[str, Any]],
    reports: list[str],
    entries: list[dict[str, Any]],
) -> Row:
    """Say how one exercise ended: by the last check in the log, else by what its cell raised."""
    said = [t for cell, t in zip(cells, reports, strict=True) if checks(cell, found)]
    checked = [e for e in entries if e["event"] == "attempt" and e.get("exercise") == found.id]
    outcomes = [entry.get("outcome") for entry in checked]
    raised = next((text for text in reversed(said) if text), "")
    if outcomes and outcomes[-1] == "PASS":
        return Row(found.id, found.name, PASSED)
    if outcomes and outcomes[-1] == "SKIPPED":
        return Row(found.id, found.name, SKIPPED, str(checked[-1].get("reason", "")))
    if outcomes and outcomes[-1] == "UNATTEMPTED":
        return Row(found.id, found.name, NOT_ATTEMPTED)
    if outcomes or raised:
        return Row(found.id, found.name, FAILED, card_message(raised, found) or "it failed")
    why = "its cell never calls lab.check" if said else "no cell of the notebook checks it"
    return Row(found.id, found.name, NOT_ATTEMPTED, why)


def card_message(raised: str, found: Exercise) -> str:
    """Return the sentence below a card's heading; the last line of any other error."""
    lines = raised.splitlines()
    for heading, message in itertools.pairwise(lines):
        if re.fullmatch(rf"[A-Z ]+  {re.escape(found.id)} {found.name}", heading):
            return message
    return last_line(raised)


def last_line(text: str) -> str:
    """Return what an error says at its end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
