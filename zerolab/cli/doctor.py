"""Chapter 12: `zerolab doctor`, which says what this machine has and what to do about the rest.

Owns the list of checks. Each is a small function that returns one `Finding`; none changes
anything, none needs the network. "note" means slower or fewer features, "problem" means that
something in the README will not work.
"""

import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import typer

from . import machine

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
PACKAGES = ("numpy", "pydantic", "typer", "rich", "jupyterlab", "ipywidgets", "plotly", "anywidget")
TORCHRUN_PORT = 29500
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COMFORTABLE_BYTES = 4 * 2**30
EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
REINSTALL = "run `python bootstrap.py learn` once, or pip install"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `state` is "ok", "note" or "problem"."""

    name: str
    state: str
    found: str
    advice: str = ""


def doctor() -> None:
    """Say what this machine has, and what to do about what is missing."""
    findings = examine()
    _print(findings)
    problems = sum(finding.state == "problem" for finding in findings)
    if problems:
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Look at everything, in the order in which a run needs it."""
    return [
        python(),
        torch(),
        *[package(name) for name in PACKAGES],
        cores(),
        memory(machine.memory_bytes()),
        gpus(),
        world(),
        torchrun_variables(),
        free_port(),
        torchrun_port(),
        widget_manager(),
    ]


def python() -> Finding:
    """Python is new enough."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Finding("Python", "ok", found)
    return Finding("Python", "problem", found, "install Python 3.11 or newer")


def torch() -> Finding:
    """PyTorch is there and new enough."""
    version = _version("torch")
    if version is None:
        return Finding("torch", "problem", "missing", f"{REINSTALL} torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        return Finding("torch", "problem", version, f"{REINSTALL} 'torch>=2.13'")
    return Finding("torch", "ok", version)


def package(name: str) -> Finding:
    """A library of the course is there."""
    version = _version(name)
    if version is None:
        return Finding(name, "problem", "missing", f"{REINSTALL} {name}")
    return Finding(name, "ok", version)


def cores() -> Finding:
    """There are cores to run on."""
    count = machine.num_cores()
    if count < 2:
        return Finding("cores", "note", "1", "everything works, at half the speed of two")
    return Finding("cores", "ok", str(count))


def memory(total: int | None) -> Finding:
    """There is memory for four ranks and a browser."""
    if total is None:
        return Finding("memory", "note", "unknown", "4 GiB are comfortable")
    found = f"{total / 2**30:.1f} GiB"
    if total < COMFORTABLE_BYTES:
        return Finding("memory", "note", found, "close other programs; 4 GiB are comfortable")
    return Finding("memory", "ok", found)


def gpus() -> Finding:
    """Real GPUs, if any."""
    if _version("torch") is None:
        return Finding("GPUs", "note", "unknown", "install torch first")
    import torch

    if not torch.cuda.is_available():
        return Finding("GPUs", "ok", "none", "not needed: virtual GPUs run on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("GPUs", "ok", ", ".join(names), f"--world nccl --gpus {len(names)} uses them")


def world() -> Finding:
    """$ZEROLAB_WORLD is a world."""
    value = os.environ.get("ZEROLAB_WORLD", "")
    if value in ("", "lockstep", "process", "gloo", "nccl"):
        return Finding("ZEROLAB_WORLD", "ok", value or "not set", "" if value else "lockstep")
    return Finding("ZEROLAB_WORLD", "problem", repr(value), "set it to lockstep, gloo or nccl")


def torchrun_variables() -> Finding:
    """The variables of torchrun are all set or all unset."""
    there = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if len(there) in (0, len(TORCHRUN_VARIABLES)):
        return Finding("torchrun variables", "ok", "all set" if there else "none set")
    advice = f"unset {' '.join(there)}, or start with torchrun, which sets all five"
    return Finding("torchrun variables", "problem", f"only {', '.join(there)}", advice)


def free_port() -> Finding:
    """Processes can find each other on this machine."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("loopback", "ok", f"port {probe.getsockname()[1]} was free")
    except OSError as error:
        advice = "let programs bind ports on 127.0.0.1; --world lockstep needs none"
        return Finding("loopback", "problem", str(error), advice)


def torchrun_port(port: int = TORCHRUN_PORT) -> Finding:
    """The port that torchrun takes by default is free."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return Finding("torchrun's port", "ok", f"{port} is free")
    except OSError:
        advice = "give torchrun --standalone, or --master-port with another"
        return Finding("torchrun's port", "note", f"{port} is in use", advice)


def widget_manager(roots: list[str] | None = None) -> Finding:
    """JupyterLab has the extensions that draw widgets."""
    places = _extension_folders() if roots is None else roots
    folders = [Path(place) for place in places]
    missing = [
        name
        for name in EXTENSIONS
        if not any((folder / name / "package.json").is_file() for folder in folders)
    ]
    if not missing:
        return Finding("widget manager", "ok", "JupyterLab has it")
    advice = f"{REINSTALL} --force-reinstall jupyterlab_widgets anywidget; restart JupyterLab"
    return Finding("widget manager", "problem", f"missing: {', '.join(missing)}", advice)


def _extension_folders() -> list[str]:
    """Return where JupyterLab looks for extensions."""
    try:
        from jupyter_core.paths import jupyter_path
    except ImportError:
        return []
    return jupyter_path("labextensions")


def _version(name: str) -> str | None:
    """Return the installed version of a library, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(findings: list[Finding]) -> None:
    """Print the findings as a table, problems marked in words and colour."""
    from rich.console import Console
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(state, finding.name, finding.found, finding.advice)
    Console().print(table, highlight=False)
