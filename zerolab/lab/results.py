"""Chapter 0: results, what whole runs showed: exercise by world, when and on what hardware.

Owns one file, `.zerolab/results.jsonl` in the workspace: a line for each run of `zerolab check`,
appended like the learner's log. A world in which a chapter was never run has no line, and
nothing is assumed about it.
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import progress
from .whole_run import WORLDS, WholeRun

FILE = Path(".zerolab") / "results.jsonl"


@dataclass(frozen=True, slots=True)
class Result:
    """How one exercise ended in one world, the last time that it was run there."""

    exercise: str
    world: str
    outcome: str
    time: float  # seconds since 1970
    hardware: str
    message: str = ""  # what was wrong, or why it was skipped


def hardware(world: str) -> str:
    """Name what a world runs on: the GPUs of nccl, the processor's cores of the others."""
    if world == "nccl":
        import torch

        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def record(workspace: Path, run: WholeRun) -> None:
    """Append one run."""
    entry = {
        "time": round(time.time(), 3),
        "event": "run",
        "chapter": run.chapter,
        "world": run.world,
        "hardware": hardware(run.world),
        "seconds": run.seconds,
        "exercises": [asdict(row) for row in run.rows],
    }
    path = workspace / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.append(path, (json.dumps(entry) + "\n").encode())


def latest(workspace: Path, chapter: str) -> dict[tuple[str, str], Result]:
    """Return the newest result of each (exercise, world); what was never run is not in it."""
    path = workspace / FILE
    found: dict[tuple[str, str], Result] = {}
    for entry in progress.read(path) if path.exists() else ():
        if entry.get("chapter") != chapter or entry.get("world") not in WORLDS:
            continue
        for row in entry["exercises"]:
            key = (row["id"], entry["world"])
            facts = (row["outcome"], entry["time"], entry["hardware"], row.get("message", ""))
            found[key] = Result(*key, *facts)
    return found


def when(results: Sequence[Result]) -> str:
    """Return the local time of results that one run gave, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(r.time for r in results)))
