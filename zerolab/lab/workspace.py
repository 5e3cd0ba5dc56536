"""Chapter 0: the workspace, the learner's own copy of the course, which is never overwritten.

Owns one rule. A notebook is copied when the workspace does not have it, and replaced by a newer
one only while it is, byte for byte, the copy that was put there. What was put there is kept in
`.zerolab/base/`, so that a later update can tell the learner's changes from the course's.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError

BASE = Path(".zerolab") / "base"
DEFAULT = Path("workspace")


@dataclass(slots=True)
class Copied:
    """What `fill` did, as file names."""

    new: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)  # untouched by the learner
    kept: list[str] = field(default_factory=list)  # changed by the learner, and newer in the course


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
    """Bring a workspace up to date without touching what the learner changed.

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
        _bring(source, workspace / source.name, workspace / BASE / source.name, copied)
    return copied


def _bring(source: Path, own: Path, base: Path, copied: Copied) -> None:
    """Copy one notebook, if that costs the learner nothing."""
    if not own.exists():
        copied.new.append(own.name)
    elif base.exists() and own.read_bytes() == base.read_bytes():
        if source.read_bytes() == base.read_bytes():
            return
        copied.updated.append(own.name)
    else:
        if not base.exists() or source.read_bytes() != base.read_bytes():
            copied.kept.append(own.name)
        return
    shutil.copyfile(source, own)
    shutil.copyfile(source, base)
