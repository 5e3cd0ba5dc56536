"""Chapter 2: the rows of a run that cannot go on, as a table that marks the odd one out.

Owns no state. A row says what one rank did when the run stopped. The odd ones out are ranks that
are gone, and those that wait in another call than most of the waiting; if there are none, those
that were busy. To look there first is nearly always right. A rank that is merely busy is not odd
beside two that contradict each other: it had no turn yet. Messages differ in their partner alone:
their kind of call is what counts. Where calls do not match, these calls come first: a rank may have
gone on since it made its own, and wait in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolab.errors import UsageError
from zerolab.records import RankRow

ODD, DIFFERS = "odd one out", "does not match"
MESSAGES = ("send", "recv")
ENDED = ("returned", "raised", "died")
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


def calls_of(error: Any) -> list[RankRow]:
    """Return the calls that do not match, none where it was no mismatch."""
    return sorted(getattr(error, "calls", ()), key=lambda row: row.rank)


def alike(row: RankRow) -> str:
    """Return what two waiting rows must share to count as waiting in the same call."""
    return row.op if row.op in MESSAGES else row.detail or row.op


def waiting_groups(rows: Sequence[RankRow]) -> list[list[RankRow]]:
    """Return the waiting rows by call, the largest group first."""
    groups: dict[str, list[RankRow]] = {}
    for row in rows:
        if row.state == "waiting":
            groups.setdefault(alike(row), []).append(row)
    return sorted(groups.values(), key=len, reverse=True)


def odd_ones(rows: Sequence[RankRow]) -> list[int]:
    """Return the ranks that stand apart, in order; none where there are sides and no majority."""
    groups = waiting_groups(rows)
    odd = [row.rank for row in rows if row.state in ENDED]
    if len(groups) > 1 and len(groups[0]) > len(groups[1]):
        odd += [row.rank for group in groups[1:] for row in group]
    if not odd and len(groups) == 1:
        odd = [row.rank for row in rows if row.state != "waiting"]
    return sorted(odd)


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
    """Return in what the others wait, seen from one rank."""
    mine = next(row for row in rows if row.rank == rank)
    others = waiting_groups([row for row in rows if row.rank != rank])
    if not others:
        return "Nobody else waits."
    if mine.state == "waiting":
        others = [group for group in others if alike(group[0]) != alike(mine)]
    if not others:
        return "The others that wait are in the same call."
    return f"{capital('; '.join(map(wait_text, others)))}."


def mismatching(calls: Sequence[RankRow]) -> list[int]:
    """Return the ranks whose call is not that of most; all of them where there is no majority."""
    groups = waiting_groups(calls)
    if len(groups) > 1 and len(groups[0]) > len(groups[1]):
        groups = groups[1:]
    return sorted(row.rank for group in groups for row in group)


def mismatch_text(calls: Sequence[RankRow]) -> str:
    """Return who called what and where: "rank 0 called all_reduce #1 (...) at train.py:7, ..."."""
    parts = []
    for group in waiting_groups(calls):
        lines = " and ".join(dict.fromkeys(row.where for row in group if row.where))
        who = _ranks([row.rank for row in group])
        parts.append(f"{who} called {call_text(group[0])}" + (f" at {lines}" if lines else ""))
    return ", ".join(parts)


def finding(rows: Sequence[RankRow], calls: Sequence[RankRow] = ()) -> str:
    """Return in one sentence who stands apart from whom."""
    if calls:
        return f"The calls do not match: {mismatch_text(calls)}."
    odd, groups = odd_ones(rows), waiting_groups(rows)
    parts = [said(row).rstrip(".") for row in rows if row.rank in odd]
    rest = [[row for row in group if row.rank not in odd] for group in groups]
    if not odd and len(groups) == 1 and len(rows) > 1:
        article = "an" if groups[0][0].op[0] in "aeiou" else "a"
        who = f"All {len(rows)} ranks wait in {article} {groups[0][0].op}"
        return f"{who}, each for another: a circle."
    parts += [wait_text(group) for group in rest if group]
    if not parts:
        return f"None of {len(rows)} ranks waited: {said(rows[0])}"
    return f"{capital('; '.join(parts))}."


def wait_text(group: Sequence[RankRow]) -> str:
    """Return in words who waits in what: "ranks 0 and 1 wait in barrier #2"."""
    calls = sorted({call_text(row) for row in group})
    verb = "waits" if len(group) == 1 else "wait"
    return f"{_ranks([row.rank for row in group])} {verb} in {' and '.join(calls)}"


def capital(text: str) -> str:
    """Return a text with a capital at its start and the rest as it is."""
    return text[:1].upper() + text[1:]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}"


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
    mark: str = ODD

    def as_state(self) -> dict[str, Any]:
        """Return the row as the script wants it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def lines_of(rows: Sequence[RankRow], calls: Sequence[RankRow] = ()) -> list[Line]:
    """Return the rows as they are drawn."""
    odd = mismatching(calls) if calls else odd_ones(rows)
    return [
        Line(
            row.rank,
            row.state,
            call_text(row),
            since_text(row),
            row.where,
            row.source,
            row.rank in odd,
            f"{said(row)} {_apart(row, rows, calls)}",
            DIFFERS if calls else ODD,
        )
        for row in rows
    ]


def _apart(row: RankRow, rows: Sequence[RankRow], calls: Sequence[RankRow]) -> str:
    """Return what a rank stands against: the calls that do not match, or where others wait."""
    if row.rank in [call.rank for call in calls]:
        return f"{capital(mismatch_text(calls))}."
    return needs(rows, row.rank)
