"""Chapter 2: a run of the lockstep world, from the first thread to the last.

Owns the threads. Phases: give every rank a seat and the caller's dice, run rank 0 here and the
others in threads, wait until the last has ended, and return the results or raise what went wrong
first. A timer, if there is a timeout, stops whoever runs then.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import device
from ..errors import PeerError
from . import current, deadlock, rng
from .baton import DRAIN_SECONDS, RUNNING, Baton, RankStopped, take_back
from .lockstep import LockstepGroup, LockstepWorld

STOP_TRIES = 10  # times 0.2 s, then a rank that cannot be stopped is left behind


@dataclass(slots=True)
class Task:
    """What every rank does; the arguments of `comm.run`."""

    fn: Callable[..., Any]
    args: tuple
    gpu_memory: int | str | None
    ledger: bool
    on_report: Callable[[Any], None] | None


def run(task: Task, world_size: int, timeout: float | None) -> list:
    """Run rank 0 here and the others in threads; return or raise how they ended."""
    shared = LockstepWorld(world_size)
    before = rng.capture()
    for seat in shared.baton.seats[1:]:
        seat.random = before
    threads = [
        threading.Thread(target=_rank, args=(task, shared, rank), name=f"rank{rank}", daemon=True)
        for rank in range(1, world_size)
    ]
    with _one_intra_op_thread(), device.paused(), _timer(shared.baton, timeout):
        try:
            for thread in threads:
                thread.start()
            _rank(task, shared, 0)
            _join(threads, shared.baton)
        finally:
            rng.restore(before)
    _raise_first(shared.baton)
    return [seat.result for seat in shared.baton.seats]


def _rank(task: Task, shared: LockstepWorld, rank: int) -> None:
    """Be one rank, from its first turn to its end."""
    baton = shared.baton
    baton.begin(rank)
    group = LockstepGroup(rank, shared)
    group.on_report = task.on_report
    current.set_thread_group(group)
    result, error = None, None
    try:
        result = current.on_virtual_gpu(group, task.fn, task.args, task.gpu_memory, task.ledger)
    except BaseException as raised:
        error = raised
    current.set_thread_group(None)
    _settle(lambda: baton.end(rank, result, _meant(baton, error)), baton, rank)


def _meant(baton: Baton, error: BaseException | None) -> BaseException | None:
    """Replace the exception that stopped a rank by the reason why it was stopped."""
    if isinstance(error, RankStopped):
        return baton.verdict or PeerError("stopped because the run had ended")
    return error


def _settle(finish: Callable[[], None], baton: Baton, rank: int) -> None:
    """Finish a rank even when it is told to stop at this very moment."""
    while True:
        try:
            finish()
            take_back()
            return
        except RankStopped:
            if baton.seats[rank].state in ("returned", "raised"):
                return


def _join(threads: list[threading.Thread], baton: Baton) -> None:
    """Wait for the other ranks; Ctrl-C ends them. One that sits in C code is left behind."""
    try:
        for thread, seat in zip(threads, baton.seats[1:], strict=True):
            while thread.is_alive() and seat.state in RUNNING:
                thread.join(0.2)
            thread.join(DRAIN_SECONDS)
    except BaseException as interrupt:
        baton.interrupted(0, interrupt)
        for thread in threads:
            thread.join(DRAIN_SECONDS)
        raise


def _raise_first(baton: Baton) -> None:
    """Raise the exception that explains the run: out of memory, else the first, else nothing."""
    errors = {r: seat.error for r, seat in enumerate(baton.seats) if seat.error is not None}
    for seat in baton.seats:
        seat.error = None  # an exception keeps its frames, and with them a rank's tensors
    memory = [r for r, error in errors.items() if isinstance(error, torch.OutOfMemoryError)]
    culprit = memory[0] if memory else baton.first_error
    error = errors[culprit] if culprit is not None else baton.verdict
    if error is None:
        return
    if error is not baton.verdict and type(error) is not type(baton.verdict):
        error.add_note(f"raised by rank {culprit}; the ranks then:\n{deadlock.render(baton.scene)}")
    raise error


@contextlib.contextmanager
def _one_intra_op_thread() -> Iterator[None]:
    """Let torch compute with one thread: other counts cut sums differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _timer(baton: Baton, timeout: float | None) -> Iterator[None]:
    """End the run after `timeout` seconds, from a thread that only waits for this."""
    if timeout is None:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(baton, timeout, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(baton: Baton, timeout: float, done: threading.Event) -> None:
    """Wait out the timeout, then stop whoever runs until nobody does."""
    pause, tries = timeout, 0
    while not done.wait(pause):
        pause, tries = 0.2, tries + 1
        baton.expire(timeout)
        if tries % STOP_TRIES == 0:
            baton.abandon()
