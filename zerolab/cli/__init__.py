"""Chapter 12: the command line, the top of the package.

Owns the program `zerolab` and the one place where errors turn into exit codes:

    0  success            2  bad usage: one line, no traceback
    1  another failure    3  out of memory on a virtual GPU     4  deadlock

Commands import torch only when they run, so that `zerolab --help` answers at once.
"""

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ..errors import DeadlockError, RankError, UsageError
from . import check, demo, doctor, estimate, learn, progress_board, quiz, train
from .config import config_app

SUCCESS, FAILURE, BAD_USAGE, OUT_OF_MEMORY, DEADLOCK, INTERRUPTED = 0, 1, 2, 3, 4, 130

app = typer.Typer(
    name="zerolab",
    help="Train models on virtual GPUs through the stages of ZeRO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("learn")(learn.learn)
app.command("train")(train.train)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("estimate")(estimate.estimate)
app.command("check")(check.check)
app.command("quiz")(quiz.quiz)
app.command("progress")(progress_board.progress)
app.add_typer(config_app, name="config")

# The base of all mistakes in how a command is typed; typer gives it no public name of its own.
_TypedWrong: Any = typer.BadParameter.__base__


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are already on stderr."""
    as_json = "--json" in (sys.argv[1:] if args is None else args)
    try:
        code = app(args, prog_name="zerolab", standalone_mode=False)
        if code == INTERRUPTED:
            _say("interrupted")  # typer has caught Ctrl-C itself
        sys.stdout.flush()
        return code if isinstance(code, int) else SUCCESS
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except Exception as error:
        return _failed(error, as_json)


def _failed(error: Exception, as_json: bool) -> int:
    """Say what went wrong and return the exit code."""
    if isinstance(error, _TypedWrong):
        return _refused(typed_wrong(error), as_json)
    if isinstance(error, UsageError):
        return _refused(describe(error), as_json)
    if isinstance(error, OSError) and _cannot_write(error):
        if error.errno != errno.EPIPE:  # a reader that has left, as `head` does, knows
            _say(f"error: the result cannot be written: {error.strerror}")
        return FAILURE
    _say(describe(error))
    return exit_code(error)


def _refused(text: str, as_json: bool) -> int:
    """Say on stderr what is wrong with a command, to programs also as JSON on stdout."""
    _say(text)
    if as_json and text and _speaks():
        print(json.dumps({"error": text.removeprefix("error: "), "exit_code": BAD_USAGE}))
    return BAD_USAGE


def _cannot_write(error: OSError) -> bool:
    """Tell whether stdout takes nothing more; if so, what Python still wants to write is lost."""
    failed = error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO)
    if failed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failed


def exit_code(error: BaseException) -> int:
    """Return the exit code that an error stands for."""
    if isinstance(error, UsageError):
        return BAD_USAGE
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return DEADLOCK if isinstance(error, DeadlockError) else FAILURE


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a virtual GPU ran out of memory, without loading torch to ask."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def describe(error: BaseException) -> str:
    """Say an error as its reader needs it: known ones as their message, others in full."""
    if isinstance(error, (UsageError, RankError)) or is_out_of_memory(error):
        return f"error: {error}"
    told = traceback.TracebackException.from_exception(error)
    own = [frame for frame in told.stack if "typer" not in Path(frame.filename).parts]
    told.stack = traceback.StackSummary.from_list(own)
    return "".join(told.format()).rstrip()


def typed_wrong(error: Any) -> str:
    """Say in one line what was typed wrong, and where to look; "" when help was shown instead."""
    message = error.format_message()
    if not message:
        return ""
    command = error.ctx.command_path if error.ctx is not None else "zerolab"
    return f"error: {message.rstrip('.')}; see '{command} --help'"


def _say(text: str) -> None:
    """Write to stderr; under torchrun the first rank speaks for all."""
    if text and _speaks():
        print(text, file=sys.stderr)


def _speaks() -> bool:
    """Tell whether this process is the one that speaks: the first rank, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"
