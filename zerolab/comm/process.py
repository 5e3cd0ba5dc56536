"""Chapter 2: ranks as processes: every collective as messages on gloo.

Owns torch.distributed's default group, the scratch of running calls and the works that nobody
has waited for yet. Why not gloo's collectives? Its reduce-scatter is an all-reduce in disguise,
which moves twice the bytes and adds in an order that depends on the position in the buffer, and
a mismatch between ranks ends the process or mixes up bytes. With messages

    reduce_scatter  every rank sends slice r to rank r, and r adds what it got in rank order
    all_gather      every rank sends its slice to every other
    all_reduce      the two after each other; for 2 ranks, or few elements, everybody sends all
                    (2 ranks in the middle of a `Pattern`: gloo's own, which then is right too)

so that each of the first two moves (N-1)/N of the full tensor, straight between the tensors of
the callers, and gives the bits of the lockstep world at every world size. The tag of a message
holds the number of its call and a checksum of what is called: ranks may wait for their works in
any order, and ranks that call different things never exchange a byte (`watch` says so).
"""

import contextlib
import ctypes
import itertools
import platform
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import device
from ..errors import RankError
from . import reduction
from .group import Call, Group, Work
from .pattern import Pattern
from .scratch import Scratch
from .stores import PrefixStore, Store

if TYPE_CHECKING:
    from .watch import Watcher

SMALL_NUMEL = 4096  # below this one round of more bytes is faster than two
EXACT = (torch.float32, torch.float64)  # gloo rounds a 16-bit sum before we divide it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEEP_BLOCK_BYTES = 2**25  # glibc's own upper bound
KEEP_FREED_BYTES = 2**28
HISTORY = 64  # calls remembered for the table of a deadlock
_SCATTER, _GATHER, _MESSAGE = 0, 1, 2  # what a message is part of
Bounds = list[tuple[int, int]]
Messages = list[tuple[int, Tensor]]  # partner and what travels
Finish = Callable[[], "list | None"]


