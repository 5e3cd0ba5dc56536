"""Chapter 2: a rank process: it waits for work, does it as one rank, and waits again.

Owns the process's end of the pipe to its pool, and the torch.distributed group between runs.
Two threads: the main one runs the user's function; the other one reads the pipe, so that a rank
that is stuck can still be asked where, and ends the process when the pool is gone. Phases of a
job: join the group (made anew only when the last run failed or had other ranks), run the
function, say farewell, send the result. A rank that fails leaves the group first: that closes
its connections, and the peers that wait for it fail at once instead of waiting.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import queue
import signal
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError
from . import current, deadlock, rng, source, travel, watch
from .process import ProcessGroup
from .stores import PrefixStore, Store, TCPStore

FOREVER = timedelta(days=30)  # our watchdog ends waits, not a timeout of gloo's


@dataclass(slots=True)
class Job:
    """What one rank process is told to do."""

    rank: int
    world_size: int
    backend: str
    group: int  # number of the torch.distributed group; a new number means a new group
    epoch: int  # number of the run
    call: bytes  # of the function and its arguments
    luggage: list[bytes]  # of what is entered around the function
    gpu_memory: int | str | None
    ledger: bool
    random: rng.State
    lines: dict[str, list[str]]


class Pipe:
    """This end of the pipe; several threads write to it."""

    def __init__(self, conn: connection.Connection) -> None:
        """Own the connection."""
        self.conn = conn
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Send one message: its kind, then what belongs to it."""
        with self._lock, contextlib.suppress(OSError):
            self.conn.send(message)


class Printer(io.TextIOBase):
    """A stdout or stderr that sends whole lines to the pool."""

    def __init__(self, pipe: Pipe, name: str) -> None:
        """Send under the name "stdout" or "stderr"."""
        self._pipe, self._name, self._line = pipe, name, ""

    def writable(self) -> bool:
        """Print may use it."""
        return True

    def write(self, text: str, /) -> int:
        """Send the lines that are complete, keep the rest."""
        whole, newline, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if newline:
            self._pipe.send("out", self._name, whole + newline)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: lines go at once."""

    def finish(self) -> None:
        """Send a last line without an end."""
        if self._line:
            self._pipe.send("out", self._name, self._line + "\n")
            self._line = ""


def main(conn: connection.Connection, port: int, noise: str, environment: dict[str, str]) -> None:
    """Be a rank process until the pool is gone."""
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business
    _redirect(noise)
    torch.set_num_threads(1)
    pipe = Pipe(conn)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=FOREVER)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, jobs), name="zerolab-pipe", daemon=True).start()
    pipe.send("ready")
    while True:
        _work(jobs.get(), pipe, store)


def _loopback() -> str:
    """Return the name of the network interface that never leaves this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def _redirect(noise: str) -> None:
    """Send what C++ prints to a file, which is shown only if the process dies."""
    target = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _read(pipe: Pipe, jobs: "queue.SimpleQueue[Job]") -> None:
    """Pass jobs on, answer "where are you?", and end when the pool has ended."""
    parent = multiprocessing.parent_process()
    ends = [pipe.conn, *([parent.sentinel] if parent is not None else [])]
    while True:
        try:
            if pipe.conn not in connection.wait(ends):
                os._exit(1)
            message = pipe.conn.recv()
        except (EOFError, OSError):
            os._exit(1)
        if isinstance(message, Job):
            jobs.put(message)
        else:
            pipe.send("where", *_where())


def _where() -> tuple[dict, str]:
    """Return this rank's state and the Python stack of the main thread."""
    main_thread = threading.main_thread().ident or 0
    groups = current.adopted()
    state = watch.snapshot(groups[0]) if groups else watch.silent_state()
    return state, watch.stack_of(main_thread)


def _work(job: Job, pipe: Pipe, store: Store) -> None:
    """Do one job and send how it ended."""
    out, err = Printer(pipe, "stdout"), Printer(pipe, "stderr")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        answer = _attempt(job, pipe, store)
        if answer[0] == "error":
            _leave()
    out.finish()
    err.finish()
    pipe.send(*answer)


def _attempt(job: Job, pipe: Pipe, store: Store) -> tuple:
    """Do one job and return what to tell the pool. Nothing of it is left afterwards."""
    try:
        group = _join(job, pipe, store)
        answer = ("ok", travel.pack(_call(job, group)))
        _farewell(group, "returned", "", "")
        return answer
    except BaseException as error:
        return _failed(error)


def _join(job: Job, pipe: Pipe, store: Store) -> ProcessGroup:
    """Be rank `job.rank` of the group with number `job.group`."""
    travel.learn_lines(job.lines)
    ranks = {"RANK": job.rank, "LOCAL_RANK": job.rank}
    sizes = {"WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
    os.environ.update({name: str(number) for name, number in {**ranks, **sizes}.items()})
    if _joined != [job.group]:
        _leave()
        _initialise(job, PrefixStore(f"group{job.group}", store))
    group = current.adopt(store, job.epoch)
    group.on_report = lambda thing: pipe.send("report", travel.pack(thing))
    current.set_process_group(group)
    watch.start(group, lambda states: pipe.send("deadlock", states))
    return group


_joined: list[int] = []  # the number of the group this process is in


def _initialise(job: Job, store: Store) -> None:
    """Make torch.distributed's default group."""
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    dist.init_process_group(
        job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=FOREVER
    )
    _joined.append(job.group)


def _leave() -> None:
    """Leave the group, which closes the connections."""
    current.set_process_group(None)
    _joined.clear()
    gc.collect()  # works that nobody waited for hold the connections
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(job: Job, group: ProcessGroup) -> Any:
    """Run the user's function with the caller's dice."""
    fn, args = travel.unpack(job.call)
    with contextlib.ExitStack() as scopes:
        for luggage in job.luggage:
            scopes.enter_context(travel.unpack(luggage)())
        rng.restore(job.random)
        return current.on_virtual_gpu(group, fn, args, job.gpu_memory, job.ledger)


def _failed(error: BaseException) -> tuple:
    """Tell the peers, and return what to tell the pool."""
    groups = current.adopted()
    state = watch.snapshot(groups[0]) if groups else watch.silent_state()
    detail, where = deadlock.first_line(error), source.raised_at(error)
    state.update(state="raised", detail=detail, where=where)
    for group in groups:
        _farewell(group, "raised", detail, where)
    kind = "peer" if isinstance(error, PeerError) else "own"
    if isinstance(error, torch.OutOfMemoryError):
        kind = "memory"
    answer = ("error", kind, travel.pack_error(error), state)
    error.__traceback__ = None  # its frames hold works, and those hold connections
    return answer


def _farewell(group: ProcessGroup, state: str, detail: str, where: str) -> None:
    """Tell the peers how this rank ended."""
    if group.watcher is not None:
        group.watcher.farewell(state, detail, where)


def exit_text(noise: str) -> str:
    """Return the last lines that a process which died had printed from C++."""
    with contextlib.suppress(OSError), Path(noise).open(errors="replace") as file:
        return "".join(file.readlines()[-8:]).strip()
    return ""
