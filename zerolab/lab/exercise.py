"""Chapter 0: an exercise, a function of the package that the learner writes.

Owns nothing. An exercise names its target ("zerolab.flat:shard_bounds"), the check that
gathers the evidence, hints from gentle to plain, and its mutants: named wrong answers, each
with the misconception it stands for. The tests prove for every exercise that the starter
fails, the solution passes and each mutant fails with a message of its own; in a notebook, a
failing answer that behaves like a mutant is told that mutant's misconception.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import UsageError

CHAPTERS = ("00", "01")
Check = Callable[[Callable[..., Any]], Iterator[str]]
PACKAGE = __name__.split(".")[0]  # "zerolab", or the name of a copy of it


@dataclass(frozen=True)
class Mutant:
    """A wrong answer. Its docstring says what somebody who writes it believes."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The mutant's name: that of its function."""
        return self.function.__name__

    @property
    def misconception(self) -> str:
        """What its author believes, in one paragraph."""
        return inspect.cleandoc(self.function.__doc__ or "").replace("\n", " ")


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        id: chapter and number, such as "0.1".
        target: the function it stands for, as "zerolab.flat:shard_bounds".
        minutes: estimated time.
        difficulty: 1 (easy) to 4 (extreme).
        check: takes the learner's function, yields each fact that it proved, raises `Wrong`.
        hints: from a question to nearly the answer.
        mutants: wrong answers that the check must tell from right ones, and from each other.
        hunted: names of the mutants that `lab.bug_hunt` may plug in: the evidence of each is
            unlike that of every other mutant.
        seconds: after which the check counts as hanging.
    """

    id: str
    target: str
    minutes: int
    difficulty: int
    check: Check
    hints: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    hunted: tuple[str, ...] = ()
    seconds: float = 15.0

    @property
    def name(self) -> str:
        """The function's name."""
        return self.target.partition(":")[2]

    @property
    def module(self) -> ModuleType:
        """The module in which the engine looks the function up."""
        return target_module(self.target)


def target_module(target: str) -> ModuleType:
    """Return the module of "zerolab.flat:shard_bounds", in this copy of the package."""
    path = target.partition(":")[0]
    return importlib.import_module(path.replace("zerolab", PACKAGE, 1))


def in_chapter(chapter: str) -> tuple[Exercise, ...]:
    """Return a chapter's exercises, in order.

    Raises:
        UsageError: there is no such chapter.
    """
    if chapter not in CHAPTERS:
        known = ", ".join(CHAPTERS)
        raise UsageError(f"chapter {chapter!r} is unknown; exercises exist for: {known}")
    return importlib.import_module(f"{__package__}.chapters.c{chapter}").EXERCISES


def every() -> tuple[Exercise, ...]:
    """Return all exercises of the course."""
    return tuple(exercise for chapter in CHAPTERS for exercise in in_chapter(chapter))


def find(exercise_id: str) -> Exercise:
    """Return the exercise with this id.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    known = {exercise.id: exercise for exercise in every()}
    if exercise_id not in known:
        raise UsageError(
            f"exercise {exercise_id!r} is unknown; use one of {', '.join(map(repr, known))}"
        )
    return known[exercise_id]


def source_of(exercise: Exercise) -> str:
    """Return the package's text of the function or class, whatever is plugged in at the moment."""
    source = inspect.getsource(sys.modules[exercise.module.__name__])
    lines = source.splitlines(keepends=True)
    heads = (f"def {exercise.name}(", f"class {exercise.name}(", f"class {exercise.name}:")
    first = next(i for i, text in enumerate(lines) if text.startswith(heads))
    return "".join(inspect.getblock(lines[first:])).rstrip()
