"""Chapter 12: what can be wrong with a configuration, and the edit that would put it right.

Data: a `Problem` names a key, what is wrong and why, what to do, and carries the edits that do it.
Phases: the readers collect problems and never stop at the first; `ConfigError` shows all of them;
`corrected` applies their edits to a copy of the file.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..errors import UsageError

Path = tuple[str, ...]


def dotted(path: Path) -> str:
    """A path as one word; a name that cannot be seen or would move the cursor stands as JSON."""
    return ".".join(name if name.isprintable() and name else json.dumps(name) for name in path)


class Severity(StrEnum):
    """How bad a problem is: errors stop `load`, warnings are kept, notes only explain."""

    ERROR = "error"
    NEEDS = "needs"  # an error unless the script brings it, as an optimizer object
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Edit:
    """One change of a file: set a key, rename it, or delete it (both left empty).

    `fill_in`: nobody can tell what was meant, so the user has to look at what stands there now.
    """

    path: Path
    value: Any = None
    rename: str = ""
    drop: bool = False
    fill_in: bool = False


@dataclass(frozen=True)
class Problem:
    """One thing to say about one key of a file.

    Attributes:
        path: where, as the names from the root; empty for the file as a whole.
        severity: see `Severity`.
        message: the value and the rule it breaks, or why it has no effect.
        remedy: what to do, as a sentence without a full stop.
        edits: the changes of the file that do it.
    """

    path: Path
    severity: Severity
    message: str
    remedy: str = ""
    edits: tuple[Edit, ...] = ()

    @property
    def key(self) -> str:
        """The path with dots between the names."""
        return dotted(self.path)

    @property
    def place(self) -> str:
        """The key with a colon after it, or "" for the file as a whole."""
        return f"{self.key}: " if self.path else ""

    def __str__(self) -> str:
        """One line: key, what is wrong, what to do."""
        return f"{self.place}{self.message}{'; ' if self.remedy else ''}{self.remedy}"


class ConfigError(UsageError):
    """A configuration that cannot run: every problem of it, one a line.

    Attributes:
        problems: the same, as data.
        name: of the file.
    """

    def __init__(self, problems: Iterable[Problem], name: str = "config") -> None:
        """Write the problems under the name of the file, or on its line when there is one."""
        self.problems, self.name = tuple(problems), name
        lines = [str(problem) for problem in self.problems]
        many = f"{len(lines)} problems\n  " + "\n  ".join(lines)
        super().__init__(f"{name}: {lines[0] if len(lines) == 1 else many}")

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...], str]]:
        """Travel from a rank process as problems: a message alone would be read as many."""
        return type(self), (self.problems, self.name)


def error(path: Path, message: str, remedy: str = "", *edits: Edit) -> Problem:
    """What stops `load`."""
    return Problem(path, Severity.ERROR, message, remedy, edits)


def warning(path: Path, message: str, remedy: str = "", *edits: Edit) -> Problem:
    """What has no effect, or another one than its name says."""
    return Problem(path, Severity.WARNING, message, remedy, edits)


def note(path: Path, message: str, remedy: str = "", *edits: Edit) -> Problem:
    """What is fine and worth a sentence."""
    return Problem(path, Severity.NOTE, message, remedy, edits)


def to_fill_in(problems: Iterable[Problem]) -> dict[str, str]:
    """What the edits had to guess or leave out: key -> what stands there now."""
    edits = [edit for problem in problems for edit in problem.edits if edit.fill_in]
    return {dotted(e.path): _stands(e) for e in edits}


def _stands(edit: Edit) -> str:
    if edit.drop:
        return "was left out, since its value says nothing"
    return f"{json.dumps(edit.value)} stands there, the default, since its value says nothing"


def same(one: object, other: object) -> bool:
    """Whether two files are the same as text; 1 is not true, as it is for Python."""
    return repr(one) == repr(other)


def corrected(raw: Mapping[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """A copy of the file with the edits of all problems applied, in their order."""
    fixed: dict[str, Any] = copy.deepcopy(dict(raw))
    for problem in problems:
        for edit in problem.edits:
            _apply(fixed, edit)
    return fixed


def _apply(fixed: dict[str, Any], edit: Edit) -> None:
    block: Any = fixed
    for name in edit.path[:-1]:
        if edit.drop and not isinstance(block.get(name), dict):
            return
        if not isinstance(block.get(name), dict):
            block[name] = {}
        block = block[name]
    last = edit.path[-1]
    if edit.drop:
        block.pop(last, None)
    elif edit.rename:
        _rename(block, last, edit.rename)
    else:
        block[last] = edit.value


def _rename(block: dict[str, Any], old: str, new: str) -> None:
    if old not in block:
        return
    if new in block:  # it has been said already, under its own name
        del block[old]
        return
    items = [(new if name == old else name, value) for name, value in block.items()]
    block.clear()
    block.update(items)
