"""Chapter 0: begin, check, hint, solution: what a learner types.

Owns how many hints of each exercise have been shown. A check evaluates the answer (in the
child process, or here with `debug=True`), plugs it into the engine, writes the attempt down,
shows the card, and raises unless the answer passed. An exercise that nobody has tried yet gets
a grey card and the notebook goes on with the reference, so that Run All reaches the end; under
nbval and with ZEROLAB_STRICT=1 it raises too.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from . import cards, exercise, plug, progress, whose
from .cards import Card, CheckFailed
from .evaluate import evaluate
from .exercise import Exercise
from .outcome import Outcome, Report
from .sandbox import shared

_hints_shown: Counter[str] = Counter()


def begin(chapter: str) -> None:
    """Start a chapter: the whole engine is the reference's, and checks warm up meanwhile.

    Args:
        chapter: its number, such as "00".
    """
    exercise.in_chapter(chapter)
    plug.reset()
    whose.begin(chapter)
    _hints_shown.clear()
    shared.start()


def check(
    exercise_id: str, answer: Callable[..., Any] | None = None, *, debug: bool = False
) -> None:
    """Check an answer and let the engine run on it.

    Args:
        exercise_id: such as "0.1".
        answer: the function itself, not its result; for a method, its class.
        debug: run in this process, where breakpoint() and %debug work; nothing protects the
            kernel from an endless loop then.

    Raises:
        CheckFailed: the answer did not pass. The card has been shown.
        UsageError: there is no such exercise, or the answer is no function.
    """
    found = exercise.find(exercise_id)
    if not callable(answer):
        call = f'lab.check("{found.id}", {found.name.partition(".")[0]})'
        if answer is None:
            raise UsageError(f"lab.check needs your function as well; write {call}")
        raise UsageError(
            f"lab.check got {answer!r}, which is no function; write {call}, without calling it"
        )
    report = evaluate(found, answer) if debug else shared.run(found, answer)
    _plug_in(found, report, answer)
    progress.note_attempt(report)
    card = cards.card_of(report, found, plug.status(_chapter(found)))
    cards.show(card)
    passing = {Outcome.PASS, Outcome.SKIPPED}
    if not strict():
        passing.add(Outcome.UNATTEMPTED)
    if report.outcome not in passing:
        raise CheckFailed(card, in_full=strict())


def strict() -> bool:
    """Whether an exercise that was not tried counts as a failure: under nbval, or when asked."""
    return os.environ.get("ZEROLAB_STRICT") == "1" or "PYTEST_CURRENT_TEST" in os.environ


def hint(exercise_id: str, number: int | None = None) -> None:
    """Show the next hint of an exercise, or the one with this number (from 1)."""
    found = exercise.find(exercise_id)
    if number is None:
        number = min(_hints_shown[exercise_id] + 1, len(found.hints))
    if not 1 <= number <= len(found.hints):
        raise UsageError(
            f"hint {number} of {exercise_id} does not exist; there are 1 to {len(found.hints)}"
        )
    _hints_shown[exercise_id] = max(_hints_shown[exercise_id], number)
    progress.note_hint(exercise_id, number)
    left = len(found.hints) - number
    footer = f"{left} more: call it again." if left else f'The rest is lab.solution("{found.id}").'
    heading = f"Hint {number} of {len(found.hints)}  {found.id} {found.name}"
    cards.show(Card("--jp-info-color1", heading, found.hints[number - 1], footer=footer))


def solution(exercise_id: str) -> None:
    """Show the package's own function: the code that the engine runs."""
    found = exercise.find(exercise_id)
    progress.note_hint(exercise_id, len(found.hints) + 1)
    row = cards.Row(found.target.replace(":", "."), exercise.source_of(found), code=True)
    heading = f"Solution  {found.id} {found.name}"
    cards.show(Card("--jp-info-color1", heading, rows=(row,)))


def _chapter(found: Exercise) -> str:
    return f"{int(found.id.partition('.')[0]):02d}"


def _plug_in(found: Exercise, report: Report, answer: Callable[..., Any]) -> None:
    """Let the engine run on the answer, verified or not, unless that would hang the notebook."""
    if report.usable:
        plug.plug(found.target, answer, verified=report.outcome is Outcome.PASS)
    else:
        plug.unplug(found.target)
