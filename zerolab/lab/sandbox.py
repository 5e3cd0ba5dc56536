"""Chapter 0: the sandbox, the notebook's end of the child process in which answers run.

Owns that process. `start` returns at once and lets it warm up while the learner reads; `run`
waits for one report and replaces the child if it does not answer. Ctrl-C ends the child too,
so that the next check finds a fresh one. Nothing is left when the notebook's kernel ends: the
child sees its input close.
"""

import atexit
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from ..comm import travel
from . import evidence, plug
from .child import Job, read_frame, write_frame
from .exercise import Exercise
from .outcome import Outcome, Report

START_SECONDS = 60.0  # to import torch and the engine on a busy machine
POOL_SECONDS = 90.0  # more for a check whose evidence comes from rank processes: they start anew
GRACE_SECONDS = 5.0  # the child ends a worker in time; this is for when it does not


class Sandbox:
    """One child process, started when it is first needed and again after it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._warm = False  # it has said that it is ready
        self._replies: queue.Queue[Any] = queue.Queue()
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        """Start the child if there is none; does not wait until it is warm."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child lives
        self._replies = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.child import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C in a terminal is for the kernel alone
        )
        assert self._process.stdout is not None
        threading.Thread(
            target=_collect, args=(self._process.stdout, self._replies), daemon=True
        ).start()

    def run(self, exercise: Exercise, answer: Callable[..., Any], seconds: float = 0.0) -> Report:
        """Evaluate an answer in the child.

        Args:
            exercise: what it answers.
            answer: the learner's function.
            seconds: allowed time; 0 for the exercise's own.
        """
        try:
            pickled = travel.pack_call(answer, ())
        except Exception as error:
            cause = error.__cause__ or error
            text = f"The function uses something that cannot leave the notebook: {cause}"
            return Report(exercise.id, Outcome.EXCEPTION, text)
        code, world = plug.code_of(answer), evidence.chosen_world()
        limit = seconds or exercise.seconds + (0 if world == "lockstep" else POOL_SECONDS)
        file = code.co_filename if code is not None else ""
        job = Job(exercise.id, pickled, file, limit, world)
        try:
            return self._ask(job)
        except BaseException:  # Ctrl-C above all
            self.close()
            raise

    def _ask(self, job: Job) -> Report:
        self.start()
        if not self._warm:
            self._wait_until_ready()
        assert self._process is not None and self._process.stdin is not None
        write_frame(self._process.stdin, job)
        try:
            reply = self._replies.get(timeout=job.seconds + GRACE_SECONDS)
        except queue.Empty:
            reply = None
        if reply is None:
            self.close()
            text = f"It did not come back within {job.seconds:g} seconds, or ended its process."
            return Report(job.exercise, Outcome.TIMEOUT, text, usable=False)
        return Report.from_dict(reply)

    def _wait_until_ready(self) -> None:
        try:
            reply = self._replies.get(timeout=START_SECONDS)
        except queue.Empty:
            reply = None
        if reply != "ready":
            raise RuntimeError(f"the process for checks did not start: {self._last_words()}")
        self._warm = True

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def close(self) -> None:
        """End the child, and with it whatever it runs."""
        process, self._process, self._warm = self._process, None, False
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.close()  # it ends its worker and itself
            process.wait(timeout=2)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()


def _collect(pipe: IO[bytes], replies: "queue.Queue[Any]") -> None:
    """Pass the child's frames on, and None when it has ended."""
    with pipe:
        while (reply := read_frame(pipe)) is not None:
            replies.put(reply)
    replies.put(None)


shared = Sandbox()
atexit.register(shared.close)
