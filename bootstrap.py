"""Sets zerolab up and runs it. Needs Python 3.11 or newer and nothing else.

    python bootstrap.py learn     open the course in JupyterLab
    python bootstrap.py demo      train one model through the four stages of ZeRO
    python bootstrap.py test      run every check of the repository (--quick: the fast ones)
    python bootstrap.py lock      write requirements.lock anew from the environment

What follows the command is passed on: `python bootstrap.py test -k flat`.

The first call makes .venv beside this file, from requirements.lock; later calls find the stamp
that it left there and start at once. A set-up that was interrupted is taken up by the next call.
"""

# This file must be readable by old Pythons, so that they can say that they are too old.
from __future__ import annotations

import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST = (3, 11)
COMMANDS = ("learn", "demo", "test", "lock")

# Measured on Linux with two cores and Python 3.11; what PyTorch brings depends on the build.
LIBRARIES_MB = 210
TORCH_CPU_MB = 200
TORCH_CUDA_MB = 3000
DISK_GB = 1.7
DISK_CUDA_GB = 7
MINUTES = 3
MINUTES_CUDA = 10


class SetupError(Exception):
    """The set-up cannot go on: the message says why and what to do.

    Attributes:
        exit_code: 2 for a mistake of the caller, 1 for anything else.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old for the libraries."""
    if version < OLDEST:
        raise SetupError(
            "zerolab needs Python 3.11 or newer, and this is Python {}.{}. "
            "Start it with a newer one: python3.11 bootstrap.py (make: make learn "
            "PYTHON=python3.11).".format(*version),
            exit_code=2,
        )


def venv_python(root: Path, windows: bool = os.name == "nt") -> Path:
    """Name the Python of the environment, which lies elsewhere on Windows."""
    return root / ".venv" / ("Scripts/python.exe" if windows else "bin/python")


def fingerprint(root: Path) -> str:
    """Sum up all that an environment depends on: two files, and the place it was made for."""
    digest = hashlib.sha256(str(root).encode())
    for name in ("requirements.lock", "pyproject.toml"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def stamp_path(root: Path) -> Path:
    """Name the file that says the set-up was finished."""
    return root / ".venv" / "zerolab-setup.txt"


def is_ready(root: Path) -> bool:
    """Tell whether a set-up was finished here, for the versions wanted now."""
    stamp = stamp_path(root)
    return (
        venv_python(root).exists()
        and stamp.exists()
        and stamp.read_text(encoding="utf-8") == fingerprint(root)
    )


def plan(root: Path, system: str, machine: str, update: bool = False) -> str:
    """Say what the set-up will download and how long that takes, before it starts.

    Args:
        root: where the repository is.
        system: as `platform.system` names it; PyTorch's builds differ.
        machine: as `platform.machine` names it.
        update: an environment is there already, unfinished or out of date.
    """
    lines = [f"Setting zerolab up in {root / '.venv'}: once, and nothing is installed elsewhere."]
    if update:
        lines = [f"Completing {root / '.venv'}: less than all of the following, maybe nothing."]
    lines += [
        f"It downloads about {LIBRARIES_MB + TORCH_CPU_MB} MB (PyTorch {TORCH_CPU_MB}, the rest "
        f"{LIBRARIES_MB}), takes about {MINUTES} minutes and {DISK_GB} GB of disk."
    ]
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        lines.append(
            "That is with a CPU build of PyTorch. Where pip knows of none it takes the CUDA build: "
            f"about {TORCH_CUDA_MB + LIBRARIES_MB} MB, {MINUTES_CUDA} minutes and {DISK_CUDA_GB} "
            "GB of disk. README.md, 'A smaller download on Linux', says how to avoid that."
        )
    return "\n".join(lines)


def call(
    command: list[str],
    variables: dict[str, str] | None = None,
    watch: Callable[[str], None] | None = None,
) -> int:
    """Run a command to its end and return its exit code; `watch` takes the lines it prints.

    Ctrl-C reaches the command by itself and is ignored here, so that JupyterLab can ask its
    question and pytest can print its summary.
    """
    pipe = None if watch is None else subprocess.PIPE
    environment = {**os.environ, **(variables or {})}
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=pipe, text=True, errors="replace"
        ) as process:
            if watch is not None and process.stdout is not None:
                for line in process.stdout:
                    watch(line)
            return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def begin(commands: list[tuple[list[str], dict[str, str]]]) -> Callable[[], list[int]]:
    """Run commands one after another, beside others; what is returned waits and prints.

    Args:
        commands: each with the environment variables that it needs besides.

    Returns:
        A function that waits for all of them, prints their output and returns their codes.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `finish`)
    codes: list[int] = []

    def work() -> None:
        for command, variables in commands:
            environment = {**os.environ, **variables}
            process = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            codes.append(process.returncode)

    thread = threading.Thread(target=work)
    thread.start()

    def finish() -> list[int]:
        thread.join()
        output.seek(0)
        print(output.read().decode(errors="replace"), flush=True)
        output.close()
        return codes

    return finish


class PipWatch:
    """Turns pip's long report into a counter, and a line for each large download."""

    LARGE = re.compile(r"Downloading (\S+) \((\d{2,}\.?\d* MB|\S+ GB)\)")

    def __init__(self, total: int, terminal: bool) -> None:
        self.total = total
        self.terminal = terminal
        self.count = 0

    def __call__(self, line: str) -> None:
        """Take one line of pip's report and say what a person wants to know of it."""
        text = line.strip()
        large = self.LARGE.match(text)
        if text.startswith("Collecting "):
            self.count += 1
            if self.terminal:
                print(f"\r    {self.count} of about {self.total} packages", end="", flush=True)
        elif large:
            self.say(f"downloading {large[1].rpartition('/')[2]} ({large[2]})")
        elif text.startswith("Installing collected packages"):
            self.say("unpacking them into .venv")

    def say(self, text: str) -> None:
        """Print a line of its own, below the counter where there is one."""
        print(("\n" if self.terminal else "") + f"    {text}", flush=True)


