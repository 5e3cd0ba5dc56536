"""Chapter 0: an exercise, a function of the package that the learner writes.

Owns nothing. An exercise names its target ("zerolab.flat:shard_bounds"), the check that
gathers the evidence, hints from gentle to plain, and its mutants: named wrong answers, each
with the misconception it stands for. The tests prove for every exercise that the starter
fails, the solution passes and each mutant fails with a message of its own; in a notebook, a
failing answer that behaves like a mutant is told that mutant's misconception.
"""

import ast
import difflib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import UsageError

CHAPTERS = ("00", "01", "02", "03", "04", "05", "06", "07")
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
        target: the function it stands for, as "zerolab.flat:shard_bounds"; a class, or one method
            of it, as "zerolab.zero1:Zero1.reduce". The answer to both is the learner's class.
        minutes: estimated time.
        difficulty: 1 (easy) to 4 (extreme).
        check: takes the learner's function, yields each fact that it proved, raises `Wrong`.
        hints: from a question to nearly the answer.
        mutants: wrong answers that the check must tell from right ones, and from each other.
        hunted: names of the mutants that `lab.bug_hunt` may plug in: the evidence of each is
            unlike that of every other mutant.
        seconds: after which the check counts as hanging.
        evidence: runs what is hunted on so many ranks and says in a line what it left; None
            trains 26 parameters at stage 1.
        scene: what ran, as the hunt's card says it.
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
    evidence: Callable[[int], str] | None = None
    scene: str = "Stage 1 trained 26 parameters on it"

    @property
    def name(self) -> str:
        """The name of the function or class; of a method "Zero1.reduce"."""
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
        UsageError: there is none; the message names the nearest.
    """
    chapter = _chapter_of(exercise_id)
    if chapter in CHAPTERS:  # a mistake in another chapter's file is not this one's trouble
        known = {exercise.id: exercise for exercise in in_chapter(chapter)}
        if exercise_id in known:
            return known[exercise_id]
    names = {exercise.id: exercise.name for exercise in every()}
    raise UsageError(f"exercise {exercise_id!r} is unknown; {nearest(exercise_id, names)}")


def _chapter_of(exercise_id: object) -> str:
    """Return the two digits of the chapter that an id names, "" for what is no id."""
    number = exercise_id.partition(".")[0] if isinstance(exercise_id, str) else ""
    return number.zfill(2) if number.isdecimal() else ""


def nearest(asked: object, names: Mapping[str, str]) -> str:
    """Suggest what may have been meant: an id in quotes, or one for the name of a function.

    Args:
        asked: what was given in place of an id.
        names: id -> name of each one there is.
    """
    word, chapter = str(asked).strip(), _chapter_of(str(asked).strip())
    word = f"{int(chapter)}.{word.partition('.')[2]}" if chapter else word
    by_name = {name.rpartition(".")[2].lower(): one for one, name in names.items()}
    same = [one for one in names if _chapter_of(one) == chapter]
    words = [*by_name, *(same if chapter else names)]
    found = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    if not found:
        return f"use one of {', '.join(map(repr, names))}"
    meant = by_name.get(found[0], found[0])
    there = f"; chapter {_chapter_of(meant)} has {', '.join(map(repr, same))}" if same else ""
    return f"did you mean {meant!r} ({names[meant]})?{there}"


def source_of(exercise: Exercise) -> str:
    """Return the package's text of what is asked for, whatever is plugged in at the moment."""
    source = inspect.getsource(sys.modules[exercise.module.__name__])
    node: Any = ast.parse(source)
    for name in exercise.name.split("."):
        node = next(one for one in node.body if getattr(one, "name", "") == name)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
    return textwrap.dedent("\n".join(source.splitlines()[first : node.end_lineno]))
