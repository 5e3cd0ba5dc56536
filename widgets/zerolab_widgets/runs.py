"""Chapter 0: a run as pictures read it: the records of every rank, and how it ended.

Owns no state. `run_of` takes what a notebook has at hand: the result of `lab.train`, a list of
`Records`, or the records of one rank. Of a result it reads plain data only: records, capacity,
and the facts on the exception that ended the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolab.errors import UsageError
from zerolab.records import Records


@dataclass(frozen=True)
class Run:
    """What ranks recorded, and how that ended.

    Attributes:
        ranks: the records of every rank, in rank order.
        capacity: bytes of each GPU, 0 for no limit.
        failed: position of the rank that ran out of memory, None if none did.
        requested: bytes that did not fit, 0 where nobody said.
        held: bytes that it held then; while the error travelled, memory was freed.
        op: the operation that asked for them.
        where: "file:line" that asked for them.
        message: the first sentences of the error.
    """

    ranks: Sequence[Records]
    capacity: int = 0
    failed: int | None = None
    requested: int = 0
    op: str = ""
    where: str = ""
    message: str = ""
    held: int = 0

    @property
    def world(self) -> str:
        """In which world it ran: "lockstep", "gloo", "nccl", "solo", or "" where unknown."""
        return next((records.world for records in self.ranks if records.world), "")

    @property
    def in_order_only(self) -> bool:
        """Whether times say nothing: lockstep ranks run one at a time."""
        return self.world in ("lockstep", "")


def run_of(run: Any) -> Run:
    """Return the run behind what a notebook has at hand.

    Args:
        run: what `lab.train` returned, a list of `Records`, one `Records`, or a `Run`.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(run, Run):
        return run
    if isinstance(run, Records):
        return Run([run])
    ranks = getattr(run, "ranks", run)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise UsageError(f"{type(run).__name__} is no run; give what lab.train returned")
    records = [getattr(rank, "records", rank) for rank in ranks]
    if not all(isinstance(each, Records) for each in records):
        raise UsageError("a list without Records is no run; give what lab.train returned")
    return _with_ending(sorted(records, key=lambda each: each.rank), run)


def _with_ending(records: Sequence[Records], run: Any) -> Run:
    """Add capacity and error, where the run has them."""
    error = getattr(run, "error", None)
    failed = getattr(error, "rank", None)
    positions = [i for i, each in enumerate(records) if each.rank == failed]
    return Run(
        records,
        getattr(run, "capacity", None) or 0,
        positions[0] if positions and hasattr(error, "requested") else None,
        getattr(error, "requested", 0),
        getattr(error, "op", ""),
        getattr(error, "where", ""),
        str(error or "").split(" Of the allocated")[0],
        getattr(error, "allocated", 0),
    )
