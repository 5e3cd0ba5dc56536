"""Chapter 0: the bug hunt: a wrong engine is found by the evidence it leaves, named, and mended.

Owns nothing; its runs are in the lockstep world, whatever ZEROLAB_WORLD says. `bug_hunt` plugs
one of an exercise's mutants into the engine for a few tiny runs and shows what they left: bytes
held, elements moved, losses, or the error that ended them. The learner names the misconception
behind it, then writes the function that mends it. An exercise lists the mutants that can be
hunted: those whose evidence is unlike that of every other one.

Phases: choose the bug and shuffle the labels (always the same for the same number), gather the
evidence, judge the name, judge the mended function.
"""

import ast
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import UsageError
from . import cards, checking, evidence, exercise, plug, progress
from .cards import Card, Row
from .exercise import Exercise, Mutant
from .outcome import Outcome
from .sandbox import shared

STAGE = 1
WORLD_SIZES = (1, 2, 3, 4)
LETTERS = "ABCDEFGHIJKLMNOP"
Evidence = tuple[str, ...]  # one line for each world size


def bug_hunt(
    exercise_id: str,
    name: str | None = None,
    fix: Callable[..., Any] | None = None,
    *,
    number: int = 1,
) -> None:
    """Show the evidence of a wrong engine; judge what the learner calls it; judge the remedy.

    Args:
        exercise_id: such as "0.1": which function has been replaced by a wrong one.
        name: the letter of the misconception behind it; None shows the evidence and the letters.
        fix: the function as it should be, which is checked like an answer to the exercise.
        number: which bug, from 1; there are several.

    Raises:
        CheckFailed: the misconception is another one, or the function still does not pass.
        UsageError: there is no such exercise, bug or letter.
    """
    found = exercise.find(exercise_id)
    bug, labels = _chosen(found, number), labels_of(found)
    if name is None:
        cards.show(_case(found, bug, labels, number))
        return
    named = _named(name, labels)
    if named is not bug:
        _note(found, bug, named, Outcome.FAIL)
        _fail(_wrong_name(found, bug, named))
    if fix is None:
        _note(found, bug, named, Outcome.UNATTEMPTED)
        cards.show(_right_name(found, bug, name, number))
        return
    _mend(found, bug, fix)


# Phase 1: which bug, under which letters.


def hunted(found: Exercise) -> list[Mutant]:
    """Return the mutants of an exercise that can be hunted, in an order of no meaning."""
    return _shuffled((m for m in found.mutants if m.name in found.hunted), f"bug {found.id}")


def labels_of(found: Exercise) -> dict[str, Mutant]:
    """Return the letters to choose from, and the mutant behind each."""
    return dict(zip(LETTERS, _shuffled(found.mutants, f"label {found.id}"), strict=False))


def _shuffled(mutants: Iterable[Mutant], salt: str) -> list[Mutant]:
    """Return the mutants in an order that never changes and says nothing about them."""
    return sorted(mutants, key=lambda m: hashlib.sha256(f"{salt} {m.name}".encode()).digest())


def _chosen(found: Exercise, number: int) -> Mutant:
    bugs = hunted(found)
    if not 1 <= number <= len(bugs):
        rule = f"use number=1 to {len(bugs)}" if bugs else "this exercise has none: take another"
        raise UsageError(f"bug {number} of {found.id} does not exist; {rule}")
    return bugs[number - 1]


def _named(name: str, labels: dict[str, Mutant]) -> Mutant:
    letter = str(name).strip().upper()
    if letter not in labels:
        raise UsageError(f"{name!r} is no label; give one letter of {', '.join(labels)}")
    return labels[letter]


# Phase 2: the evidence.


def evidence_of(target: str, function: Callable[..., Any]) -> Evidence:
    """Run on a function, at several world sizes; return what each run left behind."""
    found = next((one for one in exercise.every() if one.target == target), None)
    look = found.evidence if found is not None and found.evidence is not None else _stage_1
    with plug.set_aside(), plug.plugged(target, function):
        return tuple(_run(look, world_size) for world_size in WORLD_SIZES)


def _run(look: Callable[[int], str], world_size: int) -> str:
    try:
        return look(world_size)
    except (Exception, torch.OutOfMemoryError) as error:
        return f"stopped: {str(error).splitlines()[0]}"


def _stage_1(world_size: int) -> str:
    ranks = evidence.train_tiny(STAGE, world_size, world="lockstep")
    held = ", ".join(str(rank.optimizer_bytes) for rank in ranks)
    moved = ", ".join(f"{op} {elements}" for op, elements in ranks[0].moved.items())
    steps = zip(*(rank.losses for rank in ranks), strict=True)
    losses = ", ".join(f"{sum(step) / world_size:.5f}" for step in steps)
    return f"optimizer bytes {held}; elements moved: {moved}; losses {losses}"


