"""Chapter 1: the bank, the questions of a chapter as they lie in course/quiz/NN.toml.

Owns the schema. A bank names its `chapter` and `title` and lists `[[question]]`; each has the
keys of `COMMON` and those of its kind in `KINDS`. Every wrong answer carries the misconception
it comes from and feedback that answers it. Phases: parse the TOML, check every table against
its schema (`quiz_schema`: an error names file, question and key), build frozen questions.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import quiz_expression, quiz_units
from .quiz_schema import SLUG, Place, Schema, check_keys, one_of

LEVELS = ("easy", "medium", "hard", "extreme")

BANK: Schema = {"chapter": str, "title": str, "question": list}
COMMON: Schema = {
    "id": str,  # chapter, hyphen, name: "01-bytes-per-parameter"
    "kind": str,
    "difficulty": str,
    "source": str,  # the topic, paper or article it comes from
    "text": str,
    "why": str,  # shown with the right answer
    "code?": str,
    "part?": str,  # a group that can be asked alone, such as "self-test"
}
KINDS: Mapping[str, Schema] = {
    "single": {"choices": list},
    "multiple": {"choices": list},
    "bug": {"code": str, "choices": list},
    "numeric": {"key": str, "unit": str, "tolerance": float, "traps": list},
    "ordering": {"items": list},
    "short": {"answer": str, "rubric": list},
}
RIGHT: Schema = {"text": str, "correct": bool, "feedback": str}
WRONG: Schema = {"text": str, "misconception": str, "feedback": str}
TRAP: Schema = {"value": str, "misconception": str, "feedback": str}
FIRST_ITEM: Schema = {"text": str}
POINT: Schema = {"point": str, "words": list}


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer on offer; a wrong one names its misconception."""

    text: str
    correct: bool
    feedback: str
    misconception: str = ""
    line: int = 0  # of the code, from 1, in a question of kind "bug"


@dataclass(frozen=True, slots=True)
class Trap:
    """A wrong number with a reason: an expression, as the key is."""

    value: str
    misconception: str
    feedback: str


