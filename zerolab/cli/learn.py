"""Chapter 0: `zerolab learn`, from a fresh clone to the first notebook.

Owns the options. Phases: bring the learner's workspace up to date (their own work is never
overwritten), say what was done, start JupyterLab at the notebook. JupyterLab listens on this
machine only, chooses a free port itself, and runs until Ctrl-C.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..lab.workspace import Copied


def learn(
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, open no browser.")
    ] = False,
    workspace: Annotated[Path, typer.Option(help="Where your own copy of the course lies.")] = Path(
        "workspace"
    ),
    chapter: Annotated[str, typer.Option(help="Open this chapter, such as 00.")] = "00",
) -> int:
    """Open the course in JupyterLab, on a copy that is yours."""
    from ..lab import workspace as workspaces

    course = workspaces.course_folder()
    notebook = workspaces.notebook_of(course, chapter)
    copied = workspaces.fill(workspace, course)
    typer.echo(summary(copied, workspace), err=True)
    environment = {**os.environ, "ZEROLAB_WORKSPACE": str(workspace.resolve())}
    try:
        return subprocess.run(
            command(workspace.resolve(), notebook, browser=not no_browser),
            env=environment,
            check=False,
        ).returncode
    except KeyboardInterrupt:
        return 0


def summary(copied: "Copied", workspace: Path) -> str:
    """Say in a few lines what happened to the workspace."""
    lines = [f"Your copy of the course: {workspace}"]
    lines += [f"  new      {name}" for name in copied.new]
    lines += [f"  updated  {name} (you had not changed it)" for name in copied.updated]
    lines += [f"  kept     {name} (yours; the course has a newer one)" for name in copied.kept]
    return "\n".join(lines)


def command(workspace: Path, notebook: str, *, browser: bool) -> list[str]:
    """Return the command line that starts JupyterLab at a notebook."""
    words = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={workspace}",
        "--ServerApp.ip=127.0.0.1",
        f"--LabApp.default_url=/lab/tree/{notebook}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if not browser:
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # as in containers
    return words
