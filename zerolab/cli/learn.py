"""Chapter 0: `zerolab learn`, from a fresh clone to the first notebook.

Owns the options. Phases: bring the learner's workspace up to date (their own work is never
overwritten), say what was done, start JupyterLab at the notebook. JupyterLab listens on this
machine only, chooses a free port itself, and runs until Ctrl-C.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..lab.merging import Merged
    from ..lab.workspace import Copied

# Defaults that a learner may change in JupyterLab: no question about news at the first start,
# and the notebook saved every 30 seconds.
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
    "@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": 30},
}


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
    words = command(workspace.resolve(), notebook, browser=not no_browser)
    try:
        return subprocess.run(words, env=environment(workspace.resolve()), check=False).returncode
    except KeyboardInterrupt:
        return 0


def environment(workspace: Path) -> dict[str, str]:
    """Return the environment of JupyterLab and its kernels; writes the settings it points to."""
    config = workspace / ".zerolab" / "jupyter"
    (config / "labconfig").mkdir(parents=True, exist_ok=True)
    settings = config / "labconfig" / "default_setting_overrides.json"
    settings.write_text(json.dumps(SETTINGS, indent=1) + "\n", encoding="utf-8")
    paths = [str(config), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return {
        **os.environ,
        "ZEROLAB_WORKSPACE": str(workspace),
        "JUPYTER_CONFIG_PATH": os.pathsep.join(paths),
    }


def summary(copied: "Copied", workspace: Path) -> str:
    """Say in a few lines what happened to the workspace."""
    lines = [f"Your copy of the course: {workspace}"]
    lines += [f"  new      {name}" for name in copied.new]
    lines += [f"  updated  {name} (you had not changed it)" for name in copied.updated]
    for name, merged in copied.merged.items():
        lines += [f"  merged   {name}: {changes(merged)}"]
        lines += [f"           as it was: {copied.backups[name]}"]
    lines += [f"  kept     {name} (yours; the course has a newer one)" for name in copied.kept]
    return "\n".join(lines)


def changes(merged: "Merged") -> str:
    """Say what a merge did to a notebook's cells."""
    counts = {
        "updated": merged.updated,
        "new": merged.inserted,
        "dropped by the course": merged.removed,
        "of yours kept": merged.kept,
    }
    parts = [f"{len(ids)} {word}" for word, ids in counts.items() if ids]
    text = f"cells: {', '.join(parts)}" if parts else "your text is unchanged"
    if not merged.conflicts:
        return text
    names = ", ".join(merged.conflicts)
    return f"{text}; the course's newer text stands in a cell below {names}"


def command(workspace: Path, notebook: str, *, browser: bool) -> list[str]:
    """Return the command line that starts JupyterLab at a notebook."""
    words = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={workspace}",
        "--ServerApp.ip=127.0.0.1",
        f"--LabApp.default_url=/lab/tree/{notebook}",
    ]
    if not browser:
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # as in containers
    return words
