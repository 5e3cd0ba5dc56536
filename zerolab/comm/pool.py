"""Chapter 2: the pool: rank processes that stay warm between runs.

Owns the processes, a pipe to each, and the store in which their ranks meet. Starting a Python
that knows torch takes seconds, so a fork server imports it once and forks ranks in hundredths
of a second. A run sends one job to each of the first `world_size` processes and collects:
output (shown in rank order), reports, and one answer each. Phases when something goes wrong:

    a rank fails     the peers fail at once, because its connections close; who still computes
                     after `GRACE_SECONDS` is killed
    a deadlock       a rank proves it; everybody is asked for its Python stack and killed
    timeout, Ctrl-C  the same, without a proof

Killed processes are replaced when they are next needed.
"""

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from ..errors import DeadlockError, RankError, UsageError
from ..records import RankRow
from . import deadlock, travel, watch, worker
from .stores import PrefixStore, TCPStore
from .worker import Job

GRACE_SECONDS = 2.0
STACK_SECONDS = 0.25  # how long a stuck rank may take to say where it is
PRELOAD = ["torch", "torch.distributed", "cloudpickle"]  # not zerolab: edits must be seen
_ORDER = ("memory", "own", "died", "peer")  # which failure explains a run best


class Rank:
    """One process of the pool, as the pool sees it."""

    def __init__(self, context: Any, port: int, noise: str) -> None:
        """Start the process; it says "ready" when it is."""
        self.noise = noise
        self.conn, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.main, args=(theirs, port, noise, dict(os.environ)), daemon=True
        )
        with _without_main():
            self.process.start()
        theirs.close()

    def await_ready(self) -> None:
        """Return when the process can work."""
        try:
            while self.conn.recv()[0] != "ready":
                pass
        except EOFError:
            text = worker.exit_text(self.noise)
            raise RankError(f"a rank process ended while it started: {text}") from None

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.process.join()
        self.conn.close()


class Pool:
    """The rank processes of this Python."""

    def __init__(self) -> None:
        """Start nothing yet."""
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        self.context = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload(PRELOAD)
        self.ranks: list[Rank] = []
        self.store: TCPStore | None = None
        self.group = 0  # number of the group the ranks are in
        self.shape: tuple[str, int] | None = None  # backend and size of that group
        self.epoch = 0
        self.busy = threading.Lock()
        self.directory = tempfile.TemporaryDirectory(prefix="zerolab-")
        self.owner = os.getpid()

    def run(
        self,
        job: Job,
        timeout: float | None,
        on_report: Callable[[Any], None] | None,
    ) -> list:
        """Run a job on its ranks and return their results."""
        if not self.busy.acquire(blocking=False):
            raise UsageError("run() was called while another run is going on: wait for it")
        try:
            self._start(job.world_size)
            self.epoch += 1
            shape = (job.backend, job.world_size)
            if self.shape != shape:
                self.group, self.shape = self.group + 1, shape
            run = Run(self, job, on_report)
            return run.results(timeout)
        finally:
            self.busy.release()

    def _start(self, world_size: int) -> None:
        """Make sure that enough processes are there and alive."""
        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if any(not rank.process.is_alive() for rank in self.ranks):
            self.close()
        known = len(self.ranks)
        try:
            self.ranks += [self._new_rank() for _ in range(world_size - known)]
            for rank in self.ranks[known:]:
                rank.await_ready()
        except BaseException:
            self.close()
            raise

    def _new_rank(self) -> Rank:
        """Start one more process."""
        assert self.store is not None
        handle, noise = tempfile.mkstemp(dir=self.directory.name)
        os.close(handle)
        return Rank(self.context, self.store.port, noise)

    def spoil(self) -> None:
        """Note that the group is broken: the next run makes a new one."""
        self.shape = None

    def close(self) -> None:
        """End all processes; the next run starts new ones."""
        if os.getpid() != self.owner:
            return  # a fork of this process must not end our ranks
        for rank in self.ranks:
            rank.kill()
        self.ranks, self.shape = [], None


class Run:
    """One run: from sending the job to the last answer."""

    def __init__(self, pool: Pool, job: Job, on_report: Callable[[Any], None] | None) -> None:
        """Send the job to every rank."""
        self.pool, self.on_report = pool, on_report
        self.world_size = job.world_size
        self.ranks = pool.ranks[: job.world_size]
        self.pending = dict(enumerate(self.ranks))
        self.answers: dict[int, bytes] = {}
        self.failures: dict[int, tuple[str, BaseException, str]] = {}  # kind, error, traceback
        self.states: dict[int, watch.State] = {}
        self.output: dict[int, list[tuple[str, str]]] = {rank: [] for rank in self.pending}
        self.proof: tuple[int, watch.States] | None = None  # who can never go on, and why
        self.stacks: dict[int, str] = {}
        self.failed_at: float | None = None
        assert pool.store is not None
        self.store = PrefixStore(f"zerolab{pool.epoch}", pool.store)
        for rank, seat in self.pending.items():
            numbers = {"rank": rank, "group": pool.group, "epoch": pool.epoch}
            with contextlib.suppress(OSError):  # a process that died is found in `_receive`
                seat.conn.send(dataclasses.replace(job, **numbers))

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
            self.pool.spoil()
            raise self._explanation()
        return [travel.unpack(self.answers[rank]) for rank in range(self.world_size)]

    def _interrupted(self, interrupt: BaseException) -> None:
        """Note where the ranks were, and end them; a second Ctrl-C cannot prevent that."""
        self.on_report = None
        try:
            self._ask_stacks()
            interrupt.add_note(self._stack_text())
        finally:
            self.pool.close()

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
        self.pool.close()

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


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's main script while a rank starts: functions travel by value anyway."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__",) if name in main.__dict__}
    spec, main.__spec__ = getattr(main, "__spec__", None), None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
        main.__spec__ = spec


_pools: list[Pool] = []


def the_pool() -> Pool:
    """Return the pool of this process, made when first asked for."""
    if not _pools or _pools[0].owner != os.getpid():
        _pools[:] = [Pool()]
        atexit.register(_pools[0].close)
    return _pools[0]


def close_pool() -> None:
    """End the rank processes that wait for work; the next run starts new ones."""
    for pool in _pools:
        pool.close()
