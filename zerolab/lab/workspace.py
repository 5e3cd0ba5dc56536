"""Chapter 0: the workspace, the learner's own copy of the course, in which nothing is lost.

Owns one rule. A notebook is copied when the workspace does not have it, replaced by a newer one
while it is, byte for byte, the copy that was put there, and merged with it cell by cell
otherwise (`merging`). What was put there is kept in `.zerolab/base/`, which tells the learner's
changes from the course's; before a merge the learner's file is copied to `.zerolab/backup/`.
Files are written beside their place and moved there, so that no crash leaves half of one.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from . import merging

BASE = Path(".zerolab") / "base"
BACKUP = Path(".zerolab") / "backup"
DEFAULT = Path("workspace")


@dataclass(slots=True)
class Copied:
    """What `fill` did, as file names."""

    new: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)  # untouched by the learner
    merged: dict[str, merging.Merged] = field(default_factory=dict)
    backups: dict[str, Path] = field(default_factory=dict)  # of the merged ones, as they were
    kept: list[str] = field(default_factory=list)  # newer in the course, and cannot be merged


def course_folder() -> Path:
    """Return the folder with the course's notebooks: beside the package, or inside the wheel's.

    Raises:
        UsageError: this installation has no course.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "course", package / "course"):
        if (folder / "00_start_here.ipynb").exists():
            return folder
    raise UsageError(
        f"the course is not installed beside {package.name}; clone the repository and install "
        "it with `pip install -e .`"
    )


def notebooks(course: Path) -> list[Path]:
    """Return the course's notebooks in the order of the chapters."""
    return sorted(course.glob("[0-9][0-9]_*.ipynb"))


def notebook_of(course: Path, chapter: str) -> str:
    """Return the file name of a chapter's notebook.

    Args:
        course: the folder with the notebooks.
        chapter: its number, "0" and "00" alike.
    """
    names = {path.name[:2]: path.name for path in notebooks(course)}
    if chapter.zfill(2) not in names:
        raise UsageError(f"chapter {chapter!r} does not exist; choose one of {', '.join(names)}")
    return names[chapter.zfill(2)]


def fill(workspace: Path, course: Path) -> Copied:
    """Bring a workspace up to date; what the learner wrote stays.

    Raises:
        UsageError: the workspace is a file, or lies inside the course.
    """
    workspace = workspace.resolve()
    if workspace.exists() and not workspace.is_dir():
        raise UsageError(f"workspace {workspace.name!r} is a file; give a folder")
    if workspace == course or course in workspace.parents:
        raise UsageError(f"workspace {workspace} lies in the course itself; give another folder")
    (workspace / BASE).mkdir(parents=True, exist_ok=True)
    copied = Copied()
    for source in notebooks(course):
        _bring(source, workspace, copied)
    return copied


def _bring(source: Path, workspace: Path, copied: Copied) -> None:
    """Bring one notebook up to date: copy it, merge it, or leave it."""
    own, base, new = workspace / source.name, workspace / BASE / source.name, source.read_bytes()
    if not own.exists():
        copied.new.append(own.name)
    elif not base.exists() and own.read_bytes() != new:
        copied.kept.append(own.name)
        return
    elif not base.exists():
        pass  # a copy made by hand
    elif base.read_bytes() == new:
        return
    elif own.read_bytes() == base.read_bytes():
        copied.updated.append(own.name)
    else:
        _merge(workspace, own, base, new, copied)
        return
    write(own, new)
    write(base, new)


def _merge(workspace: Path, own: Path, base: Path, new: bytes, copied: Copied) -> None:
    """Merge one notebook; the base is replaced last, so that a cut-short merge is repeated."""
    before = own.read_bytes()
    try:
        merged = merging.merge(*map(merging.parse, (base.read_bytes(), before, new)))
    except merging.NotMergeable:
        copied.kept.append(own.name)
        return
    copied.merged[own.name] = merged
    copied.backups[own.name] = _back_up(workspace, own.name, before)
    write(own, merging.to_bytes(merged.notebook))
    write(base, new)


def _back_up(workspace: Path, name: str, data: bytes) -> Path:
    """Keep a copy under a number of its own; returns where, from the workspace on."""
    (workspace / BACKUP).mkdir(parents=True, exist_ok=True)
    number = 1
    while (workspace / _numbered(name, number)).exists():
        number += 1
    write(workspace / _numbered(name, number), data)
    return _numbered(name, number)


def _numbered(name: str, number: int) -> Path:
    return BACKUP / f"{Path(name).stem}.{number}.ipynb"


def write(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole, or as it was before."""
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        beside.chmod(path.stat().st_mode & 0o777)
    beside.replace(path)
