"""Writes requirements.lock from the environment it runs in: `python bootstrap.py lock`.

The lock says what the tests ran with. It starts at the dependencies of pyproject.toml, follows
what each installed package asks for, and pins every version found. Lines with a marker (";")
name what only another system needs; they cannot be found here, so they are kept as they are.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = (
    {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"},
    {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"},
    {"python_version": "3.14", "python_full_version": "3.14.0"},
)
# Only PyTorch's CUDA builds need these, and they pin them themselves.
OF_THE_CUDA_BUILD = ("cuda-", "nvidia-", "triton")
HEADER = """\
# Every version that the tests of zerolab ran with. Written by `python bootstrap.py lock`;
# only lines with a marker are written by hand. On Linux pip takes PyTorch with CUDA unless it
# is shown a CPU build; the CUDA libraries are pinned by PyTorch itself.
"""


def applies(requirement: Requirement, extras: Iterable[str], **changes: str) -> bool:
    """Tell whether a requirement counts on this system, or on one that differs by `changes`."""
    if requirement.marker is None:
        return True
    environment = {**default_environment(), **changes}
    return any(requirement.marker.evaluate({**environment, "extra": e}) for e in extras or [""])


def needs(name: str, extras: Iterable[str]) -> list[tuple[Requirement, Iterable[str]]]:
    """List what an installed package asks for, each with the extras it was asked for with."""
    wanted = [Requirement(line) for line in distribution(name).requires or []]
    return [(r, {"", *extras}) for r in wanted if not r.name.startswith(OF_THE_CUDA_BUILD)]


def closure(roots: list[Requirement]) -> tuple[dict[str, str], set[str]]:
    """Follow the requirements to their end.

    Returns:
        The version of every package needed here, and the names needed only elsewhere.
    """
    found: dict[str, str] = {}
    elsewhere: set[str] = set()
    queue = [(root, {""}) for root in roots]
    seen = set()
    while queue:
        requirement, asked = queue.pop()
        name = canonicalize_name(requirement.name)
        if not applies(requirement, asked):
            if any(applies(requirement, asked, **changes) for changes in ELSEWHERE):
                elsewhere.add(name)
            continue
        found[name] = distribution(name).version.split("+")[0]
        if (name, *sorted(requirement.extras)) not in seen:
            seen.add((name, *sorted(requirement.extras)))
            queue += [(r, set(e)) for r, e in needs(name, requirement.extras)]
    return found, elsewhere - set(found)


def section(title: str, names: Iterable[str], versions: dict[str, str]) -> Iterator[str]:
    """Write one part of the lock."""
    yield f"\n# {title}"
    yield from (f"{name}=={versions[name]}" for name in sorted(names))


def lock_text(pyproject: dict, kept: list[str]) -> str:
    """Write the whole lock.

    Raises:
        SystemExit: a package that another system needs has no line of its own yet.
    """
    project = pyproject["project"]
    learner = [Requirement(line) for line in project["dependencies"]]
    developer = [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    versions, elsewhere = closure(learner + developer)
    missing = elsewhere - {canonicalize_name(re.split("[=<>; ]", line)[0]) for line in kept}
    if missing:
        raise SystemExit(f"add a line with a marker to requirements.lock for {sorted(missing)}")
    first, second = ({canonicalize_name(r.name) for r in part} for part in (learner, developer))
    lines = [
        *section("What zerolab imports", first, versions),
        *section("What its developers run", second, versions),
        *section("What these need", set(versions) - first - second, versions),
        "\n# What only other systems need",
        *kept,
    ]
    return HEADER + "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite requirements.lock and say how many packages it pins."""
    path = ROOT / "requirements.lock"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = sorted(line for line in lines if ";" in line and not line.startswith("#"))
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    try:
        text = lock_text(pyproject, kept)
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: install it with pip, run the tests, lock again")
    path.write_text(text, encoding="utf-8", newline="\n")
    pins = [line for line in text.splitlines() if re.match(r"[a-z0-9-]+==", line)]
    print(f"requirements.lock: {len(pins)} packages")


if __name__ == "__main__":
    main()
