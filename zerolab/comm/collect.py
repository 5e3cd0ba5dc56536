"""Chapter 2: one run of rank processes: send the job, collect what comes back.

Owns the answers, failures and output of this run. Messages from the ranks are handled by the
method named after their kind: output (shown in rank order), reports, one answer a rank. When
something goes wrong:

    a rank fails     the peers fail at once, because its connections close; who still computes
                     after `GRACE_SECONDS` is killed
    a deadlock       a rank proves it; everybody is asked for its Python stack and killed
    timeout, Ctrl-C  the same, without a proof
"""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import DeadlockError, RankError
from ..records import RankRow
from . import deadlock, travel, watch, worker
from .stores import Store
from .worker import Job

_ORDER = ("memory", "own", "died", "peer")  # which failure explains a run best
GRACE_SECONDS = 2.0
STACK_SECONDS = 0.25  # how long a stuck rank may take to say where it is


@dataclasses.dataclass(slots=True)
class Seat:
    """One rank process, as its pool sees it."""

    process: BaseProcess
    conn: connection.Connection
    noise: str  # the file with what its C++ code printed


class Run:
    """One run: from sending the job to the last answer."""

    def __init__(
        self,
        seats: Sequence[Seat],
        store: Store,
        job: Job,
        on_report: Callable[[Any], None] | None,
        end_processes: Callable[[], None],
    ) -> None:
        """Send the job to every rank.

        Args:
            seats: one process a rank.
            store: where the ranks of this run meet.
            job: the same for all but for the rank.
            on_report: what to do with a report.
            end_processes: kills the processes; called when some will never answer.
        """
        self.on_report, self.end_processes, self.store = on_report, end_processes, store
        self.world_size = job.world_size
        self.pending = dict(enumerate(seats))
        self.answers: dict[int, bytes] = {}
        self.failures: dict[int, tuple[str, BaseException, str]] = {}  # kind, error, traceback
        self.states: dict[int, watch.State] = {}
        self.output: dict[int, list[tuple[str, str]]] = {rank: [] for rank in self.pending}
        self.proof: tuple[int, watch.States] | None = None  # who can never go on, and why
        self.stacks: dict[int, str] = {}
        self.failed_at: float | None = None
        for rank, seat in self.pending.items():
            with contextlib.suppress(OSError):  # a process that died is found in `_receive`
                seat.conn.send(dataclasses.replace(job, rank=rank))

    def results(self, timeout: float | None) -> list:
        """Collect all answers; return the results or raise what explains the run."""
        deadline = float("inf") if timeout is None else time.perf_counter() + timeout
        try:
            self._collect(deadline)
            if self.pending:
                self._give_up(timeout)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise
        finally:
            self._print()
        if self.failures:
            raise self._explanation()
        return [travel.unpack(self.answers[rank]) for rank in range(self.world_size)]

    def _interrupted(self, interrupt: BaseException) -> None:
        """Note where the ranks were, and end them; a second Ctrl-C cannot prevent that."""
        self.on_report = None
        try:
            self._ask_stacks()
            interrupt.add_note(self._stack_text())
        finally:
            self.end_processes()

    # ------------------------------------------------------------ receiving

    def _collect(self, deadline: float) -> None:
        """Receive messages until every rank has answered or there is no point in waiting."""
        while self.pending and (self.proof is None or self.failures):
            limit = deadline
            if self.failed_at is not None:
                limit = min(deadline, self.failed_at + GRACE_SECONDS)
            left = limit - time.perf_counter()
            if left <= 0:
                return
            self._receive(min(left, 1.0))

    def _receive(self, seconds: float) -> None:
        """Wait for messages and take each of them."""
        by_conn = {seat.conn: rank for rank, seat in self.pending.items()}
        for conn in connection.wait(list(by_conn), seconds):
            rank = by_conn[conn]  # type: ignore[index]  # only connections were waited for
            try:
                kind, *facts = self.pending[rank].conn.recv()
            except (EOFError, OSError):
                self._died(rank)
                continue
            getattr(self, f"_on_{kind}")(rank, *facts)

    def _on_out(self, rank: int, name: str, text: str) -> None:
        """Keep output; that of the lowest rank still running can be shown at once."""
        self.output[rank].append((name, text))
        if rank == 0:
            self._print_rank(0)

    def _on_report(self, rank: int, data: bytes) -> None:
        """Hand a report to the caller."""
        if self.on_report is not None:
            self.on_report(travel.unpack(data))

    def _on_ok(self, rank: int, data: bytes) -> None:
        """A rank returned."""
        self.answers[rank] = data
        del self.pending[rank]

    def _on_error(self, rank: int, kind: str, data: bytes, state: watch.State) -> None:
        """A rank raised."""
        self.failures[rank] = (kind, *travel.unpack_error(data))
        self.states[rank] = state
        self._gone(rank)

    def _on_deadlock(self, rank: int, states: watch.States) -> None:
        """A rank has proven that it can never go on."""
        self.proof = self.proof or (rank, states)

    def _on_where(self, rank: int, state: watch.State, stack: str) -> None:
        """A rank said where it is."""
        self.states[rank], self.stacks[rank] = state, stack

    def _died(self, rank: int) -> None:
        """A process ended without an answer."""
        process = self.pending[rank].process
        process.join(1.0)
        text = worker.exit_text(self.pending[rank].noise)
        why = _exit_words(process.exitcode)
        error = RankError(f"the process of rank {rank} died: {why}" + (f"\n{text}" if text else ""))
        self.failures[rank] = ("died", error, "")
        self.states[rank] = {**watch.silent_state(), "state": "died", "detail": why}
        watch.tell_for(self.store, rank, "died", why)
        self._gone(rank)

    def _gone(self, rank: int) -> None:
        """A rank failed: from now on the others have `GRACE_SECONDS`."""
        del self.pending[rank]
        if self.failed_at is None:
            self.failed_at = time.perf_counter()

    # ------------------------------------------------------------ ending

    def _give_up(self, timeout: float | None) -> None:
        """Ranks are left that will not answer: ask where they are, say so, and end them."""
        self._ask_stacks()
        if not self.failures:
            error = self._deadlock() or self._timed_out(timeout)
            error.add_note(self._stack_text())
            self.failures[min(self.pending)] = ("own", error, "")
        self.end_processes()

    def _deadlock(self) -> DeadlockError | None:
        """Build the error from a rank's proof, if one sent any."""
        if self.proof is None:
            return None
        rank, states = self.proof
        silent = [other for other, state in states.items() if not state["beat"]]
        states.update({other: self.states[other] for other in silent if other in self.states})
        return watch.error_of(rank, states)

    def _timed_out(self, timeout: float | None) -> deadlock.RunTimeoutError:
        """Build the error of a run that took too long."""
        rows = self._rows()
        busy = [row for row in rows if row.state == "computing"]
        busy = busy or [row for row in rows if row.rank in self.pending]
        who = deadlock.ranks_text([row.rank for row in busy])
        lines = ", ".join(row.where or "an unknown line" for row in busy)
        text = f"timeout: after {timeout:g} s {who} was still {busy[0].state}, at {lines}"
        return deadlock.RunTimeoutError(f"{text}\n{deadlock.render(rows)}", tuple(rows))

    def _ask_stacks(self) -> None:
        """Ask every rank that has not answered where it is."""
        for seat in self.pending.values():
            with contextlib.suppress(OSError):
                seat.conn.send("where")
        deadline = time.perf_counter() + STACK_SECONDS
        while not set(self.pending) <= set(self.stacks) and time.perf_counter() < deadline:
            self._receive(deadline - time.perf_counter())

    def _rows(self) -> list[RankRow]:
        """Say what every rank is doing, as far as is known."""
        rows = []
        for rank in range(self.world_size):
            state = self.states.get(rank, watch.silent_state())
            if rank in self.answers:
                state = {**state, "state": "returned"}
            rows.append(watch.row(rank, state))
        return rows

    def _explanation(self) -> BaseException:
        """Choose the exception that explains the run, and note what the others did."""
        culprit = min(self.failures, key=self._importance)
        _, error, trace = self.failures[culprit]
        if isinstance(error, (DeadlockError, deadlock.RunTimeoutError)):
            return error  # its table says everything
        if trace:
            error.add_note(f"in the process of rank {culprit}:\n{trace.rstrip()}")
        error.add_note(f"raised by rank {culprit}; the ranks:\n{deadlock.render(self._rows())}")
        return error

    def _importance(self, rank: int) -> int:
        """Order failures: out of memory, then the first that was no consequence of another."""
        arrival = list(self.failures).index(rank)
        return _ORDER.index(self.failures[rank][0]) * self.world_size + arrival

    def _stack_text(self) -> str:
        """Show where the ranks were, innermost line last."""
        parts = [f"stack of rank {rank}:\n{text.rstrip()}" for rank, text in self.stacks.items()]
        return "\n".join(parts) or "no rank said where it was"

    def _print(self) -> None:
        """Show the output of all ranks, in rank order."""
        for rank in range(self.world_size):
            self._print_rank(rank)

    def _print_rank(self, rank: int) -> None:
        """Show the output of one rank, each line with its number."""
        for name, text in self.output[rank]:
            for line in text.splitlines():
                print(f"[rank {rank}] {line}", file=getattr(sys, name))
        self.output[rank].clear()


def _exit_words(code: int | None) -> str:
    """Say how a process ended."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
