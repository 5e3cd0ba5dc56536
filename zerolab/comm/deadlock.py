"""Chapter 2: the table of a run that cannot go on: one row a rank, in words and source lines.

Owns nothing. Both worlds collect `RankRow`s in their own way and come here for the text. A
deadlock is claimed on proof only: a rank waits for a peer that returned, raised, died or sits
in another call. A peer that still computes proves nothing, and only the `timeout` of the run
ends that wait.
"""

from collections.abc import Mapping, Sequence

from ..errors import RankError
from ..records import RankRow
from . import source

_HEAD = ("rank", "state", "call", "since", "line", "source")


class RunTimeoutError(RankError, TimeoutError):
    """A run took longer than its `timeout`; the message names the rank that was still busy.

    Attributes:
        table: one row a rank, as `zerolab.records.RankRow`.
    """

    def __init__(self, message: str, table: tuple = ()) -> None:
        """Keep the rows beside the text, for pictures."""
        super().__init__(message)
        self.table = table


def render(rows: Sequence[RankRow]) -> str:
    """Draw the rows as aligned text, with the source line of every rank."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD) - 1)]
    lines = []
    for line in cells:
        padded = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join("  " + line for line in lines)


def row(
    rank: int, state: str, op: str, seq: int, detail: str, seconds: float, where: str
) -> RankRow:
    """Make a row from a full "file:line", which is looked up and shortened."""
    text = source.text_of(where) if where else ""
    return RankRow(rank, state, op, seq, detail, seconds, source.short(where), text)


def _cells(row: RankRow) -> tuple[str, ...]:
    """Turn a row into the texts of its columns."""
    call = row.detail or row.op or "no collective yet"
    if row.state not in ("waiting", "computing") and row.op:
        call = f"after {row.op} #{row.seq}" + (f": {row.detail}" if row.detail else "")
    return (str(row.rank), row.state, call, f"{row.seconds:.2f} s", row.where, row.source)


def explain(rows: Sequence[RankRow]) -> str:
    """Say in one sentence why the waiting ranks wait for ever."""
    waiting = [row for row in rows if row.state == "waiting"]
    gone = [row for row in rows if row.state in ("returned", "raised", "died")]
    if gone:
        calls = sorted({row.detail for row in waiting})
        who = f"{ranks_text([row.rank for row in gone])} {' and '.join(_verbs(gone))}"
        return f"{who} without the call that {_wait_text(waiting)} in: {'; '.join(calls)}"
    return f"{_wait_text(waiting)}, each for a call that another never makes"


def mismatch_text(rows: Sequence[RankRow], called: Mapping[int, str] | None = None) -> str:
    """Say which ranks called what instead of one and the same, and draw the table.

    Args:
        rows: where every rank is.
        called: per rank, the call that does not match; None: the calls that the ranks wait in,
            which may be earlier ones where collectives run in the background.
    """
    if called is None:
        called = {each.rank: each.detail for each in rows if each.state == "waiting"}
    calls: dict[str, list[int]] = {}
    for rank in sorted(called):
        calls.setdefault(called[rank], []).append(rank)
    parts = [f"{ranks_text(ranks)} called {call}" for call, ranks in calls.items()]
    return f"mismatch: {', '.join(parts)}\n{render(rows)}"


def _verbs(rows: Sequence[RankRow]) -> list[str]:
    """Return the different states of the rows, in order of appearance."""
    return list(dict.fromkeys(row.state for row in rows))


def _wait_text(rows: Sequence[RankRow]) -> str:
    """Say which ranks wait."""
    verb = "waits" if len(rows) == 1 else "wait"
    return f"{ranks_text([row.rank for row in rows])} {verb}"


def first_line(error: BaseException) -> str:
    """Name an exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in words: "rank 2", "ranks 0 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
