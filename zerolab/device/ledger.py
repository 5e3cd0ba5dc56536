"""Chapter 0: the ledger, which knows who holds which bytes.

Owns one `Block` for each storage that it has seen, the bytes now and at the peak, by kind,
and the timeline. A block is a weak reference to its storage: when the last view of a tensor
dies, Python calls `_on_free`, on whatever thread that happens, and the event goes to the
ledger that owns the block. Views share a storage and are therefore counted once.

Three ways in: `admit` (a storage not seen before), `resize` (one that changed its size) and
a death. All three end in `_apply`, the only place where bytes are added up.
"""

import threading
import weakref
from collections import deque
from time import perf_counter

import torch

from ..errors import UsageError
from ..records import Mark, Records
from . import oom, sizes, source
from .timeline import Timeline

UNCOUNTED = ""  # the kind of what was born while the ledger was paused


class Block(weakref.ref[torch.UntypedStorage]):
    """One storage in one ledger. It must not keep the storage alive, so it is a weak reference."""

    __slots__ = ("__dict__", "key", "kind", "ledger", "nbytes", "number")

    ledger: "Ledger"
    key: int  # address of the C++ storage, unique while that lives
    number: int  # the how-manieth counted block of this ledger, -1 for uncounted ones
    nbytes: int  # bytes counted for it now
    kind: str  # one of records.KINDS, or UNCOUNTED
    name: str = ""  # the unit it belongs to, "" for none
    closed: bool = False  # named and empty: no operation may read it
    pinned: bool = False  # page-locked, in host memory
    origin: torch.device | None = None  # in host memory: the device it was copied from


def _on_free(block: weakref.ref[torch.UntypedStorage]) -> None:
    """Take a dead storage out of the books; runs on the thread that dropped the last view."""
    assert isinstance(block, Block)
    ledger = block.ledger
    if ledger.live.get(block.key) is block:
        del ledger.live[block.key]  # at once: the address may be reused right away
    ledger.dead.append(block)
    ledger.settle()