def usable(python: Path) -> bool:
    """Tell whether an environment has a Python that is new enough and a pip that starts."""
    if not python.exists():
        return False
    probe = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.run([str(python), "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def set_up(root: Path) -> None:
    """Make the environment, or finish one that was interrupted or is out of date.

    Raises:
        SetupError: a step failed; what was installed so far stays and is not fetched again.
    """
    python = venv_python(root)
    update = usable(python)
    print(plan(root, platform.system(), platform.machine(), update), flush=True)
    started = time.monotonic()
    stamp_path(root).unlink(missing_ok=True)
    if not update:
        run_step("making .venv", [sys.executable, "-m", "venv", "--clear", str(root / ".venv")])
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    watch = PipWatch((root / "requirements.lock").read_text().count("\n"), sys.stdout.isatty())
    run_step("installing the libraries", [*install, "-r", "requirements.lock"], watch)
    ours = [*install, "--quiet", "--no-deps", "--no-build-isolation", "-e", "."]
    run_step("installing zerolab", ours)
    stamp_path(root).write_text(fingerprint(root), encoding="utf-8")
    print(f"Set up in {spent(started)}.", flush=True)


def run_step(what: str, command: list[str], watch: Callable[[str], None] | None = None) -> None:
    """Run one step of the set-up.

    Raises:
        SetupError: it ended with another exit code than 0.
    """
    print(f"  {what} ...", flush=True)
    code = call(command, watch=watch)
    if code != 0:
        raise SetupError(
            f"The set-up stopped while {what} (exit code {code}; the reason is above). "
            "Run the same command again: it goes on where this one stopped."
        )


def spent(started: float) -> str:
    """Write the time since `started` (of `time.monotonic`) for people."""
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    return f"{minutes} min {seconds:02d} s"


def test_steps(python: str, quick: bool, world: str) -> list[tuple[str, list[str]]]:
    """List the checks before pytest, and pytest: each with its name and its command."""
    module = [python, "-m"]
    steps = [
        ("ruff check", [*module, "ruff", "check", "."]),
        ("ruff format", [*module, "ruff", "format", "--check", "."]),
        ("pyright", [*module, "pyright"]),
        ("course is up to date", [python, "course/build.py", "--check"]),
    ]
    if quick:
        fast = ["-m", "not browser and not oracle"]
        return [*steps[:2], steps[3], ("pytest", [*module, "pytest", *fast])]
    # Values of a GPU differ in the last digits, so there only the cells' success counts.
    compare = "--nbval" if world == "lockstep" else "--nbval-lax"
    browser = "tests/test_browser.py"
    notebooks = [compare, "--nbval-current-env", "--nbval-cell-timeout=300", "solutions", browser]
    steps += [
        ("pytest", [*module, "pytest", "tests", f"--ignore={browser}"]),
        ("notebooks", [*module, "pytest", *notebooks]),
    ]
    if world == "lockstep":  # the chapters on the stages once more, on processes
        chapters = sorted(str(path) for path in (ROOT / "solutions").glob("0[3-6]_*.ipynb"))
        lax = ["--nbval-lax", *notebooks[1:3], *chapters]
        steps.append(("notebooks on gloo", [*module, "pytest", *lax]))
    return steps


def test(python: str, arguments: list[str]) -> int:
    """Run every check, also after one has failed, and return 0 only if all passed.

    The notebooks run beside the other tests: they wait a lot, and a machine has two cores. Those
    of the stages run twice, the second time with processes for ranks.
    """
    quick = "--quick" in arguments
    rest = [argument for argument in arguments if argument != "--quick"]
    variables = {"OMP_NUM_THREADS": "1", "ZEROLAB_TEST_STARTED": str(time.time())}
    steps = dict(test_steps(python, quick, os.environ.get("ZEROLAB_WORLD", "lockstep")))
    notebooks, processes = steps.pop("notebooks", None), steps.pop("notebooks on gloo", None)
    finish = None
    failed = []
    for name, command in steps.items():
        print(f"== {name}", flush=True)
        if name == "pytest" and notebooks is not None:
            beside = [([*notebooks, *rest], variables)]
            if processes is not None:
                beside.append(([*processes, *rest], {**variables, "ZEROLAB_WORLD": "gloo"}))
            finish = begin(beside)
        extra = rest if name == "pytest" else []
        if call([*command, *extra], variables) != 0:
            failed.append(name)
    if finish is not None:
        print("== notebooks", flush=True)
        none_chosen = 5 if rest else 0  # pytest's code where `-k` leaves no test
        if any(code not in (0, none_chosen) for code in finish()):
            failed.append("notebooks")
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def run(command: str, arguments: list[str]) -> int:
    """Carry out one command in the environment, which exists by now."""
    python = str(venv_python(ROOT))
    if command == "test":
        return test(python, arguments)
    if command == "lock":
        return call([python, "tools/lock.py"])
    return call([python, "-m", "zerolab", command, *arguments])


def main(arguments: list[str]) -> int:
    """Read the command line, set up what is missing, run."""
    try:
        check_python(tuple(sys.version_info[:3]))
        if not arguments or arguments[0] in ("-h", "--help"):
            print(__doc__)
            return 0
        if arguments[0] not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise SetupError(f"'{arguments[0]}' is no command: use one of {known}.", exit_code=2)
        if not is_ready(ROOT):
            set_up(ROOT)
    except SetupError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return run(arguments[0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
