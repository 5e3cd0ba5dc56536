"""Chapter 0: what a learner's log adds up to, by chapter, exercise and quiz.

Owns nothing: every number is counted from the entries of the log and from the lists of
exercises and questions. Entries that a newer or damaged course wrote are never a reason to fail:
what is unknown is left out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from . import exercise, prediction, quiz_bank, quiz_session, workspace
from .outcome import Outcome

PAUSE_SECONDS = 600  # a longer silence is a break, and none of it counts as work
Entry = Mapping[str, Any]


@dataclass(slots=True)
class ExerciseRow:
    """One exercise: how it stands, and the way there."""

    id: str
    name: str
    outcome: str = "UNATTEMPTED"  # PASS once it passed, then the last one
    attempts: int = 0
    hints: int = 0
    predictions: int = 0
    mutants: list[str] = field(default_factory=list)  # wrong answers tripped over, each once
    minutes: float = 0.0


@dataclass(slots=True)
class QuizRow:
    """The questions of one chapter: how many, tried, right, right at the first try."""

    questions: int = 0
    tried: int = 0
    right: int = 0
    first_try: int = 0
    answers: int = 0
    misconceptions: list[str] = field(default_factory=list)  # of questions not right yet


@dataclass(slots=True)
class PredictionRow:
    """One number that was predicted: the first try, which counts, and what was measured then."""

    id: str
    unit: str
    predicted: float | None = None
    measured: float | None = None
    tries: int = 0


@dataclass(slots=True)
class HuntRow:
    """One bug of an exercise; its name is told once it has been found."""

    exercise: str
    bug: str = ""  # the mutant, "" while it has not been named
    wrong_names: int = 0
    named: bool = False
    mended: bool = False


@dataclass(slots=True)
class ChapterRow:
    """One chapter; `minutes` is an estimate, breaks left out."""

    chapter: str
    title: str
    minutes: float
    exercises: list[ExerciseRow]
    quiz: QuizRow
    predictions: list[PredictionRow] = field(default_factory=list)  # all there are
    hunts: list[HuntRow] = field(default_factory=list)  # those that were begun

    @property
    def passed(self) -> int:
        """How many exercises passed."""
        return sum(row.outcome == Outcome.PASS.value for row in self.exercises)


def summarise(entries: Sequence[Entry]) -> list[ChapterRow]:
    """Return one row for each chapter of the course, in order."""
    spent = _seconds(entries)
    return [_chapter(name, entries, spent) for name in chapters()]


def chapters() -> list[str]:
    """Return the numbers of the chapters that have a notebook, exercises or questions."""
    course = workspace.course_folder()
    there = {path.name[:2] for path in workspace.notebooks(course)}
    there |= {path.stem for path in (course / "quiz").glob("[0-9][0-9].toml")}
    return sorted(there | set(exercise.CHAPTERS))


def _chapter(chapter: str, entries: Sequence[Entry], spent: defaultdict[str, float]) -> ChapterRow:
    own = [entry for entry in entries if _chapter_of(entry) == chapter]
    found = exercise.in_chapter(chapter) if chapter in exercise.CHAPTERS else ()
    rows = [_exercise(one.id, one.name, own, spent) for one in found]
    try:
        bank = quiz_bank.read_bank(quiz_session.bank_path(chapter))
    except UsageError:  # no questions, or damaged ones: `zerolab quiz` says which
        bank = quiz_bank.Bank(chapter, "", ())
    quiz = _quiz([question.id for question in bank.questions], own)
    minutes = round(spent[chapter] / 60, 1)
    asked = prediction.in_chapter(chapter) if chapter in exercise.CHAPTERS else ()
    predictions = [_prediction(one, own) for one in asked]
    return ChapterRow(chapter, _title(chapter), minutes, rows, quiz, predictions, _hunts(own))


def _prediction(asked: prediction.Prediction, entries: Iterable[Entry]) -> PredictionRow:
    """Find the first try at one number, and count all."""
    row = PredictionRow(asked.id, asked.unit)
    for entry in entries:
        if entry["event"] == "prediction" and entry.get("exercise") == asked.id:
            row.tries += 1
            if row.tries == 1:
                row.predicted, row.measured = (_real(entry, k) for k in ("predicted", "measured"))
    return row


def _real(entry: Entry, name: str) -> float | None:
    """Return a number of an entry, None for anything else."""
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) else None


def _hunts(entries: Iterable[Entry]) -> list[HuntRow]:
    """Sum up each bug that was looked for."""
    rows: dict[tuple[str, str], HuntRow] = {}
    for entry in entries:
        if entry["event"] != "hunt":
            continue
        key = str(entry.get("exercise")), str(entry.get("mutant"))
        row = rows.setdefault(key, HuntRow(key[0]))
        row.wrong_names += entry.get("named") != entry.get("mutant")
        row.named |= entry.get("named") == entry.get("mutant")
        row.mended |= row.named and entry.get("outcome") == Outcome.PASS.value
        row.bug = key[1] if row.named else ""
    return list(rows.values())


def _title(chapter: str) -> str:
    """Return a chapter's name: that of its notebook."""
    try:
        notebook = workspace.notebook_of(workspace.course_folder(), chapter)
    except UsageError:
        return ""
    return notebook[3:].removesuffix(".ipynb").replace("_", " ")


