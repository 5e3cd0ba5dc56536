"""Chapter 0: predict, then measure: a number that the learner commits to before seeing it.

Owns nothing. A `Prediction` stands in its chapter's exercise file: what is asked, in which unit,
how it is measured, and why it comes out as it does. Nothing is measured before a number has
been committed. A prediction is never right or wrong: the card lays the two numbers side by
side, and the learner's log keeps both.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from . import cards, exercise, progress
from .cards import Card, Row

CLOSE = 0.02  # a relative error up to which a prediction counts as understood
DIGITS = 5


@dataclass(frozen=True)
class Prediction:
    """One number to predict.

    Attributes:
        id: chapter and number, such as "0.3".
        what: the quantity, as a question that a learner reads above the number.
        unit: its unit, such as "MiB".
        measure: runs something and returns the number.
        why: how it comes about, shown after the measurement.
    """

    id: str
    what: str
    unit: str
    measure: Callable[[], float]
    why: str


def predict(prediction_id: str, value: float | None) -> None:
    """Commit to a number, then see it beside the measurement.

    Args:
        prediction_id: such as "0.3".
        value: your number, in the unit that the card names; None while you have none, and then
            nothing is measured.

    Raises:
        UsageError: there is no such prediction, or the value is no number.
    """
    found = find(prediction_id)
    if value is None:
        cards.show(_open_card(found))
        return
    predicted = _number(value, found)
    measured = float(found.measure())
    progress.note_prediction(found.id, predicted, measured)
    cards.show(_card(found, predicted, measured))


def in_chapter(chapter: str) -> tuple[Prediction, ...]:
    """Return a chapter's predictions, in order."""
    module = importlib.import_module(f"{__package__}.chapters.c{chapter}")
    return getattr(module, "PREDICTIONS", ())


def every() -> tuple[Prediction, ...]:
    """Return all predictions of the course."""
    return tuple(found for chapter in exercise.CHAPTERS for found in in_chapter(chapter))


def find(prediction_id: str) -> Prediction:
    """Return the prediction with this id.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    known = {prediction.id: prediction for prediction in every()}
    if prediction_id not in known:
        names = {one: f"in {found.unit}" for one, found in known.items()}
        near = exercise.nearest(prediction_id, names)
        raise UsageError(f"prediction {prediction_id!r} is unknown; {near}")
    return known[prediction_id]


def _number(value: object, found: Prediction) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(
            f"lab.predict got {value!r}, which is no number; give one in {found.unit}, "
            f'as in lab.predict("{found.id}", 12.5)'
        )
    return float(value)


def _open_card(found: Prediction) -> Card:
    return Card(
        "--jp-border-color1",
        f"NOT YET TRIED  {found.id} prediction",
        f"{found.what} Put your number, in {found.unit}, in the place of None: "
        "only then is it measured.",
    )


def _card(found: Prediction, predicted: float, measured: float) -> Card:
    close = abs(predicted - measured) <= CLOSE * abs(measured)
    rows = (
        Row("predicted", _with_unit(predicted, found.unit)),
        Row("measured", _with_unit(measured, found.unit)),
        Row("error", _error(predicted, measured, found.unit)),
        Row("why", found.why),
    )
    stripe = "--jp-success-color1" if close else "--jp-info-color1"
    return Card(stripe, f"MEASURED  {found.id} prediction", found.what, rows)


def _with_unit(number: float, unit: str) -> str:
    return f"{number:,.{DIGITS}g} {unit}"


def _error(predicted: float, measured: float, unit: str) -> str:
    """Say how far apart the two are: the difference, then percent or a factor."""
    apart = predicted - measured
    if apart == 0:
        return "none"
    text = f"{apart:+,.{DIGITS}g} {unit}"
    if measured == 0:
        return text
    ratio = predicted / measured
    if 0.5 <= ratio <= 2:
        return f"{text} ({ratio - 1:+.1%})"
    if ratio > 2:
        return f"{text} ({ratio:,.3g} times too much)"
    return f"{text} ({1 / ratio:,.3g} times too little)" if ratio > 0 else text
