"""Chapter 2: what the ranks do while an exercise of 02_collectives is checked, and what they show.

Owns no data. A rank makes one call on whole numbers, which every order adds up alike, and hands
back values, bytes, messages. A `Look` compares that with what should have come out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import comm, device
from ...errors import DeadlockError, MismatchError
from .. import evidence
from ..outcome import Wrong

SLACK = 16  # bytes that a rank may hold beyond the budget: an index, a number


@dataclass(frozen=True, slots=True)
class Shown:
    """What one rank showed of one call."""

    values: list[float]
    kept: bool = True  # what it was given is unchanged
    held: int = 0  # bytes at the most, beyond what was there before
    ops: tuple[str, ...] = ()  # what it called, in order
    peers: tuple[int, ...] = ()  # to whom it sent
    sent: int = 0  # elements
    dtypes: tuple[str, ...] = ()  # of what it sent, each once
    under_way: tuple[str, ...] = ()  # what it began and did not wait for


def small_numbers(rank: int, numel: int) -> torch.Tensor:
    """Return whole numbers whose sums bfloat16 can hold."""
    return (torch.arange(numel) % 8 + rank).to(evidence.home(), torch.bfloat16)


def numbers(rank: int, numel: int) -> torch.Tensor:
    """Return what a rank begins with: whole numbers, so that every order adds up alike."""
    return (torch.arange(numel) + 100.0 * (rank + 1)).to(evidence.home())


def total(world_size: int, numel: int) -> list[float]:
    """Return the sum over all ranks."""
    return sum(numbers(rank, numel) for rank in range(world_size)).tolist()  # type: ignore[union-attr]


def watched(call: Callable[[], None], values: torch.Tensor, given: torch.Tensor | None) -> Shown:
    """Make a call as one rank and look at everything it leaves."""
    gpu, before = device.current(), None if given is None else given.clone()
    held = 0 if gpu is None else gpu.allocated_bytes
    if gpu is not None:
        gpu.reset_peak()
    first = len(comm.records().collectives)
    call()
    events = comm.records().collectives[first:]
    sends = [event for event in events if event.op == "send"]
    return Shown(
        values=values.tolist(),
        kept=given is None or torch.equal(given, before),  # type: ignore[arg-type]
        held=0 if gpu is None else gpu.peak_bytes - held,
        ops=tuple(event.op for event in events),
        peers=tuple(event.peer for event in sends),
        sent=sum(event.elements for event in sends),
        dtypes=tuple(dict.fromkeys(event.dtype for event in sends)),
        under_way=tuple(event.op for event in events if not event.ended),
    )


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, call: str) -> list[Any]:
    """Run on ranks; what never ends is a wrong answer, with the table of who waits for whom."""
    try:
        return evidence.run(function, world_size, *args)
    except DeadlockError as error:
        hangs = not isinstance(error, MismatchError)
        what = "Nobody can go on" if hangs else "The messages do not fit"
        verdict, _, table = str(error).partition("\n")
        raise Wrong(
            f"{what}, on {world_size} ranks: {verdict.partition(': ')[2]}.",
            expected="each message is sent by one rank and received by another",
            observed=table,
            call=call,
        ) from error


@dataclass(frozen=True, slots=True)
class Look:
    """One call on so many ranks, as a message names it."""

    call: str
    shown: Sequence[Shown]

    def values(self, expected: Sequence[list[float]], what: str) -> None:
        """Compare what the ranks have with what they should have."""
        for rank, (shown, right) in enumerate(zip(self.shown, expected, strict=True)):
            if shown.values != right:
                where = _differences(shown.values, right)
                pairs = zip(self.shown, expected, strict=True)
                bad = sum(shown.values != right for shown, right in pairs)
                text = f"rank {rank} {what}: {where}. It is so on {bad} of {len(self.shown)} ranks."
                raise self.wrong(rank, text, _cut(right), _cut(shown.values))

    def waited(self) -> None:
        """Every call that a rank began has ended: nothing is under way any more."""
        for rank, shown in enumerate(self.shown):
            if shown.under_way:
                op = shown.under_way[0]
                what = f"rank {rank} began a {op} and came back without having waited for it."
                raise self.wrong(rank, what, "nothing under way", f"{op} under way")

    def kept(self, what: str) -> None:
        """No rank has changed what it was given."""
        for rank, shown in enumerate(self.shown):
            if not shown.kept:
                text = f"rank {rank} has changed its {what}."
                raise self.wrong(rank, text, "unchanged", "changed")

    def only_messages(self) -> None:
        """Nothing but `comm.send` and `comm.recv` was called."""
        for rank, shown in enumerate(self.shown):
            others = sorted(set(shown.ops) - {"send", "recv"})
            if others:
                what = f"comm.{others[0]} was called; build it from comm.send and comm.recv."
                raise self.wrong(rank, what, ("recv", "send"), tuple(sorted(set(shown.ops))))

    def sent(self, elements: int, why: str) -> None:
        """No rank has sent more than so many elements."""
        all_sent = tuple(shown.sent for shown in self.shown)
        for rank, sent in enumerate(all_sent):
            if sent > elements:
                what = f"rank {rank} sent {sent} elements (all ranks: {all_sent}); {elements} do, "
                raise self.wrong(rank, f"{what}{why}.", elements, sent)

    def travels_in(self, dtype: str) -> None:
        """Every rank has sent what it was given in its dtype."""
        for rank, shown in enumerate(self.shown):
            others = [one for one in shown.dtypes if one != dtype]
            if others:
                text = (
                    f"rank {rank} was given {dtype} and sent {others[0]}: what is made on the way "
                    "has to have the dtype of the tensor, as `torch.empty_like` and `new_zeros` do."
                )
                raise self.wrong(rank, text, dtype, ", ".join(shown.dtypes))

    def budget(self, nbytes: int, what: str) -> None:
        """No rank has held more than so much beyond what was there."""
        for rank, shown in enumerate(self.shown):
            if shown.held > nbytes + SLACK:
                text = f"rank {rank} held {shown.held} bytes more at a time; the budget is {what}."
                raise self.wrong(rank, text, f"at most {nbytes}", shown.held)

    def wrong(self, rank: int, message: str, expected: Any, observed: Any) -> Wrong:
        """Return the verdict on one rank."""
        ranks = f"{len(self.shown)} rank{'s' * (len(self.shown) > 1)}"
        text = f"On {ranks} {message}"
        return Wrong(text, expected=expected, observed=observed, call=self.call, rank=rank)


def _cut(values: Sequence[float]) -> str:
    """Return a list as a card can hold it: beginning and end."""
    words = [f"{value:g}" for value in values]
    return f"[{', '.join(words if len(words) <= 8 else [*words[:4], '...', words[-1]])}]"


def _differences(observed: list[float], expected: list[float]) -> str:
    """Name the first and the last element that is wrong."""
    if len(observed) != len(expected):
        return f"it has {len(observed)} elements, not {len(expected)}"
    pairs = list(zip(observed, expected, strict=True))
    bad = [index for index, (mine, right) in enumerate(pairs) if mine != right]
    ends = dict.fromkeys([bad[0], bad[-1]])
    return "; ".join(f"element {i} is {pairs[i][0]:g}, not {pairs[i][1]:g}" for i in ends)
