"""Chapter 0: which line of the user's own source is responsible.

Owns one cache: file name -> the name to show, "" for files that are nobody's own source
(torch, this package, the standard library). `caller` climbs the Python stack to the first
frame that is the user's. During a CPU backward that is the line that called backward,
because autograd runs in the calling thread, below that line.
"""

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_MODEL = f"{_PACKAGE}gpt.py"
_COMMANDS = f"{_PACKAGE}cli{os.sep}"
_STANDS_IN, _TOP = "?", "!"  # marks in the cache: the model; where the command line begins
_shown: dict[str, str] = {}


def caller() -> str:
    """Name the user's line that led here.

    Returns:
        `"train.py:12"`, `"cell:3"` inside a notebook, `"gpt.py:12"` when only the package's own
        model is on this thread's stack, or `""` when not even that is.
    """
    stand_in = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        shown = _shown.get(filename)
        if shown is None:
            shown = _shown.setdefault(filename, _name_to_show(filename))
        if shown == _STANDS_IN:
            stand_in = stand_in or f"gpt.py:{frame.f_lineno}"
        elif shown == _TOP:
            break
        elif shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return stand_in


def _name_to_show(filename: str) -> str:
    if filename.startswith("<ipython-input") or f"{os.sep}ipykernel_" in filename:
        return "cell"
    if filename == _MODEL:
        return _STANDS_IN
    if filename.startswith(_COMMANDS):
        return _TOP
    if filename.startswith("<frozen") or _is_library(filename):
        return ""
    return Path(filename).name


def _is_library(filename: str) -> bool:
    if filename.startswith((_PACKAGE, _TORCH)):
        return True
    if not filename.startswith(_STDLIB):
        return False
    return not filename[len(_STDLIB) :].startswith(_INSTALLED)
