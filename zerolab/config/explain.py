"""Chapter 12: a whole file explained: every key with what it does here.

Data: a `Row` for each key of a file, in its order; an `Entry` for each key there is. Both are plain
data: the command line draws them, `as_json` writes them out.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import Report, rules
from .keys import STOPS, Key, Status, all_keys, show
from .problems import Path, Problem, Severity, dotted, same
from .schema import File

WORDS = {
    Status.WORKS: "works",
    Status.ALWAYS: "always so",
    Status.IDLE: "no effect",
    Status.CODE: "needs a call",
    Status.UNHEARD: "not yet heard",
    Status.LATER: "not yet",
    Status.CUDA: "needs CUDA",
    Status.REFUSED: "refused",
}

UNASKED = "default"  # the file gives the value that the key has anyway, or "auto"


@dataclass(frozen=True)
class Row:
    """One key of a file: its dotted name, its value as JSON, its status here, what it does."""

    key: str
    value: str
    status: str
    does: str


@dataclass(frozen=True)
class Entry:
    """One key of the schema: defaults here and in DeepSpeed 0.19.8, status, what and why."""

    key: str
    default: str
    deepspeed: str
    status: str
    does: str
    why: str


def rows(report: Report) -> list[Row]:
    """The keys of a file, in its order."""
    return list(_rows(report, report.raw, ()))


def entries() -> list[Entry]:
    """Every key there is, in the order of the schema."""
    return [_entry(key, status) for key, status in _with_status()]


def batch(report: Report) -> str:
    """The batch equation in numbers, or "" while it has no solution."""
    cfg = report.config
    if cfg is None:
        return ""
    factors = f"{cfg.micro_batch_size} x {cfg.accum_steps} x {cfg.world_size}"
    return f"{cfg.train_batch_size} = {factors} (micro batch x accumulation x GPUs)"


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data; `corrected` only when something is to correct.

    `fill_in` names what only the user can put right, and says what `corrected` has there.
    """
    corrected = report.corrected()
    return {
        "file": report.name,
        "gpus": report.world_size,
        "valid": not report.stoppers,
        "batch": batch(report),
        "keys": [asdict(row) for row in rows(report)],
        "problems": [_problem(problem) for problem in report.problems],
        "corrected": None if same(corrected, report.raw) else corrected,
        "fill_in": report.to_fill_in(),
    }


def _problem(problem: Problem) -> dict[str, str]:
    return {
        "key": problem.key,
        "severity": problem.severity.value,
        "message": problem.message,
        "remedy": problem.remedy,
    }


def _rows(report: Report, data: dict[str, Any], above: Path) -> Iterator[Row]:
    by_spelling = {spelled: path for path, spelled in report.reading.written.items()}
    for name, value in data.items():
        spelled = (*above, name)
        path = by_spelling.get(spelled)
        key = report.reading.given[path] if path is not None else None
        inside = key is not None and (key.block is not None or key.name == "params")
        if inside and isinstance(value, dict) and value:
            yield from _rows(report, value, spelled)
        else:
            status, does = _said(report, spelled, key)
            silent = value == "auto" and status != "error"
            yield Row(dotted(spelled), show(value), UNASKED if silent else status, does)


def _said(report: Report, spelled: Path, key: Key | None) -> tuple[str, str]:
    """The status word and the sentence of one row."""
    found = [p for p in report.problems if p.path and p.path == spelled[: len(p.path)]]
    wrong = any(p.severity is Severity.ERROR for p in found)
    if key is None:
        return _unnamed(spelled, wrong)
    idle = any(p.severity is Severity.WARNING for p in found)
    status = key.status if key.status is not Status.DETAIL else _block_status(report, key)
    if wrong and status not in STOPS:
        return "error", key.does
    if status is Status.WORKS and not rules.acts(report.reading, key):
        return WORDS[Status.IDLE], key.does
    if wrong or idle or status in (Status.WORKS, Status.ALWAYS):
        return WORDS[status], key.does
    return UNASKED, key.does


def _unnamed(spelled: Path, wrong: bool) -> tuple[str, str]:
    if "params" in spelled[:-1]:
        return ("error" if wrong else "works"), "argument of the class"
    return "unknown", "see below"


def _block_status(report: Report, key: Key) -> Status:
    above = report.reading.given[key.path[:-1]]
    return above.status if above.status is not Status.DETAIL else _block_status(report, above)


def _with_status() -> Iterator[tuple[Key, Status]]:
    known: dict[Path, Status] = {}
    for key in all_keys(File):
        own = key.status is not Status.DETAIL
        known[key.path] = key.status if own else known[key.path[:-1]]
        yield key, known[key.path]


def _entry(key: Key, status: Status) -> Entry:
    default, theirs = ("{}", "{}") if key.block else (show(key.default), show(key.deepspeed))
    return Entry(".".join(key.path), default, theirs, WORDS[status], key.does, key.why)