class Ledger:
    """The books of one memory, of a virtual GPU or of the host.

    Attributes:
        capacity: bytes it has, None for no limit.
        index: which GPU, equal to the rank.
        records: where the timeline and the marks go.
        allocated_bytes: bytes held now.
        peak_bytes: the most held since the last `reset_peak`.
        began: when the run began; times in the records count from here.
    """

    place = "GPU"

    def __init__(
        self,
        capacity: int | str | None,
        index: int,
        records: Records | None,
        timeline: bool,
        began: float | None = None,
    ) -> None:
        """Open empty books."""
        self.capacity = None if capacity is None else sizes.parse_bytes(capacity)
        self.index = index
        self.records = Records(rank=index) if records is None else records
        self._timeline = _timeline_of(self.records) if timeline else None
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.phase = "idle"
        self.live: dict[int, Block] = {}
        self.dead: deque[Block] = deque()
        self._by_kind: dict[str, int] = {}
        self._peak_by_kind: dict[str, int] = {}
        self._at_peak = True  # nothing was freed since the peak: it is the present
        self._blocks_at_peak = 0  # how many blocks had been born when the peak was reached
        self._num_blocks = 0 if self._timeline is None else self._timeline.num_blocks
        self.tagged: str | None = None  # kind of the innermost `tag`
        self._born_in_forward: dict[int, Block] = {}
        self._lock = threading.RLock()
        self._applying = False
        self.began = perf_counter() if began is None else began

    # Reading the books.

    def by_kind(self) -> dict[str, int]:
        """Bytes held now, by kind; kinds that hold nothing are left out."""
        return {kind: nbytes for kind, nbytes in self._by_kind.items() if nbytes}

    def peak_by_kind(self) -> dict[str, int]:
        """Bytes held at the peak, by kind; their sum is `peak_bytes`."""
        kinds = self._by_kind if self._at_peak else self._peak_by_kind
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def reset_peak(self) -> None:
        """Start looking for a new peak from what is held now."""
        with self._lock:
            self.peak_bytes, self._at_peak = self.allocated_bytes, True
            self._blocks_at_peak = self._num_blocks

    def mark(self, name: str) -> Mark:
        """Write down a named moment with the bytes held by kind."""
        mark = Mark(
            time=perf_counter() - self.began,
            name=name,
            total=self.allocated_bytes,
            by_kind=self.by_kind(),
            peak=self.peak_bytes,
        )
        self.records.marks.append(mark)
        return mark

    def check_room(self, nbytes: int, op: str) -> None:
        """Raise `torch.OutOfMemoryError` unless this many more bytes fit."""
        if nbytes <= 0 or self.capacity is None or self.allocated_bytes + nbytes <= self.capacity:
            return
        raise oom.out_of_memory(
            requested=nbytes,
            capacity=self.capacity,
            breakdown=self.by_kind(),
            place=self.place,
            rank=self.index,
            op=op,
            phase=self.phase,
            where=source.caller(),
        )

    # Three ways in.

    def admit(self, storage: torch.UntypedStorage, op: str, kind: str | None = None) -> Block:
        """Open a block for a storage not seen before.

        Args:
            storage: of any size; one of 0 bytes is remembered for the day it grows.
            op: the operation that made it.
            kind: its kind; None for the kind of the current `tag`, else `"temp"`.

        Raises:
            torch.OutOfMemoryError: it does not fit; the ledger is as before.
        """
        with self._lock:
            nbytes = 0 if kind == UNCOUNTED else storage.nbytes()
            self.check_room(nbytes, op)
            block = self._open(storage, kind if kind is not None else self.tagged or "temp")
            if kind is None and self.tagged is None and self.phase == "forward":
                self._born_in_forward[block.number] = block
            if nbytes:
                self._apply(block, nbytes, op, source.caller())
        if self.dead:
            self.settle()
        return block

    def resize(self, block: Block, nbytes: int, op: str) -> None:
        """Count a storage at its new size, and for a moment at both, as long as torch copies.

        Raises:
            torch.OutOfMemoryError: the new size does not fit beside the old one; the block
                keeps its old size.
        """
        with self._lock:
            before = block.nbytes
            if block.kind != UNCOUNTED and nbytes != before:
                self.check_room(nbytes, op)
                where = source.caller()
                for delta in filter(None, (nbytes, -before)):
                    self._apply(block, delta, op, where)
            block.closed = bool(block.name) and not nbytes
        self.settle()

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its new size, whether it is in the books or not.

        Raises:
            torch.OutOfMemoryError: the growth does not fit; nothing is counted.
        """
        block = self.live.get(storage._cdata)
        if block is None:
            self.admit(storage, "resize_")
        else:
            self.resize(block, storage.nbytes(), "resize_")

    def settle(self) -> None:
        """Count the dead, unless somebody is counting: then they do it when they are done.

        A garbage collection can free storages in the middle of `_apply`, on the same thread;
        a death on another thread must not wait for the lock. Hence the queue.
        """
        while self.dead and self._lock.acquire(blocking=False):
            try:
                if self._applying:
                    return
                block = self.dead.popleft()
                self._born_in_forward.pop(block.number, None)
                if block.nbytes:
                    self._apply(block, -block.nbytes, "free", "")
            finally:
                self._lock.release()

    # Kinds.

    def _set_kind(self, block: Block, kind: str) -> None:
        with self._lock:
            self._born_in_forward.pop(block.number, None)
            self._move(self._by_kind, block, kind)
            block.kind = kind
            self._write_kind(block)
        self.settle()

    def count(self, storage: torch.UntypedStorage, kind: str) -> Block:
        """Make sure that a storage is in the books, and of this kind.

        Raises:
            torch.OutOfMemoryError: it was not counted so far and does not fit.
        """
        block = self.live.get(storage._cdata)
        if block is None:
            return self.admit(storage, "set_kind", kind)
        if block.kind != kind:
            was_counted = block.kind != UNCOUNTED
            self._set_kind(block, kind)
            if not was_counted:
                self.resize(block, storage.nbytes(), "set_kind")
        return block

    def _forward_survivors_are_activations(self) -> None:
        """Apply the lifetime rule: born in forward, alive when backward starts."""
        with self._lock:
            survivors, self._born_in_forward = self._born_in_forward, {}
            for block in survivors.values():
                if not self._at_peak and block.number < self._blocks_at_peak:
                    self._move(self._peak_by_kind, block, "activation")
                self._set_kind(block, "activation")

    def _move(self, kinds: dict[str, int], block: Block, kind: str) -> None:
        kinds[block.kind] = kinds.get(block.kind, 0) - block.nbytes
        kinds[kind] = kinds.get(kind, 0) + block.nbytes

    # The one place where bytes are added up.

    def _open(self, storage: torch.UntypedStorage, kind: str) -> Block:
        block = Block(storage, _on_free)
        block.ledger, block.key, block.number = self, storage._cdata, -1
        block.nbytes, block.kind = 0, kind
        self.live[block.key] = block
        if kind != UNCOUNTED:
            self._write_kind(block)
        return block

    def _write_kind(self, block: Block) -> None:
        if block.number == -1:  # uncounted ones get no number: those differ between the worlds
            block.number = self._num_blocks
            self._num_blocks += 1
        if self._timeline is not None:
            self._timeline.set_kind(block.number, block.kind)

    def _apply(self, block: Block, delta: int, op: str, where: str) -> None:
        self._applying = True
        try:
            self._add(block, delta)
            if self._timeline is not None:
                self._timeline.append(
                    perf_counter() - self.began,
                    delta,
                    self.allocated_bytes,
                    block.number,
                    op,
                    self.phase,
                    where,
                )
        finally:
            self._applying = False

    def _add(self, block: Block, delta: int) -> None:
        if delta < 0 and self._at_peak:
            self._peak_by_kind, self._at_peak = dict(self._by_kind), False
        block.nbytes += delta
        self._by_kind[block.kind] = self._by_kind.get(block.kind, 0) + delta
        self.allocated_bytes += delta
        if self.allocated_bytes > self.peak_bytes:
            self.peak_bytes, self._at_peak = self.allocated_bytes, True
            self._blocks_at_peak = self._num_blocks


def _timeline_of(records: Records) -> Timeline:
    """Replace the empty list of events in `records` by a timeline."""
    if isinstance(records.memory, Timeline):
        return records.memory
    if records.memory:
        raise UsageError("records.memory already holds events: give each GPU records of its own")
    records.memory = timeline = Timeline()
    return timeline
