"""Chapter 0: `my_zerolab`, a copy of the package that runs with the learner's functions in it.

Owns the folder `my_zerolab/` in the learner's workspace. All imports inside the package are
relative, so that a copy runs under any name: `python -m my_zerolab train`, and `torchrun -m`.
The text of each plugged function takes the place of the package's own; a comment at the top of
each file says what is whose. `yours.json` remembers the texts, so that a later chapter adds its
own to them, and what each spliced file held, so that an edit by hand is never overwritten.

Phases: remember, copy, splice, write.
"""

import ast
import builtins
import hashlib
import inspect
import json
import linecache
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import cards, exercise, plug, progress
from .cards import Card, Row

NAME = "my_zerolab"
MEMORY = "yours.json"
PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Text:
    """A function that the learner wrote, as text."""

    source: str  # of the function alone, not indented
    helpers: tuple[str, ...]  # sources of the notebook's functions and imports that it uses
    verified: bool


def my_zerolab(folder: str | Path | None = None) -> Path:
    """Write a runnable copy of the package with your functions in it; return its folder.

    What an earlier call has put there stays, unless the function is plugged in anew. Delete the
    folder to start from the reference.

    Args:
        folder: where `my_zerolab/` is put; None for your workspace, or the current folder.

    Raises:
        UsageError: a function's text cannot be found, or a file in the copy was edited by hand.
    """
    log = progress.path()
    home = Path(folder) if folder is not None else (log.parent if log else Path.cwd())
    copy = home.resolve() / NAME
    memory = _remembered(copy)
    _refuse_edits(copy, memory["files"])
    texts = {target: _from_json(entry) for target, entry in memory["functions"].items()}
    texts |= {target: text_of(target, entry) for target, entry in plug.entries().items()}
    files = _spliced(texts)
    _write(copy, files, texts)
    cards.show(_card(copy, texts))
    return copy


# Phase 1: remember.


