"""Chapter 0: the child process, in which answers run, because an answer may hang or die.

Owns nothing between two jobs. The process starts once, loads torch and the engine, and then
forks one worker a job: a fresh copy, warm at once, in a process group of its own. Whatever
the answer does to its globals, its output or its process ends with that copy, and everything
it started ends with the group. Where there is no fork (Windows) the job runs in this process,
which the notebook replaces if it hangs or dies.

Where evidence comes from rank processes, these belong to the group of the worker, and end with it.

A frame on a pipe is eight bytes of length and a pickle. Phases of a job: fork, watch (result,
output, end of the worker, end of the notebook, time), end the group, report.
"""

import contextlib
import faulthandler
import io
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from . import obituary
from .outcome import Outcome, Report

KEEP_OUTPUT = 2_000  # characters of what an answer printed that a card shows
MEMORY_LIMIT = 3 * 2**30  # bytes of address space that a worker may add
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to evaluate."""

    exercise: str
    answer: bytes  # the function or class, pickled by value
    file: str  # its source file, as its code object names it
    seconds: float
    world: str = ""  # the ZEROLAB_WORLD of the notebook


def write_frame(pipe: IO[bytes], data: Any) -> None:
    """Write one frame."""
    body = pickle.dumps(data)
    pipe.write(struct.pack("<Q", len(body)) + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Any:
    """Read one frame; None at the end of the pipe."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    body = pipe.read(struct.unpack("<Q", head)[0])
    return pickle.loads(body)


def evaluate_job(job: Job) -> dict[str, Any]:
    """Evaluate a job here and now; returns a `Report` as a dict."""
    from ..comm import travel
    from . import evidence
    from . import exercise as exercises
    from .evaluate import evaluate

    os.environ["ZEROLAB_WORLD"] = job.world
    evidence.allow(job.seconds)
    answer, _ = travel.unpack(job.answer)
    return asdict(evaluate(exercises.find(job.exercise), answer))


# The worker's side.


def work(job: Job, result_fd: int, output_fd: int, stack: IO[bytes], scratch: str) -> None:
    """Be the worker: evaluate, send the report, end. Never returns."""
    os.setpgid(0, 0)
    own_pid = os.getpid()
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    if job.world not in ("nccl", "process"):  # CUDA reserves far more than it uses
        limit_memory()
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - open as long as the process lives
    sys.stdout = os.fdopen(1, "w", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="replace", closefd=False)
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(max(job.seconds - 0.3, 0.1), file=stack)
    try:
        report = evaluate_job(job)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = f"The answer cannot be evaluated: {what}"
        report = asdict(Report(job.exercise, Outcome.EXCEPTION, text, usable=False))
    if os.getpid() != own_pid:
        os._exit(0)  # a copy that the answer forked: the report is not its business
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with os.fdopen(result_fd, "wb") as pipe:
        write_frame(pipe, report)
    os._exit(0)


def limit_memory() -> None:
    """Let an answer that collects without end get a MemoryError, not the machine's last byte."""
    try:
        import resource
    except ImportError:
        return
    pages = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:  # noqa: PTH123
        pages = int(statm.read().split()[0])
    if pages:
        limit = pages * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


# The watching side.


@dataclass(slots=True)
class Watch:
    """One running worker, as the child process sees it."""

    pid: int
    job: Job
    result_fd: int
    output_fd: int
    stack: IO[bytes]
    frame: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    num_printed: int = 0
    status: int | None = None  # of waitpid, once the worker has ended

    def complete(self) -> bool:
        """Whether the whole report has arrived."""
        return (
            len(self.frame) >= 8 and len(self.frame) >= 8 + struct.unpack("<Q", self.frame[:8])[0]
        )

    def read(self, fd: int) -> None:
        """Take in what one pipe has; output beyond what a card shows is only counted."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, 1 << 16)
            if fd == self.result_fd:
                self.frame += data
                return
            self.num_printed += len(data)
            self.printed += data[: max(0, KEEP_OUTPUT - len(self.printed))]

    def wait(self) -> str:
        """Return why to stop: "done", "died", "flood", "timeout" or "orphan"."""
        deadline = time.monotonic() + self.job.seconds
        with selectors.DefaultSelector() as selector:
            for fd in (self.result_fd, self.output_fd):
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            parent = selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            while True:
                ready = [key for key, _ in selector.select(POLL_SECONDS)]
                for key in ready:
                    if key is not parent:
                        self.read(key.fd)
                reason = self._reason(deadline, parent in ready)
                if reason:
                    return reason

    def _reason(self, deadline: float, parent_spoke: bool) -> str:
        if self.complete():
            return "done"
        if parent_spoke:  # it never speaks while it waits for an answer: the pipe has closed
            return "orphan"
        if self.num_printed > obituary.FLOOD:
            return "flood"
        if self.status is not None:
            return "died"  # in the round before; what it had written has been read since
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = status
        return "timeout" if time.monotonic() > deadline else ""

    def end(self) -> None:
        """End the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                self.status = os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(OSError):
            self.read(self.output_fd)
        os.close(self.result_fd)
        os.close(self.output_fd)

    def report(self, reason: str) -> dict[str, Any]:
        """Return the worker's report, or one about its end."""
        if reason == "done":
            data = pickle.loads(bytes(self.frame[8:]))
        else:
            self.stack.seek(0)
            stacks = self.stack.read().decode(errors="replace")
            data = asdict(obituary.write(self.job, reason, self.status or 0, stacks))
        data["output"] = output_text(bytes(self.printed), self.num_printed)
        return data


def output_text(printed: bytes, num_printed: int) -> str:
    """Return what was printed, with a note where it was cut."""
    text = printed.decode(errors="replace")
    if num_printed > len(printed):
        text = f"{text.rstrip()}\n... ({num_printed:,} bytes in all)"
    return text


def serve_in_fork(job: Job) -> dict[str, Any]:
    """Evaluate a job in a forked worker."""
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    with tempfile.TemporaryFile() as stack, _scratch() as scratch:
        pid = os.fork()
        if pid == 0:
            work(job, result_write, output_write, stack, scratch)
        os.close(result_write)
        os.close(output_write)
        watch = Watch(pid, job, result_read, output_read, stack)
        reason = "orphan"
        try:
            reason = watch.wait()
        finally:
            watch.end()
        if reason == "orphan":
            sys.exit(0)
        return watch.report(reason)


def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """Make the folder for a worker's temporary files: what is killed cannot clean up."""
    return tempfile.TemporaryDirectory(prefix="zerolab-", ignore_cleanup_errors=True)


def serve_here(job: Job) -> dict[str, Any]:
    """Evaluate a job in this process, where there is no fork."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        data = evaluate_job(job)
    text = printed.getvalue().encode()
    return {**data, "output": output_text(text[:KEEP_OUTPUT], len(text))}


def main() -> None:
    """Serve jobs from stdin until it closes."""
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from .. import engine  # noqa: F401
    from . import evaluate, exercise  # noqa: F401 - loaded before the first job, and so torch

    exercise.every()
    serve: Callable[[Job], dict[str, Any]] = serve_in_fork if hasattr(os, "fork") else serve_here
    write_frame(outbox, "ready")
    while (job := read_frame(inbox)) is not None:
        write_frame(outbox, serve(job))


if __name__ == "__main__":
    main()