def _rows(lines: Evidence) -> list[Row]:
    sizes = zip(WORLD_SIZES, lines, strict=True)
    return [Row(f"{n} rank{'s' * (n > 1)}", line, code=True) for n, line in sizes]


def _case(found: Exercise, bug: Mutant, labels: dict[str, Mutant], number: int) -> Card:
    """Return the opening card: the evidence and the letters."""
    choices = [Row(letter, mutant.misconception) for letter, mutant in labels.items()]
    return Card(
        "--jp-info-color1",
        f"BUG {number} of {len(hunted(found))}  {found.id} {found.name}",
        f"Somebody has replaced `{found.name}`. {found.scene}, and this is what it left. "
        "Which of these explains it?",
        (*_rows(evidence_of(found.target, bug.function)), *choices),
        f"Name it: {_call(found, 'LETTER', number)}.",
    )


def _call(found: Exercise, letter: str, number: int, more: str = "") -> str:
    which = f", number={number}" if number > 1 else ""
    return f'lab.bug_hunt("{found.id}", "{letter}"{more}{which})'


# Phase 3: the name.


def _wrong_name(found: Exercise, bug: Mutant, named: Mutant) -> Card:
    """Return the card that shows where the evidence contradicts what was named."""
    ours = evidence_of(found.target, bug.function)
    theirs = evidence_of(found.target, named.function)
    different = next(i for i, line in enumerate(ours) if line != theirs[i])
    ranks = WORLD_SIZES[different]
    rows = (
        Row("you named", named.misconception),
        Row("it leaves", theirs[different], code=True),
        Row("here was", ours[different], code=True),
    )
    return Card(
        "--jp-error-color1",
        f"FAIL  {found.id} bug hunt",
        f"That one leaves other evidence on {ranks} rank{'s' * (ranks > 1)}.",
        rows,
        "Look again, and name another.",
    )


def _right_name(found: Exercise, bug: Mutant, name: str, number: int) -> Card:
    """Return the card that shows the wrong function and asks for the right one."""
    rows = (
        Row("its mistake", bug.misconception),
        Row("its code", code_of(bug, found.name), code=True),
    )
    then = _call(found, name.strip().upper(), number, f", {found.name}")
    return Card(
        "--jp-info-color1",
        f"FOUND  {found.id} bug hunt",
        "You have named it. Now mend it: put the function into a cell and correct it.",
        rows,
        f"Then: {then}.",
    )


def code_of(mutant: Mutant, name: str) -> str:
    """Return a mutant's source under the exercise's own name, without its docstring."""
    source = textwrap.dedent(_text_of(mutant.function))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.FunctionDef | ast.ClassDef)
    lines = source.rstrip().splitlines()
    docstring = body.body[0]
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    word = "class" if isinstance(body, ast.ClassDef) else "def"
    return "\n".join(lines).replace(f"{word} {mutant.name}(", f"{word} {name}(", 1)


def _text_of(thing: Callable[..., Any]) -> str:
    """Return the text of a function or class, also of a class that no file of its module has."""
    code = plug.code_of(thing)
    if not isinstance(thing, type) or code is None:
        return inspect.getsource(thing)
    text = "".join(linecache.getlines(code.co_filename))
    node = next(one for one in ast.parse(text).body if getattr(one, "name", "") == thing.__name__)
    return ast.get_source_segment(text, node) or ""


# Phase 4: the remedy.


def _mend(found: Exercise, bug: Mutant, fix: Callable[..., Any]) -> None:
    """Check the function; only a passing one ends the hunt."""
    if not callable(fix):
        raise UsageError(f"lab.bug_hunt got {fix!r} as a fix; give the function, not its result")
    report = shared.run(found, fix)
    _note(found, bug, bug, report.outcome)
    if report.outcome is not Outcome.PASS:
        _fail(cards.card_of(report, found, "Named, but not mended yet."))
    plug.plug(found.target, fix, verified=True)
    message = f"Named and mended: {bug.misconception}"
    rows = tuple(Row("proven", fact) for fact in report.proven)
    cards.show(Card("--jp-success-color1", f"PASS  {found.id} bug hunt", message, rows))


def _note(found: Exercise, bug: Mutant, named: Mutant, outcome: Outcome) -> None:
    progress.note_hunt(found.id, bug.name, named.name, outcome)


def _fail(card: Card) -> None:
    cards.show(card)
    raise cards.CheckFailed(card, in_full=checking.strict())
