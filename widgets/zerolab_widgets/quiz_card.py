"""Chapter 1: the quiz card, questions asked one by one, marked where the browser cannot look.

Owns the synced state of one quiz: the questions without their answers, the last request of the
reader and the verdicts so far. What is right stays in Python: the card hands an answer to its
`QuizSource` (`lab.quiz("01")`) and shows what comes back. static/quiz_card.js draws it; a saved
notebook shows the questions as the source prints them, without answers.
"""

from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from . import theme

STATIC = Path(__file__).parent / "static"


class QuizSource(Protocol):
    """What asks and marks, such as `lab.quiz("01")`: plain data in, plain data out."""

    chapter: str
    title: str

    def public(self) -> list[dict[str, Any]]:
        """Return the questions without anything that tells the answers."""
        ...

    def mark(self, number: int, answer: Any) -> dict[str, Any]:
        """Return the verdict on an answer to question `number`, from 0."""
        ...

    def reveal(self, number: int) -> dict[str, Any]:
        """Return the right answer to question `number`."""
        ...

    def _repr_html_(self) -> str: ...


class QuizCard(anywidget.AnyWidget):
    """A quiz to be answered with mouse or keyboard.

    Args:
        quiz: what asks and marks.
    """

    _esm = STATIC / "quiz_card.js"
    _css = STATIC / "quiz_card.css"

    heading = traitlets.Unicode("").tag(sync=True)
    questions = traitlets.List().tag(sync=True)
    at = traitlets.Int(0).tag(sync=True)  # the question that is shown
    request = traitlets.Dict().tag(sync=True)  # serial, number, and answer or reveal
    results = traitlets.Dict().tag(sync=True)  # number as text -> verdict
    theme = traitlets.Dict({"light": theme.as_state()["light"],
                            "dark": theme.as_state()["dark"]}).tag(sync=True)  # fmt: skip

    def __init__(self, quiz: QuizSource) -> None:
        self._quiz = quiz
        heading = f"Quiz {quiz.chapter}: {quiz.title}"
        super().__init__(heading=heading, questions=quiz.public())
        self.observe(self._answer_request, names="request")

    def _answer_request(self, change: Any) -> None:
        """Mark an answer that the browser sent, or give the question up."""
        number = change["new"].get("number")
        if type(number) is not int or not 0 <= number < len(self.questions):
            return
        if change["new"].get("reveal") is True:
            verdict = self._quiz.reveal(number)
        else:
            verdict = self._quiz.mark(number, change["new"].get("answer"))
        verdict["serial"] = change["new"].get("serial", 0)
        self.results = {**self.results, str(number): verdict}

    def __repr__(self) -> str:
        return f"QuizCard: {self.heading}, {len(self.questions)} questions"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": repr(self), "text/html": self.to_html()}, metadata

    def to_html(self) -> str:
        """Return the questions without script, and where to answer them."""
        where = (
            f"Run this cell to answer here, or type <code>zerolab quiz {self._quiz.chapter}</code> "
            "in a terminal."
        )
        return f"<p><b>{self.heading}</b></p>{self._quiz._repr_html_()}<p><i>{where}</i></p>"
