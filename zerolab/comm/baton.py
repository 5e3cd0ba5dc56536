"""Chapter 2: the baton: of all rank threads exactly one runs, and it says who is next.

Owns one `Seat` a rank (what it is doing, its lock, its random numbers) and the verdict once a
run has failed. The phases of a run, as a rank sees them:

    begin   wait for the baton for the first time
    wait    hand the baton to the next rank that can go on; return when it comes back
    end     say how the rank ended (result or exception) and hand the baton on for good

Because a rank gives the baton away only when it must wait, a run is deterministic, and "no rank
can go on" is known at once instead of after a timeout. Rank 0 runs in the thread that started
the run, so that `breakpoint()` and Ctrl-C behave as if there were no threads at all.
"""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DeadlockError, MismatchError, PeerError, RankError
from ..records import RankRow
from . import deadlock, rng, source
from .group import Call

RUNNING = ("computing", "waiting")
DRAIN_SECONDS = 2.0


class RankStopped(BaseException):
    """Thrown into a rank that computes when its run is over; no `except Exception` sees it."""


def _closed_gate() -> threading.Lock:
    """Return a lock that is taken: releasing it lets the rank that waits for it go on.

    A bare lock, because waiting for one is a single step that Ctrl-C interrupts cleanly.
    """
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(slots=True)
class Seat:
    """What the run knows of one rank."""

    state: str = "computing"  # then "waiting", and at the end "returned" or "raised"
    since: float = 0.0
    call: Call | None = None  # the collective it waits in, or called last
    ready: Callable[[], bool] | None = None  # while waiting: may it go on?
    error: BaseException | None = None
    result: Any = None
    thread: int = 0
    elsewhere: float = 0.0  # seconds in which it waited for its turn
    random: rng.State | None = None
    turn: threading.Lock = field(default_factory=_closed_gate)


