"""Chapter 1: a quiz, the questions of a chapter as somebody is asked them.

Owns the order in which questions and choices are shown, and how often each was tried. A quiz
shows its questions as plain data without a trace of the answers (`public`), and marks answers
(`mark`, `reveal`): a picture or a terminal shows the one and calls the other. Every answer is
written to the learner's log at once.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import progress, quiz_grade, quiz_page, workspace
from .quiz_bank import LEVELS, Bank, Question, read_bank
from .quiz_grade import Note, Verdict

HOW = {
    "single": "Choose one.",
    "multiple": "Choose all that are right.",
    "numeric": "Give a number.",
    "ordering": "Put these in order.",
    "bug": "Choose the line that is wrong.",
    "short": "Answer in a few sentences.",
}


@dataclass(slots=True)
class Asked:
    """One question as it is shown.

    Attributes:
        question: from the bank.
        order: the position in the bank of what is shown first, second, ...
        tries: answers so far.
        given_up: whether the right answer was asked for.
        written: whether a short answer was handed in.
        verdict: the last one.
        before: whether it was answered right on another day.
    """

    question: Question
    order: tuple[int, ...]
    before: bool = False
    tries: int = 0
    given_up: bool = False
    written: bool = False
    verdict: Verdict | None = None

    def shown_at(self, position: int) -> int:
        """Return where the entry with this position in the bank is shown."""
        return self.order.index(position) if 0 <= position < len(self.order) else -1


@dataclass
class Quiz:
    """Questions to be asked; see `lab.quiz`."""

    chapter: str
    title: str
    asked: list[Asked] = field(default_factory=list)

    def public(self) -> list[dict[str, Any]]:
        """Return the questions as plain data, without anything that tells the answers."""
        return [_public(asked) for asked in self.asked]

    def mark(self, number: int, answer: Any) -> dict[str, Any]:
        """Grade an answer to question `number` (from 0), write it down, say why.

        Args:
            number: which question.
            answer: as `quiz_grade` takes it, with positions as shown.
        """
        asked = self._at(number)
        if asked.question.kind == "short" and not isinstance(answer, str) and not asked.written:
            answer = ""  # points can be counted only of what was written
        verdict = quiz_grade.grade(asked.question, _in_bank_order(asked, answer))
        if verdict.outcome != quiz_grade.REFUSED:
            self._keep(asked, answer, verdict)
        return _shown(asked, verdict)

    def reveal(self, number: int) -> dict[str, Any]:
        """Give question `number` up: return the right answer."""
        asked = self._at(number)
        verdict = quiz_grade.show(asked.question)
        self._keep(asked, None, verdict)
        return _shown(asked, verdict)

    @property
    def first_try(self) -> int:
        """How many questions were right at the first try."""
        return sum(
            asked.tries == 1 and not asked.given_up and _is(asked, quiz_grade.RIGHT)
            for asked in self.asked
        )

    @property
    def right(self) -> int:
        """How many questions were answered right at some try."""
        return sum(_is(asked, quiz_grade.RIGHT) for asked in self.asked)

    @property
    def answered(self) -> int:
        """How many questions have been answered, right or wrong, or given up."""
        return sum(asked.verdict is not None for asked in self.asked)

    def _at(self, number: int) -> Asked:
        if not 0 <= number < len(self.asked):
            raise UsageError(
                f"question {number} does not exist; there are 0 to {len(self.asked) - 1}"
            )
        return self.asked[number]

    def _keep(self, asked: Asked, answer: Any, verdict: Verdict) -> None:
        """Count a try and write it down; a short answer counts when it has been judged."""
        asked.tries += verdict.outcome not in (quiz_grade.JUDGE, quiz_grade.SHOWN)
        asked.given_up |= verdict.outcome == quiz_grade.SHOWN
        asked.written |= verdict.outcome == quiz_grade.JUDGE
        asked.verdict = verdict
        progress.note_answer(
            self.chapter,
            asked.question.id,
            {
                "kind": asked.question.kind,
                "difficulty": asked.question.difficulty,
                "answer": _in_bank_order(asked, answer),
                "outcome": verdict.outcome,
                "score": verdict.score,
                "tries": asked.tries,
                "misconceptions": list(verdict.misconceptions),
            },
        )

    def __repr__(self) -> str:
        return quiz_page.to_text(self.public())

    def _repr_html_(self) -> str:
        return quiz_page.to_html(self.public())


def quiz(
    chapter: str,
    *,
    difficulty: str | None = None,
    part: str | None = None,
    shuffle: int | None = None,
    only_open: bool = False,
) -> Quiz:
    """Prepare the quiz of a chapter; `zerolab_widgets.QuizCard(lab.quiz("01"))` asks it.

    Args:
        chapter: its number, such as "01".
        difficulty: ask only these: "easy", "medium", "hard" or "extreme".
        part: ask only this part, such as "self-test".
        shuffle: a seed; the same seed gives the same order.
        only_open: leave out what the learner's log knows as answered right.

    Raises:
        UsageError: there are no such questions, or the bank is damaged.
    """
    bank = read_bank(bank_path(chapter))
    solved = progress.solved()
    chosen = [q for q in bank.questions if not (only_open and q.id in solved)]
    chosen = _only(chosen, "part", part, bank)
    chosen = _only(chosen, "difficulty", difficulty, bank)
    if shuffle is not None:
        random.Random(f"{shuffle}").shuffle(chosen)
    asked = [Asked(q, _order(q, shuffle), before=q.id in solved) for q in chosen]
    return Quiz(bank.chapter, bank.title, asked)


def bank_path(chapter: str) -> Path:
    """Return the file with the questions of a chapter.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    folder = workspace.course_folder() / "quiz"
    path = folder / f"{chapter.zfill(2)}.toml"
    known = sorted(file.stem for file in folder.glob("*.toml"))
    if path.stem not in known:
        raise UsageError(f"chapter {chapter!r} has no questions; choose one of {', '.join(known)}")
    return path


