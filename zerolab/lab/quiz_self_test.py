"""Chapter 0: the self-test, five questions answered with letters in a cell.

Owns nothing: the questions are the part "self-test" of the bank of chapter 0.
"""

from collections.abc import Sequence

from ..errors import UsageError
from . import cards, quiz_page
from .quiz_grade import RIGHT, Verdict, grade
from .quiz_session import Asked, Quiz, quiz

OPEN = "?"  # a question left open


def self_test(*answers: str) -> "Quiz | Marks":
    """Show the questions of the self-test, or mark the answers to them.

    Args:
        answers: one letter a question, in order, "?" for one left open; none to see the questions.
    """
    questions = quiz("00", part="self-test")
    if not answers:
        return questions
    if len(answers) != len(questions.asked):
        raise UsageError(
            f"self_test got {len(answers)} answers to {len(questions.asked)} questions; "
            f'give {len(questions.asked)} letters, such as "a"'
        )
    for number, (answer, public) in enumerate(zip(answers, questions.public(), strict=True), 1):
        letters = quiz_page.labels(public)
        if answer not in (*letters, OPEN):
            raise UsageError(
                f"answer {number} is {answer!r}; give one of the letters {', '.join(letters)}"
            )
    return Marks(questions.asked, answers)


class Marks:
    """The answers, marked."""

    def __init__(self, asked: Sequence[Asked], answers: Sequence[str]) -> None:
        self.verdicts = [_verdict(one, answer) for one, answer in zip(asked, answers, strict=True)]

    @property
    def num_right(self) -> int:
        """How many answers are right."""
        return sum(verdict is not None and verdict.outcome == RIGHT for verdict in self.verdicts)

    def card(self) -> cards.Card:
        """Return the result as a card: the reason for every answer."""
        all_right = self.num_right == len(self.verdicts)
        rows = tuple(_row(number, verdict) for number, verdict in enumerate(self.verdicts, 1))
        stripe = "--jp-success-color1" if all_right else "--jp-warn-color1"
        return cards.Card(stripe, f"{self.num_right} of {len(self.verdicts)} right", rows=rows)

    def __repr__(self) -> str:
        return repr(self.card())

    def _repr_html_(self) -> str:
        return self.card()._repr_html_()


def _verdict(asked: Asked, answer: str) -> Verdict | None:
    """Return the verdict on a letter, None for a question left open."""
    return None if answer == OPEN else grade(asked.question, ord(answer) - ord("a"))


def _row(number: int, verdict: Verdict | None) -> cards.Row:
    if verdict is None:
        return cards.Row(f"{number}  open", "Write a letter in place of the question mark.")
    word = "right" if verdict.outcome == RIGHT else "not yet"
    return cards.Row(f"{number}  {word}", verdict.notes[0].text)