def slice_bounds(numel: int, world_size: int) -> Bounds:
    """Cut [0, numel) into one slice a rank, equal but for the last ones; some may be empty."""
    width = -(-numel // world_size)
    cuts = [min(rank * width, numel) for rank in range(world_size + 1)]
    return list(itertools.pairwise(cuts))


class ProcessWork(Work):
    """A call on its way: what to wait for, and what to do then.

    `finish` may start a second round; it returns the works of that, or None when all is done.
    """

    __slots__ = ("_call", "_finish", "_group", "_handles")

    def __init__(
        self, group: "ProcessGroup", call: Call, handles: list, finish: Finish | None = None
    ) -> None:
        """Hold everything that the transfer needs until `wait`."""
        self._group = group
        self._call: Call | None = call
        self._handles: list | None = handles
        self._finish = finish
        group.unfinished.add(self)

    def wait(self) -> None:
        """Wait for the transfers, then add what has to be added here."""
        call, handles = self._call, self._handles
        if call is None:
            return
        with _unseen():
            while handles is not None:
                self._group.await_handles(handles, call)
                handles = self._finish() if self._finish is not None else None
        self._call = self._handles = self._finish = None  # lets go of the tensors
        self._group.unfinished.discard(self)


class ProcessGroup(Group):
    """One process's view of torch.distributed's default group, on gloo."""

    world = "gloo"
    host_waits = True  # a rank that waits makes no other call meanwhile

    def __init__(self, pg: dist.ProcessGroup, store: Store, epoch: int = 0) -> None:
        """Use a group that exists.

        Args:
            pg: the group of all ranks.
            store: where the ranks write what they wait for, when they wait for long.
            epoch: number of the run, so that runs that share a group do not mix.
        """
        super().__init__(pg.rank(), pg.size())
        self.pg = pg
        self.store = PrefixStore(f"zerolab{epoch}", store)
        self.main_thread = threading.get_ident()
        self.waiting: tuple[Call, float] | None = None  # what this rank is blocked in
        self.calls: deque[Call] = deque(maxlen=HISTORY)  # its latest calls
        self.unfinished: set[ProcessWork] = set()
        self.watcher: Watcher | None = None
        self._epoch = epoch
        self._scratch = Scratch()
        self._pattern = Pattern()
        self._comparison: tuple[ProcessWork, Tensor, Tensor] | None = None
        self._expected = False  # all ranks are known to make the call that is being launched
        _keep_freed_memory()

    @property
    def launched(self) -> int:
        """How many collectives this rank has made, finished or not."""
        return self._seq

    def _launch(self, call: Call, asynchronous: bool) -> Work:
        """Start the transfers; never waits."""
        self.calls.append(call.without_tensors())
        try:
            with _unseen():
                self._expected = self._expects(call)
                return getattr(self, f"_{call.op}")(call)
        except RuntimeError as error:  # the peer may have gone before the call began
            raise self._explained(error, call) from None

    def note(self, call: Call, asynchronous: bool) -> None:
        """Remember the call for the table of a deadlock."""
        self.calls.append(call.without_tensors())

    def release_scratch(self) -> None:
        """Let go of the memory that ended calls used."""
        self._scratch.release()

    def end_step(self) -> None:
        """Start comparing the calls of this step with the other rank's, if they are new."""
        if self.world_size != 2:
            return
        with _unseen():
            self._hear_comparison()
            if self._pattern.repeated:
                self._pattern.end_step(alike=True)
                return
            mine = torch.tensor([self._pattern.digest()])
            theirs = torch.empty_like(mine)
            call = Call("all_gather", self._number(), mine, theirs, elements=2, dtype="int64")
            call.label, call.since = "end of step", time.perf_counter()
            self.note(call, asynchronous=True)
            partner = 1 - self.rank
            handles = self._exchange(call, [(partner, mine)], [(partner, theirs)])
            self._comparison = (ProcessWork(self, call, handles), mine, theirs)

    def _hear_comparison(self) -> None:
        """Learn whether the last step was the same on both ranks, if that is not known yet."""
        if self._comparison is not None:
            work, mine, theirs = self._comparison
            self._comparison = None
            work.wait()
            self._pattern.end_step(alike=torch.equal(mine, theirs))

    def _expects(self, call: Call) -> bool:
        """Tell whether the ranks have agreed on this call."""
        if self.world_size != 2 or call.op in ("send", "recv"):
            return False
        self._hear_comparison()
        return self._pattern.expects(_checksum(call.signature()))

    def blocked(self) -> tuple[Call, float] | None:
        """Return the call that this rank cannot get past, and since when."""
        return self.waiting

    def await_handles(self, handles: list, call: Call) -> None:
        """Wait for transfers; a failure is explained by what the peers say of themselves.

        Whoever watches reads `waiting` from another thread, and may hold it longer than the wait
        lasts: it has no tensors, or their memory would live as long.
        """
        self.waiting = (call.without_tensors(), time.perf_counter())
        try:
            for handle in handles:
                handle.wait()
        except RuntimeError as error:
            raise self._explained(error, call) from None
        finally:
            self.waiting = None

    def _explained(self, error: RuntimeError, call: Call) -> RuntimeError:
        """Return what really happened, when an error of gloo is all that is known of it."""
        known = isinstance(error, (RankError, torch.OutOfMemoryError))
        return error if known or self.watcher is None else self.watcher.explain(error, call)

    # ------------------------------------------------------------ messages

    def _tag(self, call: Call, round_: int) -> int:
        """Name the messages of one round: 31 bits of run, number, checksum of the call."""
        checksum = _checksum(call.signature()) & 0x7FF
        return (self._epoch & 31) << 26 | (call.seq & 0x1FFF) << 13 | checksum << 2 | round_

    def _exchange(self, call: Call, sends: Messages, receives: Messages, round_: int = 0) -> list:
        """Start all messages of one round, receives first so that nothing is buffered."""
        pg, tag = self.pg, self._tag(call, round_)
        handles = [pg.recv([tensor], src, tag) for src, tensor in receives if tensor.numel()]
        handles += [pg.send([tensor], dst, tag) for dst, tensor in sends if tensor.numel()]
        return handles

    def _others(self) -> list[int]:
        """Return the other ranks, each rank starting with its right neighbour."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _equal_bounds(self, numel: int) -> Bounds:
        """Cut world_size * numel elements into slices of `numel`."""
        return [(rank * numel, (rank + 1) * numel) for rank in range(self.world_size)]

    # ------------------------------------------------------------ collectives that add

    def _reduce_scatter(self, call: Call) -> Work:
        """Send every rank its slice, add the slices that come in."""
        flat, out = flat_view(call.tensor), flat_view(call.output)
        slices = [flat[a:b] for a, b in self._equal_bounds(out.numel())]
        return ProcessWork(self, call, *self._reduce_round(call, slices, out))

    def _all_reduce(self, call: Call) -> Work:
        """Exchange everything when that is little, else reduce slices and gather them."""
        flat = flat_view(call.tensor)
        if self._expected and flat.dtype in EXACT and flat.numel() >= SMALL_NUMEL:
            return self._two_rank_all_reduce(call, flat)
        if self.world_size <= 2 or flat.numel() < SMALL_NUMEL:
            slices = [flat] * self.world_size
            return ProcessWork(self, call, *self._reduce_round(call, slices, flat))
        bounds = slice_bounds(flat.numel(), self.world_size)
        slices = [flat[a:b] for a, b in bounds]
        handles, add = self._reduce_round(call, slices, slices[self.rank])
        gathering = False

        def finish() -> list | None:
            nonlocal gathering
            if gathering:
                return None
            gathering = True
            add()
            return self._gather_round(call, flat, bounds)

        return ProcessWork(self, call, handles, finish)

    def _two_rank_all_reduce(self, call: Call, flat: Tensor) -> Work:
        """Let gloo do it: a sum of two has one order, and it runs on while backward computes."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(
            dist.ReduceOp.MAX if call.reduction == "max" else dist.ReduceOp.SUM
        )
        handles = [self.pg.allreduce([flat], options)]
        divisor = self.world_size if call.reduction == "avg" else 1
        return ProcessWork(self, call, handles, lambda: reduction.divide(flat, divisor))

    def _reduce_round(
        self, call: Call, slices: list[Tensor], out: Tensor
    ) -> tuple[list, Callable[[], None]]:
        """Send slice r to rank r and receive the own one from all; returns the sum to do then."""
        rows = [
            slices[rank] if rank == self.rank else self._scratch.take(out)
            for rank in range(self.world_size)
        ]
        sends = [(rank, slices[rank]) for rank in self._others()]
        receives = [(rank, rows[rank]) for rank in self._others()]
        handles = self._exchange(call, sends, receives, _SCATTER)

        def add() -> None:
            reduction.reduce_rows(rows, call.reduction, out)
            for _, row in receives:
                self._scratch.give(row)

        return handles, add

    # ------------------------------------------------------------ collectives that copy

    def _all_gather(self, call: Call) -> Work:
        """Send the own slice to every rank, receive theirs in place."""
        shard, full = flat_view(call.tensor), flat_view(call.output)
        numel = shard.numel()
        own = full[self.rank * numel : (self.rank + 1) * numel]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return ProcessWork(self, call, self._gather_round(call, full, self._equal_bounds(numel)))

    def _gather_round(self, call: Call, full: Tensor, bounds: Bounds) -> list:
        """Start a gather, on its own or as the second round of a reduction."""
        slices = [full[a:b] for a, b in bounds]
        sends = [(rank, slices[self.rank]) for rank in self._others()]
        receives = [(rank, slices[rank]) for rank in self._others()]
        return self._exchange(call, sends, receives, _GATHER)

    def _broadcast(self, call: Call) -> Work:
        """Send from the source to everyone."""
        if self.rank == call.peer:
            sends = [(rank, flat_view(call.tensor)) for rank in self._others()]
            return ProcessWork(self, call, self._exchange(call, sends, []))
        receives = [(call.peer, flat_view(call.output))]
        return ProcessWork(self, call, self._exchange(call, [], receives))

    def _barrier(self, call: Call) -> Work:
        """Exchange one byte with everyone: it arrives when they have come."""
        sends = [(rank, torch.zeros(1, dtype=torch.uint8)) for rank in self._others()]
        receives = [(rank, torch.empty(1, dtype=torch.uint8)) for rank in self._others()]
        return ProcessWork(self, call, self._exchange(call, sends, receives))

    def _send(self, call: Call) -> Work:
        """One message of the user."""
        sends = [(call.peer, flat_view(call.tensor))]
        return ProcessWork(self, call, self._exchange(call, sends, [], _MESSAGE))

    def _recv(self, call: Call) -> Work:
        """The other end of `_send`."""
        receives = [(call.peer, flat_view(call.output))]
        return ProcessWork(self, call, self._exchange(call, [], receives, _MESSAGE))


def _keep_freed_memory() -> None:
    """Teach the C library to keep the memory of a bucket that was freed for the next one.

    glibc gives large blocks back to the system at once, and each one that follows costs a page
    fault for every 4 KiB, a tenth of a training step. Elsewhere there is nothing to teach.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BLOCK_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_FREED_BYTES)


_checksums: dict[tuple, int] = {}


def _checksum(signature: tuple) -> int:
    """Return 32 bits that every process computes alike (Python's own hash differs)."""
    known = _checksums.get(signature)
    if known is None:
        known = _checksums[signature] = zlib.crc32(repr(signature).encode())
    return known


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """Keep the parts of a collective from the virtual GPU: scratch is not the user's memory."""
    return _NOTHING if device.current() is None else torch._C._DisableTorchDispatch()


def flat_view(tensor: Tensor | None) -> Tensor:
    """View a contiguous tensor as [numel], out of autograd's sight."""
    assert tensor is not None
    return tensor.detach().view(-1)