def _only(questions: list[Question], key: str, value: str | None, bank: Bank) -> list[Question]:
    """Keep the questions whose `key` is `value`; all of them for None."""
    if value is None:
        return questions
    there = [getattr(question, key) for question in bank.questions]
    known = [w for w in (LEVELS if key == "difficulty" else dict.fromkeys(there)) if w in there]
    if value not in known:
        raise UsageError(
            f"{key} {value!r} has no questions in chapter {bank.chapter}; choose one "
            f"of {', '.join(known)}"
        )
    return [question for question in questions if getattr(question, key) == value]


def _order(question: Question, seed: int | None) -> tuple[int, ...]:
    """Return the order in which choices or items are shown; items never in the right one."""
    length = len(question.items or question.choices or question.rubric)
    order = list(range(length))
    if not question.items and (seed is None or question.kind in ("bug", "short")):
        return tuple(order)
    rng = random.Random(f"{seed}:{question.id}")
    rng.shuffle(order)
    while question.items and order == sorted(order):
        rng.shuffle(order)
    return tuple(order)


def _public(asked: Asked) -> dict[str, Any]:
    """Return what may be seen of a question before it is answered."""
    question = asked.question
    entries = question.items or question.choices
    return {
        "id": question.id,
        "kind": question.kind,
        "difficulty": question.difficulty,
        "how": HOW[question.kind],
        "text": question.text,
        "code": question.code,
        "entries": [entries[p].text for p in asked.order] if entries else [],
        "lines": [question.choices[p].line for p in asked.order] if question.kind == "bug" else [],
        "unit": question.unit,
        "before": asked.before,
    }


def _in_bank_order(asked: Asked, answer: Any) -> Any:
    """Turn positions as shown into positions in the bank; what is no position stays as it is."""
    if isinstance(answer, (list, tuple)):
        return [_in_bank_order(asked, entry) for entry in answer]
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    return asked.order[answer] if whole and 0 <= answer < len(asked.order) else answer


def _shown(asked: Asked, verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data, with positions as shown."""
    judged = asked.question.kind == "short" and verdict.outcome != quiz_grade.REFUSED
    return {
        "outcome": verdict.outcome,
        "score": round(verdict.score, 3),
        "tries": asked.tries,
        "notes": [_note(asked, note) for note in verdict.notes],
        "answer": verdict.answer,
        "why": verdict.why,
        "rubric": [point.point for point in asked.question.rubric] if judged else [],
        "suggested": list(verdict.suggested),
    }


def _note(asked: Asked, note: Note) -> dict[str, Any]:
    return {"at": asked.shown_at(note.position), "text": note.text}


def _is(asked: Asked, outcome: str) -> bool:
    return asked.verdict is not None and asked.verdict.outcome == outcome
