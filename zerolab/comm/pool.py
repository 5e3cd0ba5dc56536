"""Chapter 2: the pool: rank processes that stay warm between runs.

Owns the processes, a pipe to each, and the store in which their ranks meet. Starting a Python
that knows torch takes seconds, so a fork server imports it once and forks ranks in hundredths
of a second. A run uses the first `world_size` processes (see `collect`); those that had to be
killed are replaced when they are next needed.
"""

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import RankError, UsageError
from . import worker
from .collect import Run, Seat
from .stores import PrefixStore, TCPStore
from .worker import Job

PRELOAD = ["torch", "torch.distributed", "cloudpickle"]  # not zerolab: edits must be seen


class Pool:
    """The rank processes of this Python."""

    def __init__(self) -> None:
        """Start nothing yet."""
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        self.context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload(PRELOAD)
        self.seats: list[Seat] = []
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
            return self._run(job, timeout, on_report)
        finally:
            self.busy.release()

    def _run(
        self, job: Job, timeout: float | None, on_report: Callable[[Any], None] | None
    ) -> list:
        """Number the run and its group, and collect its results."""
        assert self.store is not None
        self.epoch += 1
        if self.shape != (job.backend, job.world_size):
            self.group += 1
        self.shape = None  # until the run has gone well, its group counts as broken
        job = dataclasses.replace(job, group=self.group, epoch=self.epoch)
        store = PrefixStore(f"zerolab{self.epoch}", self.store)
        seats = self.seats[: job.world_size]
        results = Run(seats, store, job, on_report, self.close).results(timeout)
        self.shape = (job.backend, job.world_size)
        return results

    def _start(self, world_size: int) -> None:
        """Make sure that enough processes are there and alive."""
        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if any(not seat.process.is_alive() for seat in self.seats):
            self.close()
        known = len(self.seats)
        try:
            self.seats += [self._new_seat() for _ in range(world_size - known)]
            for seat in self.seats[known:]:
                _await_ready(seat)
        except BaseException:
            self.close()
            raise

    def _new_seat(self) -> Seat:
        """Start one more process."""
        assert self.store is not None
        handle, noise = tempfile.mkstemp(dir=self.directory.name)
        os.close(handle)
        ours, theirs = self.context.Pipe()
        args = (theirs, self.store.port, noise, dict(os.environ))
        process = self.context.Process(target=worker.main, args=args, daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        return Seat(process, ours, noise)

    def close(self) -> None:
        """End all processes; the next run starts new ones."""
        if os.getpid() != self.owner:
            return  # a fork of this process must not end our ranks
        for seat in self.seats:
            _kill(seat)
        self.seats, self.shape = [], None


def _await_ready(seat: Seat) -> None:
    """Return when a process can work."""
    try:
        while seat.conn.recv()[0] != "ready":
            pass
    except EOFError:
        text = worker.exit_text(seat.noise)
        raise RankError(f"a rank process ended while it started: {text}") from None


def _kill(seat: Seat) -> None:
    """End a process now."""
    seat.process.kill()
    seat.process.join()
    seat.conn.close()


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