class Baton:
    """Whose turn it is, and the verdict when nobody's can come."""

    def __init__(self, world_size: int) -> None:
        """Rank 0 holds the baton first."""
        now = time.perf_counter()
        self.seats = [Seat(since=now) for _ in range(world_size)]
        self.holder = 0
        self.verdict: RankError | None = None  # set once, when the run as such has failed
        self.first_error: int | None = None  # the rank whose exception came first
        self.scene: list[RankRow] = []  # what all ranks did at that moment

    # ------------------------------------------------------------ what ranks call

    def begin(self, rank: int) -> None:
        """Wait for the first turn of a rank thread."""
        seat = self.seats[rank]
        if rank:
            seat.turn.acquire()
        seat.thread = threading.get_ident()
        if seat.random is not None:
            rng.restore(seat.random)

    def enter(self, rank: int, call: Call) -> None:
        """Note the call that a rank makes now; refuse it when the run has already failed."""
        if self._failed():
            raise self.peer_error(rank)
        self.seats[rank].call = call

    def wait(self, rank: int, call: Call, ready: Callable[[], bool]) -> None:
        """Return when `ready()`; until then the other ranks run."""
        if ready():
            return
        if self._failed():
            raise self.peer_error(rank)
        seat = self.seats[rank]
        seat.state, seat.call, seat.ready = "waiting", call, ready
        seat.since = time.perf_counter()
        try:
            self._hand_on(rank)
        except BaseException as interrupt:  # Ctrl-C came while another rank was running
            seat.state = "computing"
            self.interrupted(rank, interrupt)
            raise
        seat.state, seat.ready, seat.since = "computing", None, time.perf_counter()
        if not ready():
            raise self.peer_error(rank)

    def end(self, rank: int, result: Any, error: BaseException | None) -> None:
        """Note how a rank ended and let the others go on."""
        seat = self.seats[rank]
        seat.since = time.perf_counter()
        seat.error, seat.result = error, result
        seat.state = "returned" if error is None else "raised"
        if error is not None and self.first_error is None:
            self.first_error, self.scene = rank, self.rows()
        if self.holder == rank:
            successor = self._next(rank)
            if successor is not None:
                self._give(successor)

    # ------------------------------------------------------------ who is next

    def _hand_on(self, rank: int) -> None:
        """Give the baton to the next rank that can go on, and wait for its return."""
        successor = self._next(rank)
        if successor == rank:
            return
        seat = self.seats[rank]
        seat.random = rng.capture()
        assert successor is not None  # this rank waits, so somebody is left
        self._give(successor)
        gave_away = time.perf_counter()
        seat.turn.acquire()
        seat.elsewhere += time.perf_counter() - gave_away
        rng.restore(seat.random)

    def _give(self, successor: int) -> None:
        """Let another rank run."""
        self.holder = successor
        self.seats[successor].turn.release()

    def _next(self, rank: int) -> int | None:
        """Choose who runs next, in rank order after `rank`; nobody able to is a deadlock."""
        world_size = len(self.seats)
        order = [(rank + step) % world_size for step in range(1, world_size + 1)]
        for other in order:
            if self._can_go_on(self.seats[other]):
                return other
        waiting = [other for other in order if self.seats[other].state == "waiting"]
        if not waiting:
            return None
        if not self._failed():
            self.verdict = self._deadlock()
        return waiting[0]

    def _can_go_on(self, seat: Seat) -> bool:
        """A rank can go on unless it has ended or waits for something that is not there."""
        if seat.state == "waiting":
            return seat.ready is not None and seat.ready()
        return seat.state == "computing"

    # ------------------------------------------------------------ how a run fails

    def _failed(self) -> bool:
        """Tell whether the run can no longer succeed."""
        return self.verdict is not None or self.first_error is not None

    def _deadlock(self) -> RankError:
        """Build the error of a run in which no rank can go on."""
        rows = self.rows()
        if any(row.state == "waiting" for row in rows) and _calls_differ(rows):
            calls = tuple(row for row in rows if row.state == "waiting")
            return MismatchError(deadlock.mismatch_text(rows), tuple(rows), calls)
        text = f"deadlock: {deadlock.explain(rows)}\n{deadlock.render(rows)}"
        return DeadlockError(text, tuple(rows))

    def mismatch(self, rank: int, calls: Mapping[int, Call]) -> RankError:
        """Return the error for a rank whose call does not match; `calls` has those of one slot."""
        seat = self.seats[rank]
        seat.state, seat.since = "waiting", time.perf_counter()
        rows = self.rows()
        seat.state = "computing"
        called = {each: call.describe() for each, call in calls.items()}
        text, pair = deadlock.mismatch_text(rows, called), _called(calls)
        self.verdict = MismatchError(text, tuple(rows), pair)
        return self.verdict

    def peer_error(self, rank: int) -> RankError:
        """Return what a rank raises whose run has failed elsewhere."""
        if self.verdict is not None:
            return type(self.verdict)(str(self.verdict), *_table_of(self.verdict))
        culprit = self.first_error
        assert culprit is not None
        error = self.seats[culprit].error
        call = self.seats[rank].call
        where = f" while rank {rank} was in {call.describe()}" if call is not None else ""
        return PeerError(f"rank {culprit} raised {type(error).__name__}: {error}{where}")

    def rows(self) -> list[RankRow]:
        """Say what every rank is doing now."""
        return [self._row(rank) for rank in range(len(self.seats))]

    def _row(self, rank: int) -> RankRow:
        """Build one row of the table."""
        seat, call = self.seats[rank], self.seats[rank].call
        where = call.where if call is not None else ""
        if seat.state == "computing":
            where = self._line_of(seat) or where
        detail = call.describe() if call is not None and seat.state in RUNNING else ""
        if seat.error is not None:
            detail = deadlock.first_line(seat.error)
            where = source.raised_at(seat.error) or where
        op, seq = (call.op, call.seq) if call is not None else ("", -1)
        seconds = time.perf_counter() - seat.since
        return deadlock.row(rank, seat.state, op, seq, detail, seconds, where)

    def _line_of(self, seat: Seat) -> str:
        """Return the user's "file:line" that a computing rank executes."""
        frame = sys._current_frames().get(seat.thread)
        return source.caller(frame) if frame is not None else ""

    # ------------------------------------------------------------ stopping ranks

    def expire(self, timeout: float) -> None:
        """End a run that took too long: called by the run's timer, from a thread of its own."""
        if self.verdict is None:
            rows = self.rows()
            busy = [row.rank for row in rows if row.state == "computing"] or [self.holder]
            who = deadlock.ranks_text([rank for rank in busy if rank == self.holder] or busy)
            line = rows[self.holder].where
            text = f"timeout: after {timeout:g} s {who} was still computing, at {line}"
            self.verdict = deadlock.RunTimeoutError(f"{text}\n{deadlock.render(rows)}", tuple(rows))
        self.stop(self.holder)

    def stop(self, rank: int) -> None:
        """Throw `RankStopped` into a rank that computes."""
        seat = self.seats[rank]
        if seat.state == "computing" and seat.thread:
            _throw(seat.thread, RankStopped)

    def interrupted(self, rank: int, interrupt: BaseException) -> None:
        """After Ctrl-C in rank `rank`: end the rank that runs, then all others, one by one."""
        if self.first_error is None:
            self.seats[rank].error = interrupt
            self.first_error, self.scene = rank, self.rows()
        if self.holder == rank and self.seats[rank].state == "computing":
            return
        self.seats[rank].state = "raised"
        deadline = time.perf_counter() + DRAIN_SECONDS
        while self.busy_threads() and time.perf_counter() < deadline:
            self.stop(self.holder)
            time.sleep(0.01)
        self.holder = rank

    def abandon(self) -> None:
        """Go on without the rank that runs: it sits in C code, where nothing can be thrown."""
        if self.holder and self.seats[self.holder].state == "computing":
            self.end(self.holder, None, self.verdict)

    def busy_threads(self) -> list[int]:
        """Return the ranks that have not ended, rank 0 aside."""
        return [r for r, seat in enumerate(self.seats) if r and seat.state in RUNNING]


def _throw(thread: int, exception: type[BaseException]) -> None:
    """Raise an exception in another thread at its next Python instruction."""
    target = ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


def take_back() -> None:
    """Catch a `RankStopped` that was thrown into this thread but not raised yet.

    Python could also be told to forget it, but then 3.11 looks for it for ever in a thread that
    a debugger or a profiler traces.
    """
    with contextlib.suppress(RankStopped):
        for _ in range(10):  # the end of a round is where Python raises what was thrown
            pass


def _table_of(error: RankError) -> tuple:
    """Return the constructor arguments of an error beyond its message."""
    extra = (getattr(error, name) for name in ("table", "calls") if hasattr(error, name))
    return tuple(extra)


def _called(calls: Mapping[int, Call]) -> tuple[RankRow, ...]:
    """Return the calls of one slot as rows."""
    return tuple(
        deadlock.row(rank, "waiting", call.op, call.seq, call.describe(), 0.0, call.where)
        for rank, call in sorted(calls.items())
    )


def _calls_differ(rows: list[RankRow]) -> bool:
    """Tell whether ranks sit in different calls of one number."""
    waiting = {(row.seq, row.op) for row in rows if row.state == "waiting"}
    numbers = [seq for seq, op in waiting if op not in ("send", "recv")]
    return len(numbers) > len(set(numbers))
