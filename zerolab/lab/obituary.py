"""Chapter 0: the report about an answer that never reported: it hung, flooded or died.

Owns no state. What is known is why the worker was ended and, from faulthandler, the stack of
each of its threads shortly before. Ranks that wait or compute have been stopped by then and said
where they were (`evidence.allow`); left is a thread in a call that nothing interrupts.
"""

import os
import re
import signal
from typing import TYPE_CHECKING

from .outcome import Outcome, Report

if TYPE_CHECKING:
    from .child import Job

FLOOD = 64 * 2**20  # bytes of output after which an answer is stopped
STACK_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in')
MAIN_FRAME = "in serve_in_fork"  # which forked the worker: only the main thread has it
RANK_FRAME = "in _rank\n"  # of `comm.threads`: the thread is a rank's


def write(job: "Job", reason: str, status: int, stacks: str) -> Report:
    """Return the report.

    Args:
        job: what the worker was to evaluate.
        reason: "died", "flood" or "timeout".
        status: of waitpid, for one that died.
        stacks: what faulthandler wrote.
    """
    outcome = Outcome.EXCEPTION if reason == "died" else Outcome.TIMEOUT
    message = {
        "died": how_it_died(status),
        "flood": f"It was stopped after printing {FLOOD // 2**20} MiB without coming back.",
        "timeout": f"It did not come back within {job.seconds:g} seconds.",
    }[reason]
    report = Report(job.exercise, outcome, message, usable=False)
    stack = own_stack(stacks, job.file)
    frames = STACK_FRAME.finditer(stack)
    line = next((int(found["line"]) for found in frames if found["file"] == job.file), 0)
    if line:
        report.file, report.line = job.file, line
    if reason == "timeout" and RANK_FRAME in stack and MAIN_FRAME in stack:
        report.rank = 0  # which runs in the main thread
        report.message += " Rank 0 sat in a call that nothing interrupts; the others waited."
    return report


def own_stack(stacks: str, file: str) -> str:
    """Return the stack of the main thread, or of another that is in `file` when that is not."""
    threads = [stack for stack in stacks.split("\n\n") if f'"{file}"' in stack]
    main = [stack for stack in threads if MAIN_FRAME in stack]
    return next(iter([*main, *threads]), "")


def how_it_died(status: int) -> str:
    """Say how a process ended that sent no report."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"It ended its whole process (exit code {code}); a function must return."
    name = signal.Signals(-code).name
    return f"It crashed its process ({name}), as reading memory that is gone does."
