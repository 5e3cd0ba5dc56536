"""Chapter 0: how an attempt at an exercise can end, and the report that says so.

Owns the eight outcomes. A `Report` is plain data: it crosses from the child process, in which
checks run, to the notebook, and everything on a card is drawn from it. `Wrong` is what a check
raises when the evidence is not what it must be, `Skipped` when it cannot be gathered here.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an attempt ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    EXCEPTION = "EXCEPTION"
    UNATTEMPTED = "UNATTEMPTED"
    TIMEOUT = "TIMEOUT"
    DEADLOCK = "DEADLOCK"
    OOM = "OOM"
    SKIPPED = "SKIPPED"


@dataclass(slots=True)
class Report:
    """What a check found out.

    Attributes:
        exercise: its id, such as "0.1".
        outcome: how it ended.
        message: what is wrong, in one or two sentences; "" after a pass.
        expected: what should have come out, "" where that says nothing.
        observed: what came out.
        call: the call that showed it, such as "shard_bounds(10, 4, 3)".
        rank: the rank on which it showed, None where ranks play no part.
        misconception: what the answer seems to believe, if it is a known wrong one.
        mutant: the name of that wrong answer, for the statistics of a class.
        proven: what the evidence did show before it failed, or altogether.
        file: source file of the learner's code, as Python names it.
        line: line in it at which it raised or hung, 0 for unknown.
        output: what the answer printed, cut short.
        usable: whether the rest of the notebook can run on this answer.
        world: the worlds of ranks that the evidence came from, such as "gloo"; "" for lockstep.
    """

    exercise: str
    outcome: Outcome
    message: str = ""
    expected: str = ""
    observed: str = ""
    call: str = ""
    rank: int | None = None
    misconception: str = ""
    mutant: str = ""
    proven: list[str] = field(default_factory=list)
    file: str = ""
    line: int = 0
    output: str = ""
    usable: bool = True
    world: str = ""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """Read what `dataclasses.asdict` wrote."""
        return cls(**{**data, "outcome": Outcome(data["outcome"])})


class Skipped(Exception):  # noqa: N818 - not an error of the program either
    """The evidence needs what this machine lacks; the message says what."""


class Wrong(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """The evidence contradicts the answer.

    Args:
        message: what is wrong and why it matters, as one sentence that names the numbers.
        expected: what should have come out.
        observed: what came out.
        call: the call that showed it; left out, the last call of the answer.
        rank: the rank on which it showed.
    """

    def __init__(
        self,
        message: str,
        *,
        expected: Any = "",
        observed: Any = "",
        call: str = "",
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected if isinstance(expected, str) else repr(expected)
        self.observed = observed if isinstance(observed, str) else repr(observed)
        self.call = call
        self.rank = rank
