"""Chapter 12: whose progress a command reads and writes.

Owns one rule: the workspace is the one that is named, else $ZEROLAB_WORKSPACE, else the folder
one stands in when that is a workspace, else `workspace/` below it.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError

Workspace = Annotated[
    Path | None, typer.Option(help="Your copy of the course; left out, it is looked for here.")
]


def use(workspace: Path | None) -> Path | None:
    """Let the log be that of a workspace, for the rest of this process.

    Args:
        workspace: as named on the command line, None to look for it.

    Returns:
        The file with the log, which need not exist; None where there is no workspace.

    Raises:
        UsageError: the named folder does not exist.
    """
    from ..lab import progress
    from ..lab.workspace import DEFAULT

    if workspace is not None and not workspace.is_dir():
        raise UsageError(f"--workspace '{workspace}' is no folder; `zerolab learn` makes one")
    if workspace is not None:
        os.environ["ZEROLAB_WORKSPACE"] = str(workspace.resolve())
    elif progress.path() is None and DEFAULT.is_dir():
        os.environ["ZEROLAB_WORKSPACE"] = str(DEFAULT.resolve())
    return progress.path()
