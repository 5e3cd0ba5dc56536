"""Chapter 2: `run`, which starts the ranks: threads of this process, or processes.

Owns which group the calling thread belongs to (`current`) and the choice of a world. Phases of
a lockstep run: check what was asked, give every rank a seat, run rank 0 here and the others in
threads, wait until the last has ended, and return the results or raise what went wrong first.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import device
from ..errors import PeerError, UsageError
from . import current, deadlock, pool, rng, torchrun, travel, worker
from .baton import DRAIN_SECONDS, RUNNING, Baton, RankStopped, take_back
from .group import Group
from .lockstep import LockstepGroup, LockstepWorld

WORLDS = ("lockstep", "process", "gloo", "nccl")
MAX_RANKS = 64
STOP_TRIES = 10  # times 0.2 s, then a rank that cannot be stopped is left behind


def run(
    fn: Callable[..., Any],
    world_size: int = 4,
    world: str | None = None,
    gpu_memory: int | str | None = None,
    args: tuple = (),
    timeout: float | None = None,
    ledger: bool = True,
    on_report: Callable[[Any], None] | None = None,
) -> list:
    """Run `fn(*args)` on every rank and return the list of results, in rank order.

    Args:
        fn: the same function for all ranks; it finds its rank by `comm.get_rank()`.
        world_size: how many ranks, 1 to 64.
        world: "lockstep" (threads, one runs at a time), "process" (nccl where there are GPUs,
            else gloo), "gloo" or "nccl". None: $ZEROLAB_WORLD, else "lockstep".
        gpu_memory: the capacity of each rank's virtual GPU, bytes or "160MiB"; None: unlimited.
        args: what every rank gets. In the lockstep world these are the same objects.
        timeout: seconds after which the run is ended. None: never.
        ledger: give every rank a virtual GPU that counts its bytes.
        on_report: called in this process with what ranks pass to `comm.report`.

    Raises:
        UsageError: a value that cannot work.
        DeadlockError: no rank could go on; the message is a table of what each one did.
        MismatchError: ranks called different collectives.
        RunTimeoutError: the timeout passed.
        Exception: whatever a rank raised first, itself; out-of-memory errors come before others.
    """
    world = _check(world_size, world, timeout, gpu_memory, ledger)
    inside = current.of_thread()
    if inside is not None:
        raise UsageError(
            f"run() was called by rank {inside.rank} of a run: ranks cannot start ranks; "
            "call it from outside"
        )
    if world == "lockstep":
        job = Job(fn, args, gpu_memory, ledger, on_report)
        return _run_lockstep(job, world_size, timeout)
    call = travel.pack_call(fn, args)
    order = worker.Job(
        rank=-1,
        world_size=world_size,
        backend=_backend(world, world_size),
        group=-1,
        epoch=-1,
        call=call,
        gpu_memory=gpu_memory,
        ledger=ledger,
        random=rng.capture(),
        lines=travel.cell_lines(),
    )
    return pool.the_pool().run(order, timeout, on_report)


class Job:
    """What every rank of a run does."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple,
        gpu_memory: int | str | None,
        ledger: bool,
        on_report: Callable[[Any], None] | None,
    ) -> None:
        """Keep the arguments of `run`."""
        self.fn, self.args = fn, args
        self.gpu_memory, self.ledger, self.on_report = gpu_memory, ledger, on_report

    def call(self, group: Group) -> Any:
        """Run the function as one rank, on a virtual GPU of its own."""
        if not self.ledger:
            return self.fn(*self.args)
        with device.VirtualGPU(self.gpu_memory, index=group.rank, records=group.records):
            return self.fn(*self.args)


def _check(
    world_size: int,
    world: str | None,
    timeout: float | None,
    gpu_memory: int | str | None,
    ledger: bool,
) -> str:
    """Refuse what cannot work; return the world that was meant."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size {world_size!r} is no number of ranks: use 1, 2, 3, ...")
    if world_size > MAX_RANKS:
        raise UsageError(
            f"world_size {world_size} is more than the {MAX_RANKS} ranks one machine runs: "
            "use a dry run for larger worlds"
        )
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout {timeout!r} is no time: use seconds above 0, or None")
    if gpu_memory is not None and not ledger:
        raise UsageError(f"gpu_memory {gpu_memory!r} needs the ledger: leave out ledger=False")
    chosen = world or os.environ.get("ZEROLAB_WORLD") or "lockstep"
    if chosen not in WORLDS:
        raise UsageError(f"world {chosen!r} is unknown: use one of {', '.join(WORLDS)}")
    return chosen


def _backend(world: str, world_size: int) -> str:
    """Choose gloo or nccl; nccl needs one GPU a rank."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world == "nccl" and world_size > gpus:
        raise UsageError(
            f"world_size {world_size} needs as many GPUs in the nccl world, this machine has "
            f"{gpus}: use world='gloo', or fewer ranks"
        )
    if world == "process":
        return torchrun.choose_backend(world_size)
    return world


# ---------------------------------------------------------------- the lockstep world


def _run_lockstep(job: Job, world_size: int, timeout: float | None) -> list:
    """Run rank 0 here and the others in threads; return or raise how they ended."""
    shared = LockstepWorld(world_size)
    before = rng.capture()
    for seat in shared.baton.seats[1:]:
        seat.random = before
    threads = [
        threading.Thread(target=_rank, args=(job, shared, rank), name=f"rank{rank}", daemon=True)
        for rank in range(1, world_size)
    ]
    with _one_intra_op_thread(), device.paused(), _timer(shared.baton, timeout):
        try:
            for thread in threads:
                thread.start()
            _rank(job, shared, 0)
            _join(threads, shared.baton)
        finally:
            rng.restore(before)
    _raise_first(shared.baton)
    return [seat.result for seat in shared.baton.seats]


def _rank(job: Job, shared: LockstepWorld, rank: int) -> None:
    """Be one rank, from its first turn to its end."""
    baton = shared.baton
    baton.begin(rank)
    group = LockstepGroup(rank, shared)
    group.on_report = job.on_report
    current.set_thread_group(group)
    result, error = None, None
    try:
        result = job.call(group)
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
            take_back(threading.get_ident())
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
