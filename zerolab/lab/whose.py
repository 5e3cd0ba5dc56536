"""Chapter 0: whose code the engine runs on, said in a line.

Owns the number of the chapter that has begun. A line names what the chapter asks for and what
else is plugged in: "running on: your shard_bounds, your reduce (unverified), reference unshard".
About a training run it names only what the engine can reach: an estimator is no part of it.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any

from .. import engine
from . import exercise, own_copy, plug
from .cards import Card
from .exercise import PACKAGE, target_module

_begun: list[str] = []  # the chapter that has begun, at most one


def begin(chapter: str) -> None:
    """Note which chapter's exercises are named from now on."""
    _begun[:] = [chapter]


def running(target: str | None = None) -> Any:
    """Say whose code the engine runs on, or return what it runs on for one target.

    Args:
        target: such as "zerolab.flat:shard_bounds"; None for a card about all of them.

    Returns:
        The function or class in use, or the card.
    """
    if target is not None:
        return plug.running(target)
    return Card("--jp-info-color1", plug.listed(_targets()) if _targets() else untouched())


def of_training() -> str:
    """Say whose code a training run runs on."""
    targets = [t for t in _targets() if target_module(t).__name__ in engine_modules()]
    yours = any(target in plug.entries() for target in targets)
    return (plug.listed(targets) if yours else untouched()) + _left_behind(targets)


def _left_behind(targets: list[str]) -> str:
    """Say which functions the learner has in the copy while the reference runs: a new kernel."""
    absent = own_copy.in_workspace().intersection(targets) - plug.entries().keys()
    names = [target.rpartition(":")[2] for target in targets if target in absent]
    if not names:
        return ""
    return f"; yours of {', '.join(names)} is in my_zerolab, and lab.resume() plugs it in"


def untouched() -> str:
    """Say that the engine is all the package's own."""
    return "running on: the reference engine"


def _targets() -> list[str]:
    """Return what the chapter asks for, then what else is plugged in."""
    asked = [one.target for chapter in _begun for one in exercise.in_chapter(chapter)]
    return list(dict.fromkeys([*asked, *plug.entries()]))


@cache
def engine_modules() -> frozenset[str]:
    """Return the names of the package's modules that the engine uses, directly or not."""
    found: dict[str, ModuleType] = {}
    todo = [engine]
    while todo:
        module = todo.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            todo += [m for value in vars(module).values() if (m := _home(value)) is not None]
    return frozenset(found)


def _home(value: object) -> ModuleType | None:
    """Return the module of this package that a value is, or comes from; None for any other."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    inside = isinstance(name, str) and name.startswith(f"{PACKAGE}.")
    return sys.modules.get(name) if inside and isinstance(name, str) else None
