"""Chapter 12: the command line, the top of the package.

Owns the program `zerolab` and the one place where errors turn into exit codes:

    0  success            2  bad usage: one line, no traceback
    1  another failure    3  out of memory on a virtual GPU     4  deadlock

Commands import torch only when they run, so that `zerolab --help` answers at once.
"""

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
    try:
        code = app(args, prog_name="zerolab", standalone_mode=False)
        if code == INTERRUPTED:
            _say("interrupted")  # typer has caught Ctrl-C itself
        return code if isinstance(code, int) else SUCCESS
    except _TypedWrong as error:
        _say(typed_wrong(error))
        return BAD_USAGE
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except Exception as error:
        _say(describe(error))
        return exit_code(error)


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
    if text and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
