"""Chapter 2: the rows of a run that cannot go on, as a table that marks the odd one out.

Owns no state. A row says what one rank did when the run stopped. Rows of ranks that did the same
are alike; if all but a few are alike, those few are the odd ones, and to look there first is
nearly always right. Messages differ in their partner alone: their kind of call is what counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolab.errors import UsageError
from zerolab.records import RankRow

MESSAGES = ("send", "recv")
MEANINGS = {
    "waiting": "waits in",
    "computing": "was busy, after",
    "returned": "has returned, after",
    "raised": "raised an error, after",
    "died": "its process died, after",
}


def rows_of(error: Any) -> list[RankRow]:
    """Return the rows of an error, or of a sequence of rows.

    Raises:
        UsageError: there are none.
    """
    found = getattr(error, "table", error)
    rows = list(found) if isinstance(found, Sequence) else []
    if not rows or not all(isinstance(row, RankRow) for row in rows):
        raise UsageError(
            f"{type(error).__name__} has no rows; give the DeadlockError that the run raised"
        )
    return sorted(rows, key=lambda row: row.rank)


def alike(row: RankRow) -> tuple[str, str]:
    """Return what two rows must share to count as doing the same."""
    if row.state != "waiting":
        return (row.state, "")
    return (row.state, row.op if row.op in MESSAGES else row.detail or row.op)


def odd_ones(rows: Sequence[RankRow]) -> list[int]:
    """Return the ranks that did something else than most; none where there is no majority.

    Two ranks of which one waits: the other one is odd, for it is not there.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        groups.setdefault(alike(row), []).append(row.rank)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > len(rows):
        return [row.rank for row in rows if row.rank not in largest]
    absent = [row.rank for row in rows if row.state != "waiting"]
    return absent if len(absent) < len(rows) else []


def call_text(row: RankRow) -> str:
    """Return the collective that a rank waits in, or the last that it called."""
    if row.state == "waiting":
        return row.detail or row.op
    return f"after {row.op} #{row.seq}" if row.op else "none so far"


def since_text(row: RankRow) -> str:
    """Return how long a rank has been in its state."""
    return f"{row.seconds:.2f} s"


def said(row: RankRow) -> str:
    """Return what a rank did in one sentence."""
    where = f" at {row.where}" if row.where else ""
    call = call_text(row).removeprefix("after ")
    more = f": {row.detail}" if row.detail and row.state in ("raised", "died") else ""
    did = f"{MEANINGS.get(row.state, row.state)} {call}"
    if not row.op and row.state != "waiting":
        did = f"{MEANINGS.get(row.state, row.state).removesuffix(', after')} before any collective"
    return f"Rank {row.rank} {did}{where}{more}."


def needs(rows: Sequence[RankRow], rank: int) -> str:
    """Return what the others wait for, seen from one rank."""
    waiting = [row for row in rows if row.state == "waiting" and row.rank != rank]
    mine = next(row for row in rows if row.rank == rank)
    if mine.state == "waiting" and not waiting:
        return "Nobody else waits."
    calls = sorted({call_text(row) for row in waiting if alike(row) != alike(mine)})
    if not calls:
        return "The others that wait are in the same call."
    ranks = [row.rank for row in waiting if alike(row) != alike(mine)]
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{_ranks(ranks)} {verb} in {' and '.join(calls)}."


def finding(rows: Sequence[RankRow]) -> str:
    """Return in one sentence who stands apart from whom."""
    odd = odd_ones(rows)
    waiting = [row for row in rows if row.state == "waiting" and row.rank not in odd]
    if odd:
        parts = [said(row).rstrip(".") for row in rows if row.rank in odd]
        verb = "waits" if len(waiting) == 1 else "wait"
        calls = " and ".join(sorted({call_text(row) for row in waiting}))
        if waiting:
            parts.append(f"{_ranks([row.rank for row in waiting]).lower()} {verb} in {calls}")
        return "; ".join(parts) + "."
    if len({alike(row) for row in rows}) == 1 and waiting:
        return f"All {len(rows)} ranks wait in a {rows[0].op}, each for another: a circle."
    return f"{len(rows)} ranks, and no two groups of them make the same call."


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    *most, last = map(str, ranks)
    return f"Ranks {', '.join(most)} and {last}"


@dataclass(frozen=True)
class Line:
    """One row as it is drawn."""

    rank: int
    state: str
    call: str
    since: str
    where: str
    source: str
    odd: bool
    says: str

    def as_state(self) -> dict[str, Any]:
        """Return the row as the script wants it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def lines_of(rows: Sequence[RankRow]) -> list[Line]:
    """Return the rows as they are drawn."""
    odd = odd_ones(rows)
    return [
        Line(
            row.rank,
            row.state,
            call_text(row),
            since_text(row),
            row.where,
            row.source,
            row.rank in odd,
            f"{said(row)} {needs(rows, row.rank)}",
        )
        for row in rows
    ]
