"""Chapter 2: `%%ranks`, a cell that runs on every rank at once and whose variables stay there.

Owns one namespace a rank: in the process world it lives in the rank's own process, in the
lockstep world here. A cell is sent as text, so its functions and tracebacks show its lines.
What ranks print comes back in rank order with the rank's number; the value of the last
expression is returned per rank. When ranks had to be restarted their variables are gone, and
the next cell says so.

    %load_ext zerolab.lab.ranks
    %%ranks                    (or: %%ranks -n 2 --world lockstep --timeout 30)
    x = torch.full((2,), float(rank))
    comm.all_reduce(x)
    x
"""

import argparse
import ast
import itertools
import linecache
import os
import shlex
from typing import Any, NoReturn

import torch

from .. import comm
from ..errors import UsageError
from . import training

Space = dict[str, Any]

_spaces: dict[int, Space] = {}  # in a rank process only its own is ever used
_numbers = itertools.count(1)
_last_pids: dict[str, list[int]] = {}  # world -> processes that held the variables


def run_cell(source: str, name: str) -> tuple[int, Any]:
    """Run a cell's text on the calling rank; return the process's number and the last value."""
    rank = comm.get_rank()
    space = _spaces.setdefault(rank, {"__name__": "__ranks__", "torch": torch, "comm": comm})
    space.update(rank=rank, world_size=comm.get_world_size())
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, name, "exec"), space)
    value = eval(compile(last, name, "eval"), space) if last is not None else None
    return os.getpid(), value


def run_on_ranks(
    source: str, world_size: int, world: str, timeout: float | None = None
) -> list[Any]:
    """Run a cell's text on every rank; return the value of its last expression per rank.

    Args:
        source: Python text; it finds `rank`, `world_size`, `torch`, `comm` and its own variables.
        world_size: how many ranks.
        world: "process", "gloo", "nccl" or "lockstep".
        timeout: seconds after which the ranks are stopped; None: never.
    """
    name = f"<ranks cell {next(_numbers)}>"
    # Python finds the lines of a cell here; they travel to the ranks with the call.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    answers = comm.run(run_cell, world_size, world, args=(source, name), timeout=timeout)
    pids = [pid for pid, _ in answers]
    before = _last_pids.get(world, pids)
    if any(old != new for old, new in zip(before, pids, strict=False)):
        print("(the ranks were restarted: variables of earlier cells are gone)")
    _last_pids[world] = pids
    return [value for _, value in answers]


class _Arguments(argparse.ArgumentParser):
    """A parser that raises instead of ending the kernel."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the line after %%ranks."""
        raise UsageError(f"%%ranks: {message}; use %%ranks [-n RANKS] [--world W] [--timeout S]")


def parse_line(line: str) -> argparse.Namespace:
    """Read the options that stand behind `%%ranks`."""
    parser = _Arguments(prog="%%ranks", add_help=False)
    parser.add_argument("-n", type=int, default=training.world_size(), dest="world_size")
    parser.add_argument("--world", default=os.environ.get("ZEROLAB_WORLD") or "process")
    parser.add_argument("--timeout", type=float, default=None)
    return parser.parse_args(shlex.split(line))


def ranks(line: str, cell: str) -> list[Any] | None:
    """Run the cell on every rank (the magic itself)."""
    options = parse_line(line)
    values = run_on_ranks(cell, options.world_size, options.world, options.timeout)
    return values if any(value is not None for value in values) else None


def load_ipython_extension(shell: Any) -> None:
    """Register the magic: `%load_ext zerolab.lab.ranks`."""
    shell.register_magic_function(ranks, "cell", "ranks")
