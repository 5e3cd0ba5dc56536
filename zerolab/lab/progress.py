"""Chapter 0: progress, the learner's own log: one line of JSON for each thing that happened.

Owns one file, progress.jsonl in the learner's workspace. It is never sent anywhere, and without
a workspace (ZEROLAB_WORKSPACE, which `zerolab learn` sets; or a notebook that lies in one)
nothing is written. course/PROGRESS.md explains it to learners and teachers.

A line has `time` (seconds since 1970, UTC) and `event`, and with each event:

    attempt     exercise, outcome, mutant (the known wrong answer it equals, or ""); of one that
                could not be checked on this machine also reason
    hint        exercise, number (one above the last hint: the solution was shown)
    skip        exercise
    prediction  exercise, predicted, measured
    hunt        exercise, mutant (the bug), named (the mutant whose belief was named), outcome
                (UNATTEMPTED: named, and not mended yet)
    quiz        chapter, question, kind, difficulty, answer (positions in the bank's order, or
                text), outcome, score (0 to 1), tries, misconceptions

Lines are only ever appended: in one write, synced to the disk, under a lock that two notebooks
share. A line that a crash cut short is recognised by its missing end; the next writer moves it
to progress.jsonl.damaged. What else is damaged stays where it is, and `load` says where.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .outcome import Outcome, Report
from .workspace import BASE

try:
    import fcntl
except ImportError:  # Windows: appending is still one write
    fcntl = None

FILE = "progress.jsonl"
ASIDE = "progress.jsonl.damaged"
TAIL_BYTES = 2**16  # read at a time when the last line is looked for

_warned: set[str] = set()  # folders that could not be written to


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that is no entry; it is still in the file."""

    line: int  # from 1
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{FILE}, line {self.line}: {self.reason}: {self.text[:60]!r}"


@dataclass(frozen=True, slots=True)
class Log:
    """What a file holds: the entries in order, and what could not be read."""

    entries: tuple[dict[str, Any], ...] = ()
    damage: tuple[Damage, ...] = ()


def path() -> Path | None:
    """Return where the log lies, None without a workspace."""
    workspace = os.environ.get("ZEROLAB_WORKSPACE")
    if workspace:
        return Path(workspace) / FILE
    return Path.cwd() / FILE if (Path.cwd() / BASE).is_dir() else None


# Writing.


def note_attempt(report: Report) -> None:
    """Write down how an attempt ended."""
    why = {"reason": report.message} if report.outcome is Outcome.SKIPPED else {}
    record(
        "attempt",
        exercise=report.exercise,
        outcome=report.outcome.value,
        mutant=report.mutant,
        **why,
    )


def note_hint(exercise_id: str, number: int) -> None:
    """Write down that a hint was shown."""
    record("hint", exercise=exercise_id, number=number)


def note_prediction(exercise_id: str, predicted: float, measured: float) -> None:
    """Write down what was predicted, and what came out."""
    record("prediction", exercise=exercise_id, predicted=predicted, measured=measured)


def note_hunt(exercise_id: str, mutant: str, named: str, outcome: Outcome) -> None:
    """Write down what a bug was taken for, and how the hunt went on."""
    record("hunt", exercise=exercise_id, mutant=mutant, named=named, outcome=outcome.value)


def note_answer(chapter: str, question: str, fields: Mapping[str, Any]) -> None:
    """Write down an answer to a question of a quiz."""
    record("quiz", chapter=chapter, question=question, **fields)


def record(event: str, **fields: Any) -> None:
    """Append one entry, if there is a workspace. A full disk does not stop the lesson.

    Args:
        event: its name.
        fields: plain data, which JSON can hold.
    """
    log = path()
    if log is None:
        return
    entry = {"time": round(time.time(), 3), "event": event, **fields}
    try:
        append(log, (json.dumps(entry) + "\n").encode())
    except OSError as error:
        if str(log) not in _warned:
            _warned.add(str(log))
            print(f"progress is not saved: {error}; make {log} writable", file=sys.stderr)


def append(log: Path, line: bytes) -> None:
    """Append one line so that no crash and no other process can mix it with another."""
    descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        with _locked(descriptor):
            _mend_end(descriptor, log.with_name(ASIDE))
            _write(descriptor, line)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Let nobody else write meanwhile; the lock ends with the process at the latest."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _mend_end(descriptor: int, aside: Path) -> None:
    """Move a line that a crash cut short to a file beside the log, or just end it if it is whole.

    It is written there before it is cut off here: a crash in between doubles it, none loses it.
    """
    tail = _unended(descriptor)
    if not tail:
        return
    if isinstance(_parsed(tail), dict):
        _write(descriptor, b"\n")
        return
    beside = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _write(beside, tail + b"\n")
    finally:
        os.close(beside)
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(tail))
    os.fsync(descriptor)


def _unended(descriptor: int) -> bytes:
    """Return what stands after the last end of a line."""
    start, tail = os.lseek(descriptor, 0, os.SEEK_END), b""
    while start > 0 and b"\n" not in tail:
        size = min(TAIL_BYTES, start)
        start = os.lseek(descriptor, start - size, os.SEEK_SET)
        tail = os.read(descriptor, size) + tail
    return tail.rpartition(b"\n")[2]


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it, and wait until it is on the disk."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


# Reading.


def load(log: Path) -> Log:
    """Return what a log holds; damaged lines are told of, and left where they are."""
    entries, damage = [], []
    for number, line in enumerate(log.read_bytes().split(b"\n"), 1):
        entry = _parsed(line)
        if isinstance(entry, dict) and isinstance(entry.get("event"), str):
            entries.append(entry)
        elif line.strip():
            text = line.decode(errors="backslashreplace")
            damage.append(Damage(number, _reason(entry), text))
    return Log(tuple(entries), tuple(damage))


def read(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log, in order; damaged lines are passed over."""
    yield from load(log).entries


def passed(log: Path) -> set[str]:
    """Return the exercises that have been passed."""
    return {
        str(e.get("exercise"))
        for e in read(log)
        if e["event"] == "attempt" and e.get("outcome") == Outcome.PASS.value
    }


def solved() -> set[str]:
    """Return the questions of quizzes that this learner has answered right."""
    log = path()
    if log is None or not log.exists():
        return set()
    return {
        str(e.get("question"))
        for e in read(log)
        if e["event"] == "quiz" and e.get("outcome") == "right"
    }


def _parsed(line: bytes) -> Any:
    """Return a line's value, the error for one that has none."""
    try:
        return json.loads(line.decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        return error


def _reason(entry: Any) -> str:
    """Say why a value is no entry."""
    if isinstance(entry, UnicodeDecodeError):
        return "is no text"
    if isinstance(entry, json.JSONDecodeError):
        return f"is no JSON from column {entry.colno} on"
    return "has no event" if isinstance(entry, dict) else "is no object"
