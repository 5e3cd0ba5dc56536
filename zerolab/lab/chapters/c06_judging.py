"""Chapter 6: how its checks come to a verdict.

Owns no state. Facts that a rank has gathered are compared with what they must be, a run that stops
is a verdict on the answer, and units that are whole at the same time are counted.
"""

import warnings
from collections.abc import Callable
from typing import Any

from ...errors import UsageError
from ..outcome import Wrong
from . import unit_runs
from .unit_runs import Plan, Shown

Answer = Callable[..., Any]
RANKS = 3
NOT_A_VERDICT = (NotImplementedError, RecursionError)  # which are RuntimeErrors

Facts = dict[str, tuple[Any, Any, str]]  # name -> (expected, observed, what is wrong)


def judge(facts: Facts, call: str, rank: int) -> None:
    """Raise for the first fact that is not as it must be."""
    for expected, observed, message in facts.values():
        if expected != observed:
            raise Wrong(message, expected=expected, observed=observed, rank=rank, call=call)


def trains(call: str = "stage 3") -> str:
    """Train at stage 3 and compare with torch."""
    plan = Plan(3, RANKS)
    return unit_runs.same_weights(plan, trained(plan, call), call)


def trained(plan: Plan, call: str) -> list[Shown]:
    """Train; an error of the run is a verdict on the answer."""
    return verdict(unit_runs.describe(plan), call, lambda: unit_runs.run(plan))


def verdict(what: str, call: str, run: Callable[[], Any]) -> Any:
    """Return what a run returns; an error of it is a verdict on the answer."""
    try:
        with warnings.catch_warnings():  # torch tells of a second error, in the hook after forward
            warnings.filterwarnings("ignore", "module forward hook")
            return run()
    except NOT_A_VERDICT:
        raise
    except (RuntimeError, UsageError, AttributeError, TypeError) as error:
        raise Wrong(
            f"{what} stops: {first_line(error)}",
            expected="a run that reaches its end",
            observed=type(error).__name__,
            call=call,
        ) from error


def first_line(error: Exception) -> str:
    """Return what an error says, or its name where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _live_blocks(story: tuple[str, ...]) -> int:
    """Return how many units beside the root are whole at once, at most."""
    live: set[str] = set()
    most = 0
    for sign, name in ((event[0], event[1:]) for event in story):
        live = live | {name} if sign == "+" else live - {name}
        most = max(most, len(live - {"root"}))
    return most


def check_live(plan: Plan, ranks: list[Shown], expected: int, call: str) -> None:
    """Compare how many blocks are whole at the same time, at most, with a number."""
    for shown in ranks:
        live = _live_blocks(shown.story)
        if live != expected:
            where = _where_most(shown.story)
            rule = "are enough" if live > expected else "can be, by the options"
            raise Wrong(
                f"{unit_runs.describe(plan)}: {live} blocks are whole at the same time{where}, "
                f"where {expected} {rule}.",
                expected=expected,
                observed=" ".join(shown.story),
                rank=shown.rank,
                call=call,
            )


def _where_most(story: tuple[str, ...]) -> str:
    """Say whether the most units are whole on the way out or on the way back."""
    blocks = [event for event in story if event[1:] != "root"]
    first = blocks[: 2 * len({event[1:] for event in blocks})]
    return " in forward" if _live_blocks(tuple(first)) == _live_blocks(story) else " in backward"