def _exercise(
    name: str, function: str, entries: Iterable[Entry], spent: defaultdict[str, float]
) -> ExerciseRow:
    row = ExerciseRow(name, function, minutes=round(spent[name] / 60, 1))
    for entry in entries:
        if entry.get("exercise") != name:
            continue
        row.hints += entry["event"] == "hint"
        row.predictions += entry["event"] == "prediction"
        if entry["event"] == "attempt":
            _count_attempt(row, entry)
    return row


def _count_attempt(row: ExerciseRow, entry: Entry) -> None:
    """Take one attempt in; running an untouched cell is none, nor is what cannot run here."""
    outcome, mutant = str(entry.get("outcome")), entry.get("mutant")
    row.attempts += outcome not in (Outcome.UNATTEMPTED.value, Outcome.SKIPPED.value)
    if row.outcome != Outcome.PASS.value:
        row.outcome = outcome
    if mutant and mutant not in row.mutants:
        row.mutants.append(str(mutant))


def _quiz(questions: Sequence[str], entries: Iterable[Entry]) -> QuizRow:
    """Count the answers; asking for the right one and handing in a text are none."""
    tried: set[str] = set()
    given_up: set[str] = set()
    right: set[str] = set()
    row, met = QuizRow(len(questions)), []
    for entry in entries:
        question, outcome = str(entry.get("question")), entry.get("outcome")
        if entry["event"] != "quiz" or question not in questions or outcome == "judge":
            continue
        if outcome == "shown":
            given_up.add(question)
            continue
        row.answers += 1
        row.first_try += outcome == "right" and question not in tried | given_up
        tried.add(question)
        right |= {question} if outcome == "right" else set()
        met += [(question, name) for name in _names(entry)]
    row.tried, row.right = len(tried), len(right)
    left = Counter(name for question, name in met if question not in right)
    row.misconceptions = [name for name, _ in left.most_common()]
    return row


def _names(entry: Entry) -> list[str]:
    names = entry.get("misconceptions")
    return [str(name) for name in names] if isinstance(names, list) else []


def _chapter_of(entry: Entry) -> str:
    """Return the number of the chapter an entry belongs to, "" for none."""
    if entry["event"] == "quiz":
        return str(entry.get("chapter", ""))
    return str(entry.get("exercise", "")).partition(".")[0].zfill(2)


def _seconds(entries: Sequence[Entry]) -> defaultdict[str, float]:
    """Share the time between entries out: to the chapter and exercise of the later one."""
    spent: defaultdict[str, float] = defaultdict(float)
    times = [_time(entry) for entry in entries]
    for entry, before, now in zip(entries[1:], times, times[1:], strict=False):
        gap = now - before
        if 0 < gap <= PAUSE_SECONDS and before > 0:
            spent[_chapter_of(entry)] += gap
            if entry.get("exercise"):
                spent[str(entry["exercise"])] += gap
    return spent


def _time(entry: Entry) -> float:
    time = entry.get("time")
    return float(time) if isinstance(time, (int, float)) else 0.0