def _remembered(copy: Path) -> dict[str, Any]:
    """Return what an earlier call noted; nothing for a folder that is not there."""
    path = copy / MEMORY
    if not copy.exists():
        return {"functions": {}, "files": {}}
    try:
        memory = json.loads(path.read_text(encoding="utf-8"))
        return {"functions": dict(memory["functions"]), "files": dict(memory["files"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{copy} is there, but its {MEMORY} cannot be read ({error}): move the folder away"
        ) from None


def _from_json(entry: dict[str, Any]) -> Text:
    return Text(entry["source"], tuple(entry["helpers"]), bool(entry["verified"]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_edits(copy: Path, files: dict[str, str]) -> None:
    """Refuse to replace what the learner has changed in the copy itself."""
    for name, digest in files.items():
        path = copy / name
        if not path.exists() or _digest(path.read_text(encoding="utf-8")) != digest:
            raise UsageError(
                f"{NAME}/{name} was changed by hand and would be overwritten: move the folder "
                f"{NAME} away, or delete it"
            )


# Phase 2: the learner's texts.


def text_of(target: str, entry: plug.Plugged) -> Text:
    """Return the text of what is plugged in for a target, and of what it needs."""
    name = target.partition(":")[2]
    source = _source(entry.written, target)
    defined = getattr(entry.written, "__name__", name)
    if defined != name:
        source = source.replace(f"def {defined}(", f"def {name}(", 1)
    module = exercise.target_module(target)
    return Text(source, tuple(_helpers(entry.written, vars(module), {name})), entry.verified)


def _source(thing: Callable[..., Any], target: str) -> str:
    try:
        source = textwrap.dedent(_written(thing)).strip()
        body = ast.parse(source).body
    except (OSError, TypeError, SyntaxError):
        body, source = [], ""
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef | ast.ClassDef):
        raise UsageError(
            f"the text of your {target.partition(':')[2]} cannot be found: define it with `def` "
            "in a cell of its own, and run its check again"
        )
    return source


def _written(thing: Any) -> str:
    """Return the text of a function, or of a class: of one in a cell inspect knows no file."""
    code = plug.code_of(thing)
    if not isinstance(thing, type) or code is None:
        return inspect.getsource(thing)
    text = "".join(linecache.getlines(code.co_filename))
    nodes = [n for n in ast.parse(text).body if getattr(n, "name", "") == thing.__name__]
    return (ast.get_source_segment(text, nodes[-1]) or "") if nodes else ""


def _helpers(thing: Any, module: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield the text of whatever a function uses that only the notebook has."""
    if not isinstance(thing, types.FunctionType):
        return
    for name in sorted(_names(thing.__code__)):
        known = name in module or hasattr(builtins, name) or name in seen
        value = thing.__globals__.get(name)
        if known or value is None:
            continue
        seen.add(name)
        if isinstance(value, types.ModuleType):
            yield f"import {value.__name__} as {name}"
        elif isinstance(value, types.FunctionType) and value.__module__ == thing.__module__:
            yield from _helpers(value, module, seen)
            yield _source(value, f"helper:{name}")
        elif getattr(value, "__module__", None) in sys.modules:
            yield f"from {value.__module__} import {value.__name__} as {name}"


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function looks up, its inner functions included."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


# Phase 3: splice.


def _spliced(texts: dict[str, Text]) -> dict[str, str]:
    """Return every Python file of the copy as text, by its path in the package."""
    found: dict[str, dict[str, Text]] = {}
    for target, text in texts.items():
        module, _, name = target.partition(":")
        path = module.partition(".")[2].replace(".", "/") + ".py"
        found.setdefault(path, {})[name] = text
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        files[name] = splice(path.read_text(encoding="utf-8"), found.get(name, {}))
    return files


def splice(source: str, texts: dict[str, Text]) -> str:
    """Return a module's text with some functions replaced, and a comment that says which."""
    tree, lines = ast.parse(source), source.splitlines()
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    names = {node.name for node in nodes}
    for name in texts:
        if name not in names:
            raise UsageError(f"the package has no {name} any more: delete {NAME} and start anew")
    for node in reversed(nodes):
        if node.name in texts:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            text = texts[node.name]
            new = "\n\n\n".join([*text.helpers, text.source])
            lines[first : node.end_lineno] = new.splitlines()
    return "\n".join([_header(nodes, texts), *lines, ""])


def _header(nodes: list[ast.FunctionDef | ast.ClassDef], texts: dict[str, Text]) -> str:
    """Return the comment at the top of a file of the copy."""
    if not texts:
        return f"# {NAME}: all of this file is the reference."
    yours = [n + ("" if texts[n].verified else " (unverified)") for n in sorted(texts)]
    rest = [node.name for node in nodes if node.name not in texts]
    wrap = {"width": 96, "initial_indent": "# ", "subsequent_indent": "#     "}
    return "\n".join(
        [
            *textwrap.wrap(f"{NAME}: yours: {', '.join(yours)}.", **wrap),
            *textwrap.wrap(f"{NAME}: reference: {', '.join(rest) or 'nothing'}.", **wrap),
        ]
    )


# Phase 4: write.


def _write(copy: Path, files: dict[str, str], texts: dict[str, Text]) -> None:
    """Write the copy beside its place and move it there whole."""
    fresh = copy.with_name(f".{NAME}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(PACKAGE, fresh, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name, text in files.items():
        (fresh / name).write_text(text, encoding="utf-8")
    memory = {
        "functions": {target: asdict(text) for target, text in sorted(texts.items())},
        "files": {name: _digest(text) for name, text in files.items()},
    }
    (fresh / MEMORY).write_text(json.dumps(memory, indent=1) + "\n", encoding="utf-8")
    if copy.exists():
        shutil.rmtree(copy)
    fresh.rename(copy)


def _card(copy: Path, texts: dict[str, Text]) -> Card:
    names = [
        target.replace(":", ".").partition(".")[2] + ("" if text.verified else " (unverified)")
        for target, text in sorted(texts.items())
    ]
    rows = (
        Row("yours", ", ".join(names) or "nothing yet"),
        Row("run it", f"cd {copy.parent}\npython -m {NAME} train --stage 1 --model gpt-nano", True),
        Row("in processes", f"torchrun --nproc-per-node 4 -m {NAME} train --model gpt-nano", True),
    )
    return Card("--jp-success-color1", f"{NAME} is written", rows=rows)
