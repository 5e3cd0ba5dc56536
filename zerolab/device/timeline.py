"""Chapter 0: the memory timeline, millions of events in little memory.

Owns the events of one ledger as columns of plain numbers (44 bytes an event, nothing for the
garbage collector to visit) and hands them out as `MemoryEvent`s when somebody reads them.
The kind belongs to the block, not to the event: when a block turns out to be an activation,
its birth shows that too, so that sums by kind add up at every point of the timeline.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from ..records import MemoryEvent


class Timeline(Sequence[MemoryEvent]):
    """A read-only sequence of `MemoryEvent`, filled by a ledger."""

    def __init__(self) -> None:
        """Start empty."""
        self._times = array("d")
        self._deltas = array("q")
        self._totals = array("q")
        self._blocks = array("q")
        self._words = array("i")  # op, phase and where of each event, as numbers of words
        self._kinds: list[str] = []  # of each block, as known by now
        self._number: dict[str, int] = {}
        self._text: list[str] = []

    def append(
        self, time: float, delta: int, total: int, block: int, op: str, phase: str, where: str
    ) -> None:
        """Add one event; the kind comes from `set_kind`."""
        self._times.append(time)
        self._deltas.append(delta)
        self._totals.append(total)
        self._blocks.append(block)
        number = self._number
        for word in (op, phase, where):
            known = number.get(word)
            self._words.append(self._new_word(word) if known is None else known)

    def set_kind(self, block: int, kind: str) -> None:
        """Say of what kind a block is, new or known: all its events, past ones too, show it."""
        kinds = self._kinds
        if block == len(kinds):
            kinds.append(kind)
        else:
            kinds[block] = kind

    @property
    def num_blocks(self) -> int:
        """How many blocks there are; the next one gets this number."""
        return len(self._kinds)

    def _new_word(self, word: str) -> int:
        self._text.append(word)
        return self._number.setdefault(word, len(self._text) - 1)

    def _event(self, index: int) -> MemoryEvent:
        block = self._blocks[index]
        op, phase, where = (self._text[word] for word in self._words[3 * index : 3 * index + 3])
        return MemoryEvent(
            time=self._times[index],
            delta=self._deltas[index],
            total=self._totals[index],
            kind=self._kinds[block],
            block=block,
            op=op,
            phase=phase,
            where=where,
        )

    def __len__(self) -> int:
        """How many events there are."""
        return len(self._times)

    @overload
    def __getitem__(self, index: int) -> MemoryEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[MemoryEvent]: ...
    def __getitem__(self, index: int | slice) -> MemoryEvent | list[MemoryEvent]:
        """Give one event, or a list of them."""
        if isinstance(index, slice):
            return [self._event(at) for at in range(*index.indices(len(self)))]
        return self._event(range(len(self))[index])

    def __iter__(self) -> Iterator[MemoryEvent]:
        """Go through the events in order."""
        return (self._event(index) for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same events."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a growing sequence

    def __repr__(self) -> str:
        """Say how long it is; thousands of events help nobody."""
        return f"<Timeline of {len(self)} memory events>"