@dataclass(frozen=True, slots=True)
class Item:
    """One step of an ordering; the feedback is for putting it before the one it must follow."""

    text: str
    misconception: str = ""
    feedback: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """What a good short answer says, and words that suggest it was said."""

    point: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question; what its kind does not use is empty."""

    id: str
    kind: str
    difficulty: str
    source: str
    text: str
    why: str
    code: str = ""
    part: str = ""
    choices: tuple[Choice, ...] = ()
    key: str = ""
    unit: str = ""
    tolerance: float = 0.0  # relative: 0.01 accepts 1 % off
    traps: tuple[Trap, ...] = ()
    items: tuple[Item, ...] = ()  # in the right order
    answer: str = ""
    rubric: tuple[Point, ...] = ()

    @property
    def right(self) -> tuple[int, ...]:
        """The positions of the right choices."""
        return tuple(i for i, choice in enumerate(self.choices) if choice.correct)


@dataclass(frozen=True, slots=True)
class Bank:
    """The questions of one chapter."""

    chapter: str
    title: str
    questions: tuple[Question, ...]


def read_bank(path: Path) -> Bank:
    """Return the questions of one file.

    Raises:
        UsageError: the file cannot be read or breaks the schema; the message names file,
            question and key.
    """
    place = Place(path.name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise place.wrong(f"cannot be read: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise place.wrong(f"is no TOML: {error}; mend that place") from None
    check_keys(table, BANK, place)
    if table["chapter"] != path.stem:
        raise place.wrong(f"chapter is {table['chapter']!r}; it must be {path.stem!r}, as the file")
    questions = tuple(
        _question(entry, path, number) for number, entry in enumerate(table["question"], 1)
    )
    _check_ids(questions, place, table["chapter"])
    return Bank(table["chapter"], table["title"], questions)


def _check_ids(questions: Sequence[Question], place: Place, chapter: str) -> None:
    """Refuse an id that is used twice or does not begin with the chapter."""
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise place.wrong(f"id {question.id!r} is used twice; rename one")
        if not (SLUG.fullmatch(question.id) and question.id.startswith(f"{chapter}-")):
            raise place.wrong(f"id {question.id!r} must look like '{chapter}-bytes-a-parameter'")
        seen.add(question.id)
    if not questions:
        raise place.wrong("holds no [[question]]; add one")


def _question(entry: Any, path: Path, number: int) -> Question:
    """Check one question and build it."""
    name = entry.get("id", number) if isinstance(entry, dict) else number
    place = Place(path.name, str(name))
    if not isinstance(entry, dict):
        raise place.wrong("is no table; write [[question]] above its keys")
    kind = one_of(entry, "kind", tuple(KINDS), place)
    check_keys(entry, {**COMMON, **KINDS[kind]}, place)
    one_of(entry, "difficulty", LEVELS, place)
    return Question(
        **{**entry, "code": entry.get("code", "").strip("\n"), **_BUILD[kind](entry, place)}
    )


# What each kind adds to the plain values of its table.


def _choices(entry: Mapping[str, Any], place: Place, label: str = "text") -> tuple[Choice, ...]:
    """Build the choices; `label` is the key that says what is chosen."""
    found = []
    for number, table in enumerate(entry["choices"], 1):
        inner = place.at(f"choice {number}")
        right = isinstance(table, dict) and table.get("correct") is True
        schema = dict(RIGHT if right else WRONG)
        if label == "line":
            schema = {
                ("line" if k == "text" else k): (int if k == "text" else t)
                for k, t in schema.items()
            }
        check_keys(table, schema, inner)
        found.append(Choice(**{"text": "", "correct": False, **table}))
    if len(found) < 2 or not any(choice.correct for choice in found):
        raise place.wrong("needs two choices or more, of which one has correct = true")
    return tuple(found)


def _single(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    choices = _choices(entry, place)
    if sum(choice.correct for choice in choices) != 1:
        raise place.wrong('has several correct choices; keep one, or make it kind = "multiple"')
    return {"choices": choices}


def _multiple(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    choices = _choices(entry, place)
    if all(choice.correct for choice in choices):
        raise place.wrong("has no wrong choice; add one")
    return {"choices": choices}


def _bug(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    lines = entry["code"].strip("\n").splitlines()
    found = []
    for choice in _choices(entry, place, "line"):
        if not (1 <= choice.line <= len(lines) and lines[choice.line - 1].strip()):
            raise place.wrong(f"line {choice.line} of the code is empty or does not exist")
        text = lines[choice.line - 1].strip()
        found.append(
            Choice(text, choice.correct, choice.feedback, choice.misconception, choice.line)
        )
    if sum(choice.correct for choice in found) != 1:
        raise place.wrong("needs exactly one line with correct = true")
    return {"choices": tuple(sorted(found, key=lambda choice: choice.line))}


def _numeric(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    for number, table in enumerate(entry["traps"], 1):
        check_keys(table, TRAP, place.at(f"trap {number}"))
    for expression in (entry["key"], *(table["value"] for table in entry["traps"])):
        try:
            quiz_expression.check(expression)
        except UsageError as error:
            raise place.wrong(str(error)) from None
    if not quiz_expression.calls(entry["key"]):
        raise place.wrong("key is a typed number; call a function of zerolab.sim.estimate")
    if not 0 <= entry["tolerance"] < 0.5:
        raise place.wrong(f"tolerance {entry['tolerance']} is not from 0 up to 0.5 (50 %)")
    try:
        quiz_units.scale(entry["unit"])
    except UsageError as error:
        raise place.wrong(str(error)) from None
    return {"traps": tuple(Trap(**table) for table in entry["traps"])}


def _ordering(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    for number, table in enumerate(entry["items"], 1):
        check_keys(table, FIRST_ITEM if number == 1 else WRONG, place.at(f"item {number}"))
    if len(entry["items"]) < 3:
        raise place.wrong("needs three items or more")
    return {"items": tuple(Item(**table) for table in entry["items"])}


def _short(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    for number, table in enumerate(entry["rubric"], 1):
        check_keys(table, POINT, place.at(f"point {number}"))
    return {
        "rubric": tuple(Point(t["point"], tuple(map(str, t["words"]))) for t in entry["rubric"])
    }


_BUILD: Mapping[str, Callable[[Mapping[str, Any], Place], dict[str, Any]]] = {
    "single": _single,
    "multiple": _multiple,
    "bug": _bug,
    "numeric": _numeric,
    "ordering": _ordering,
    "short": _short,
}
