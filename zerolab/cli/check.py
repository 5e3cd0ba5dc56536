"""Chapter 12: `zerolab check`, a chapter of your own from top to bottom, or what it showed so far.

Owns no facts: `lab.whole_run` runs and `lab.results` remembers. The exit code is 0 only if every
exercise passed, or was skipped because it needs more GPUs than there are, and every other cell
of the course ran.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import UsageError
from . import learner

if TYPE_CHECKING:
    from ..lab.results import Result
    from ..lab.whole_run import WholeRun

NEVER = "never run"


def check(
    chapter: Annotated[str, typer.Argument(help="Its number, such as 00.")],
    world: Annotated[
        str, typer.Option(help="Where ranks run, also in checks: lockstep, gloo or nccl.")
    ] = "lockstep",
    workspace: learner.Workspace = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Run nothing; show exercise by world so far.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Run your own notebook of a chapter and say how each exercise ended."""
    from ..lab import results, whole_run
    from ..lab import workspace as workspaces

    course = workspaces.course_folder()
    name = workspaces.notebook_of(course, chapter)
    folder = _folder(workspace)
    if matrix:
        found = results.latest(folder, name[:2])
        print(matrix_json(name[:2], found)) if as_json else show_matrix(name[:2], found)
        return 0
    if not (folder / name).exists():
        raise UsageError(f"{folder} has no {name}; `zerolab learn` puts one there")
    check_world(world)
    print(f"running {name}, world {world} ...", file=sys.stderr)
    run = whole_run.run(name[:2], folder / name, world, course / name)
    results.record(folder, run)
    print(run_json(run)) if as_json else show(run)
    return 0 if run.passed else 1


def _folder(workspace: Path | None) -> Path:
    """Return the workspace."""
    log = learner.use(workspace)
    if log is None:
        raise UsageError("no workspace here; `zerolab learn` makes one, or give --workspace DIR")
    return log.parent.resolve()


def check_world(world: str) -> None:
    """Refuse a world that does not exist, or not on this machine."""
    from ..lab.whole_run import WORLDS

    if world not in WORLDS:
        raise UsageError(f"--world {world!r} is unknown; give {', '.join(WORLDS)}")
    if world == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--world nccl needs CUDA devices and there are none; use gloo")


def show(run: "WholeRun") -> None:
    """Print one row an exercise, then the cells of the course that failed."""
    from .tables import new_table

    table = new_table(f"chapter {run.chapter}, {run.world}, {run.seconds:.0f} s", ["exercise"])
    table.add_column("outcome", no_wrap=True)
    table.add_column("message", overflow="fold")
    for row in run.rows:
        table.add_row(f"{row.id} {row.name}", row.outcome, escape(row.message))
    console = Console(highlight=False)
    console.print(table)
    for failure in run.failures:
        text = f"cell {failure.cell} failed: {failure.message}"
        console.print(escape(text), soft_wrap=True)


def run_json(run: "WholeRun") -> str:
    """Write a run as one line of JSON."""
    fields = asdict(run)
    return json.dumps({"exercises": fields.pop("rows"), **fields, "passed": run.passed})


def show_matrix(chapter: str, found: "dict[tuple[str, str], Result]") -> None:
    """Print exercise by world, then when and on what each world was run."""
    from ..lab import exercise, results
    from ..lab.whole_run import SKIPPED, WORLDS
    from .tables import new_table

    table = new_table(f"chapter {chapter}", ["exercise", *WORLDS])
    for one in exercise.in_chapter(chapter):
        cells = [found.get((one.id, world)) for world in WORLDS]
        words = [NEVER if cell is None else cell.outcome for cell in cells]
        table.add_row(f"{one.id} {one.name}", *words)
    console = Console(highlight=False)
    console.print(table)
    for world in WORLDS:
        ran = [result for (_, where), result in found.items() if where == world]
        text = f"{results.when(ran)}, on {ran[-1].hardware}" if ran else NEVER
        console.print(escape(f"{world}: {text}"), soft_wrap=True)
        for reason in {result.message: None for result in ran if result.outcome == SKIPPED}:
            names = [r.exercise for r in ran if (r.outcome, r.message) == (SKIPPED, reason)]
            console.print(escape(f"  skipped {', '.join(names)}: {reason}"), soft_wrap=True)


def matrix_json(chapter: str, found: "dict[tuple[str, str], Result]") -> str:
    """Write the matrix as one line of JSON; what was never run is null."""
    from ..lab import exercise
    from ..lab.whole_run import WORLDS

    rows: list[dict[str, Any]] = []
    for one in exercise.in_chapter(chapter):
        cells = {world: found.get((one.id, world)) for world in WORLDS}
        told = {world: cell and asdict(cell) for world, cell in cells.items()}
        rows.append({"exercise": one.id, "name": one.name, "worlds": told})
    return json.dumps({"chapter": chapter, "exercises": rows})
