"""Chapter 0: questions with one right answer, each wrong one with the reason it is wrong.

Owns nothing. A bank is a TOML file beside the course, `course/quiz/NN.toml`, with a list of
`[[question]]`: `id`, `kind` ("single"), `text`, optional `code`, and `choices`, each with
`text`, `correct` and `feedback`. `self_test()` shows the questions; called with letters, it
says of every answer why it is right or not.
"""

import html
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ..errors import UsageError
from . import cards, workspace

OPEN = "?"  # a question left open


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer on offer."""

    text: str
    correct: bool
    feedback: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its choices."""

    id: str
    text: str
    code: str
    choices: tuple[Choice, ...]

    @property
    def letters(self) -> str:
        """The letters that can be answered."""
        return ascii_lowercase[: len(self.choices)]

    @property
    def key(self) -> str:
        """The letter of the right answer."""
        return next(
            k for k, choice in zip(self.letters, self.choices, strict=True) if choice.correct
        )


def read_bank(path: Path) -> tuple[Question, ...]:
    """Return the questions of one file.

    Raises:
        UsageError: the file breaks the schema; the message names the question and the rule.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise UsageError(
            f"{path.name} holds no [[question]] list: {error}; mend the file"
        ) from None
    return tuple(_question(entry, path.name) for entry in entries)


def _question(entry: dict[str, Any], file: str) -> Question:
    name = entry.get("id", "?")
    missing = {"id", "kind", "text", "choices"} - set(entry)
    if missing:
        raise UsageError(f"{file}: question {name} lacks {sorted(missing)[0]!r}; add it")
    if entry["kind"] != "single":
        raise UsageError(f'{file}: question {name} has kind {entry["kind"]!r}; known: "single"')
    choices = tuple(Choice(c["text"], c.get("correct", False), c["feedback"])
                    for c in entry["choices"])  # fmt: skip
    if sum(choice.correct for choice in choices) != 1:
        raise UsageError(f"{file}: question {name} needs exactly one correct choice")
    return Question(name, entry["text"], entry.get("code", "").strip("\n"), choices)


def self_test(*answers: str) -> "Questions | Marks":
    """Show the questions of chapter 0, or mark the answers to them.

    Args:
        answers: one letter a question, in order, "?" for one left open; none to see the questions.
    """
    questions = read_bank(workspace.course_folder() / "quiz" / "00.toml")
    if not answers:
        return Questions(questions)
    if len(answers) != len(questions):
        raise UsageError(
            f"self_test got {len(answers)} answers to {len(questions)} questions; "
            f'give {len(questions)} letters, such as "a"'
        )
    for number, (answer, question) in enumerate(zip(answers, questions, strict=True), 1):
        if answer not in (*question.letters, OPEN):
            letters = ", ".join(question.letters)
            raise UsageError(f"answer {number} is {answer!r}; give one of the letters {letters}")
    return Marks(questions, answers)


class Questions:
    """The questions, to be read."""

    def __init__(self, questions: tuple[Question, ...]) -> None:
        self.questions = questions

    def __repr__(self) -> str:
        return "\n\n".join(_plain(n, q) for n, q in enumerate(self.questions, 1))

    def _repr_html_(self) -> str:
        return "".join(_html(n, q) for n, q in enumerate(self.questions, 1))


def _plain(number: int, question: Question) -> str:
    lines = [f"{number}. {question.text}"]
    lines += [f"       {line}" for line in question.code.splitlines()]
    pairs = zip(question.letters, question.choices, strict=True)
    return "\n".join(lines + [f"   {letter}) {choice.text}" for letter, choice in pairs])


def _html(number: int, question: Question) -> str:
    code = f"<pre>{html.escape(question.code)}</pre>" if question.code else ""
    pairs = zip(question.letters, question.choices, strict=True)
    items = "".join(f"<div><b>{k}</b>&nbsp; {_marked(c.text)}</div>" for k, c in pairs)
    return (
        f"<p style='margin:10px 0 2px'><b>{number}.</b> {_marked(question.text)}</p>{code}{items}"
    )


def _marked(text: str) -> str:
    return cards.text_html(text)


class Marks:
    """The answers, marked."""

    def __init__(self, questions: tuple[Question, ...], answers: tuple[str, ...]) -> None:
        self.pairs = tuple(zip(questions, answers, strict=True))

    @property
    def num_right(self) -> int:
        """How many answers are right."""
        return sum(answer == question.key for question, answer in self.pairs)

    def card(self) -> cards.Card:
        """Return the result as a card: the reason for every answer."""
        right = self.num_right == len(self.pairs)
        rows = tuple(
            cards.Row(f"{number}  {_verdict(question, answer)}", _reason(question, answer))
            for number, (question, answer) in enumerate(self.pairs, 1)
        )
        stripe = "--jp-success-color1" if right else "--jp-warn-color1"
        return cards.Card(stripe, f"{self.num_right} of {len(self.pairs)} right", rows=rows)

    def __repr__(self) -> str:
        return repr(self.card())

    def _repr_html_(self) -> str:
        return self.card()._repr_html_()


def _verdict(question: Question, answer: str) -> str:
    if answer == OPEN:
        return "open"
    return "right" if answer == question.key else "not yet"


def _reason(question: Question, answer: str) -> str:
    if answer == OPEN:
        return f"Write one of {', '.join(question.letters)} in place of the question mark."
    return question.choices[question.letters.index(answer)].feedback
