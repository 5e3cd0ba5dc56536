"""Chapter 1: grading, from an answer to a verdict that says why.

Owns nothing. `grade` takes a question and an answer in the bank's own order:

    single, bug   position of the choice         numeric  text, such as "31.4 GB"
    multiple      positions of the choices       ordering the items' positions, as arranged
    short         text; then, when its author has compared it with the rubric, the positions of
                  the points that it made

A wrong answer is told which misconception it fits, and never what the right one is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from . import quiz_expression, quiz_units
from .quiz_bank import Question

RIGHT, PARTLY, WRONG = "right", "partly", "wrong"
REFUSED = "refused"  # it cannot be read as an answer, and does not count as one
JUDGE = "judge"  # a short answer, to be compared with the rubric by its author
SHOWN = "shown"  # the learner asked for the right answer
SHORTEST = 3  # words of a short answer


@dataclass(frozen=True, slots=True)
class Note:
    """Feedback, on one choice or item or on all of the answer (position -1)."""

    position: int
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said about an answer.

    Attributes:
        outcome: one of the words above.
        score: 0 to 1.
        notes: feedback.
        misconceptions: the names of those that the answer fits.
        answer: the right answer as text; "" while the learner may still try.
        why: the explanation that goes with it.
        suggested: for a short answer, the points that it seems to make.
    """

    outcome: str
    score: float = 0.0
    notes: tuple[Note, ...] = ()
    misconceptions: tuple[str, ...] = ()
    answer: str = ""
    why: str = ""
    suggested: tuple[int, ...] = ()

    @property
    def final(self) -> bool:
        """Whether the question is done with."""
        return self.outcome in (RIGHT, SHOWN)


def grade(question: Question, answer: Any) -> Verdict:
    """Return the verdict on an answer; an answer that cannot be one is refused."""
    try:
        verdict = _GRADE[question.kind](question, answer)
    except UsageError as error:
        return Verdict(REFUSED, notes=(Note(-1, f"{str(error)[:1].upper()}{str(error)[1:]}."),))
    if verdict.outcome == RIGHT:
        return replace(verdict, answer=right_answer(question), why=question.why)
    return verdict


def show(question: Question) -> Verdict:
    """Return the right answer, for a learner who asks for it."""
    return Verdict(SHOWN, answer=right_answer(question), why=question.why)


def right_answer(question: Question) -> str:
    """Return the right answer as text."""
    if question.kind == "numeric":
        return quiz_units.pretty(key_of(question), question.unit)
    if question.kind == "ordering":
        return "; ".join(f"{number}. {item.text}" for number, item in enumerate(question.items, 1))
    if question.kind == "short":
        return question.answer
    chosen = [question.choices[position] for position in question.right]
    return "; ".join(f"line {c.line}: {c.text}" if c.line else c.text for c in chosen)


def key_of(question: Question) -> float:
    """Return the key of a numeric question in its unit."""
    return in_unit(question.key, question.unit)


def in_unit(expression: str, unit: str) -> float:
    """Return the value of an expression, which is in bytes, seconds or a count, in a unit."""
    return quiz_expression.evaluate(expression) / quiz_units.scale(unit)


def close(value: float, key: float, tolerance: float) -> bool:
    """Tell whether a number is the key, up to the tolerance and to the rounding of floats."""
    return math.isclose(value, key, rel_tol=max(tolerance, 1e-9), abs_tol=1e-12)


def _single(question: Question, answer: Any) -> Verdict:
    choice = question.choices[_position(answer, len(question.choices))]
    if choice.correct:
        return Verdict(RIGHT, 1.0, (Note(answer, choice.feedback),))
    return Verdict(WRONG, 0.0, (Note(answer, choice.feedback),), (choice.misconception,))


def _multiple(question: Question, answer: Any) -> Verdict:
    """All right ones and no other; one that is missing is counted, not named."""
    chosen = _positions(answer, len(question.choices))
    false = [p for p in chosen if not question.choices[p].correct]
    missing = len(question.right) - (len(chosen) - len(false))
    notes = [Note(p, question.choices[p].feedback) for p in (false or chosen)]
    if not false and not missing:
        return Verdict(RIGHT, 1.0, tuple(notes))
    if missing:
        notes.append(Note(-1, f"{missing} more {'is' if missing == 1 else 'are'} right."))
    names = tuple(question.choices[p].misconception for p in false)
    right_ones = (len(chosen) - len(false)) / len(question.right)
    outcome = WRONG if false else PARTLY
    return Verdict(outcome, 0.0 if false else right_ones, tuple(notes), names)


