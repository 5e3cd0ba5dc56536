"""Chapter 0: steering, which of the learner's functions the engine runs on: resume, reset, skip.

Owns nothing. `resume` plugs in what `my_zerolab` remembers, for a kernel that was restarted and
for a chapter that builds on earlier ones. `reset` and `skip` put the reference back, in the engine
and in `my_zerolab`; a skipped exercise is named so until it is checked again. The notebook's
cells stay as they are.
"""

from . import cards, exercise, own_copy, own_text, plug, progress
from .cards import Card, Row


def resume() -> None:
    """Plug in what `lab.my_zerolab()` has written so far, verified or not as it was then.

    Raises:
        UsageError: a file of `my_zerolab` was edited by hand, or its memory cannot be read.
    """
    texts = own_copy.remembered(own_copy.home())
    for target, text in texts.items():
        plug.plug(target, own_text.function_of(target, text), verified=text.verified)
    names = [plug.whose(target) for target in texts]
    empty = "lab.my_zerolab() has written nothing yet: the engine is the reference."
    rows = (Row("plugged in", ", ".join(names)),) if names else ()
    stripe = "--jp-success-color1" if names else "--jp-border-color1"
    cards.show(Card(stripe, f"Resumed from {own_text.COPY}", "" if names else empty, rows))


def reset(exercise_id: str | None = None) -> None:
    """Put the reference back: for one exercise, in `my_zerolab` too, or for the whole engine.

    Args:
        exercise_id: such as "0.1"; None unplugs everything and leaves `my_zerolab` alone.
    """
    if exercise_id is None:
        plug.reset()
        return
    found = exercise.find(exercise_id)
    cards.show(_back(found, "RESET"))


def skip(exercise_id: str) -> None:
    """Go on without an exercise: the engine runs on the reference, and says so."""
    found = exercise.find(exercise_id)
    card = _back(found, "SKIPPED")
    plug.skip(found.target)
    progress.record("skip", exercise=found.id)
    cards.show(card)


def _back(found: exercise.Exercise, word: str) -> Card:
    """Put the reference back for one exercise; return the card that says so."""
    in_copy = own_copy.forget(found.target)
    plug.unplug(found.target)
    where = f"The engine and {own_text.COPY} run" if in_copy else "The engine runs"
    message = f"{where} on the reference. To have yours again, run its cell with lab.check."
    return Card("--jp-border-color1", f"{word}  {found.id} {found.name}", message)
