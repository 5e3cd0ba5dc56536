"""Chapter 2: whose line was that? Finds the user's own source line behind a collective.

Owns a cache, file name -> "is it ours", and nothing else. Two phases: `caller` walks up the
stack and keeps only "file:line" (about a microsecond, so every collective can afford it);
`text_of` and `short` turn that into something to read, and run only when a table is drawn.
"""

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).absolute().parent.parent)
_TORCH = str(Path(torch.__file__).absolute().parent)
_STDLIB = str(Path(os.__file__).absolute().parent)
_hidden: dict[str, bool] = {}


def is_hidden(filename: str) -> bool:
    """Tell whether a file belongs to zerolab, torch or Python itself, so not to the user."""
    known = _hidden.get(filename)
    if known is None:
        inside_stdlib = filename.startswith(_STDLIB + os.sep) and "-packages" not in filename
        ours = filename.startswith((_PACKAGE + os.sep, _TORCH + os.sep, "<frozen"))
        known = _hidden[filename] = ours or inside_stdlib
    return known


def caller(frame: FrameType | None = None) -> str:
    """Return "file:line" of the innermost frame that is the user's, starting at `frame`.

    Hooks are called by torch, and rank threads end in `threading`: those are passed over. When
    no frame is the user's (a chapter's check calls the package), the outermost one of the
    package outside `comm` stands in.
    """
    frame = frame or sys._getframe(1)
    fallback = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _hidden.get(filename, False) and not is_hidden(filename):
            return f"{filename}:{frame.f_lineno}"
        if filename.startswith(_PACKAGE) and os.sep + "comm" + os.sep not in filename:
            fallback = f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


def raised_at(error: BaseException) -> str:
    """Return "file:line" of the innermost user frame that an exception passed through."""
    where, step = "", error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if not is_hidden(filename):
            where = f"{filename}:{step.tb_lineno}"
        step = step.tb_next
    return where


def text_of(where: str) -> str:
    """Return the text of the line at "file:line", "" when it cannot be read."""
    filename, _, line = where.rpartition(":")
    return linecache.getline(filename, int(line)).strip() if filename else ""


_short: dict[str, str] = {}


def short(where: str) -> str:
    """Shorten "file:line" as the memory events do: "train.py:12", "cell:3" in a notebook."""
    text = _short.get(where)
    if text is None:
        filename, _, line = where.rpartition(":")
        cell = f"{os.sep}ipykernel_" in filename or filename.startswith("<ipython")
        name = "cell" if cell else Path(filename).name
        text = _short[where] = f"{name}:{line}" if filename else ""
    return text