def _numeric(question: Question, answer: Any) -> Verdict:
    if not isinstance(answer, str) or not answer.strip():
        raise UsageError(f"no number was given; write one in {question.unit}")
    value, key = quiz_units.parse(answer, question.unit), key_of(question)
    if close(value, key, question.tolerance):
        return Verdict(RIGHT, 1.0)
    for trap in question.traps:
        if close(value, in_unit(trap.value, question.unit), question.tolerance):
            return Verdict(
                WRONG, notes=(Note(-1, trap.feedback),), misconceptions=(trap.misconception,)
            )
    return _twin(question, value) or _far(value, key)


def _twin(question: Question, value: float) -> Verdict | None:
    """The right number in GiB where GB was asked for, or the other way round."""
    twin = quiz_units.twin(question.unit)
    if not (twin and close(value, in_unit(question.key, twin), min(question.tolerance, 0.01))):
        return None
    text = f"That is right in {twin}; the question asks for {question.unit}."
    return Verdict(WRONG, notes=(Note(-1, text),), misconceptions=("mixes-gb-and-gib",))


def _far(value: float, key: float) -> Verdict:
    """Say how far off a number is only as far as it helps: too large or too small."""
    text = "Too large." if value > key else "Too small."
    ratio = value / key if key else 0.0
    if ratio > 0 and not 0.1 < ratio < 10:
        text += " It is off by a factor of ten or more: check the unit."
    return Verdict(WRONG, notes=(Note(-1, text),), misconceptions=("other-number",))


def _ordering(question: Question, answer: Any) -> Verdict:
    """Feedback on the first step that stands before the one it must follow."""
    arranged = _positions(answer, len(question.items))
    if len(arranged) != len(question.items):
        raise UsageError(f"{len(arranged)} of {len(question.items)} steps; arrange all of them")
    at = {item: place for place, item in enumerate(answer)}
    for position in range(1, len(question.items)):
        if at[position] < at[position - 1]:
            item = question.items[position]
            note = Note(position, item.feedback)
            return Verdict(WRONG, notes=(note,), misconceptions=(item.misconception,))
    return Verdict(RIGHT, 1.0)


def _short(question: Question, answer: Any) -> Verdict:
    if isinstance(answer, str):
        if len(answer.split()) < SHORTEST:
            raise UsageError("that is too short to compare; write a sentence")
        said = answer.casefold()
        suggested = tuple(
            position
            for position, point in enumerate(question.rubric)
            if any(word.casefold() in said for word in point.words)
        )
        return Verdict(JUDGE, answer=question.answer, suggested=suggested)
    points = _positions(answer, len(question.rubric), least=0)
    score = len(points) / len(question.rubric)
    if score == 1.0:
        return Verdict(RIGHT, 1.0)
    missed = [n for n in range(len(question.rubric)) if n not in points]
    notes = tuple(Note(n, f"Missing: {question.rubric[n].point}") for n in missed)
    return Verdict(PARTLY if points else WRONG, score, notes, ("incomplete-answer",))


def _position(answer: Any, length: int) -> int:
    """Return the answer if it is the position of a choice."""
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < length:
        raise UsageError("nothing was chosen; choose one")
    return answer


def _positions(answer: Any, length: int, least: int = 1) -> Sequence[int]:
    """Return the answer if it is positions, each once."""
    if not isinstance(answer, (list, tuple)) or len(set(map(str, answer))) != len(answer):
        raise UsageError("an answer here is a list, each entry once")
    if len(answer) < least:
        raise UsageError("nothing was chosen; choose at least one")
    return sorted(_position(entry, length) for entry in answer)


_GRADE: Mapping[str, Callable[[Question, Any], Verdict]] = {
    "single": _single,
    "bug": _single,
    "multiple": _multiple,
    "numeric": _numeric,
    "ordering": _ordering,
    "short": _short,
}
