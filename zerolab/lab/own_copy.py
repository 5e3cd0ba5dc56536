"""Chapter 0: `my_zerolab`, a copy of the package that runs with the learner's functions in it.

Owns the folder `my_zerolab/` in the learner's workspace. All imports inside the package are
relative, so that a copy runs under any name: `python -m my_zerolab train`, and `torchrun -m`.
The text of each plugged function takes the place of the package's own; a comment at the top of
each file says what is whose. `yours.json` remembers the texts, so that a later chapter adds its
own to them, and what each spliced file held, so that an edit by hand is never overwritten.

Phases: remember, copy, splice, write.
"""

import ast
import hashlib
import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import cards, own_text, plug, progress
from .cards import Card, Row

NAME = own_text.COPY
MEMORY = "yours.json"
PACKAGE = Path(__file__).resolve().parent.parent
STAGE_OF = {"zero2": 2, "turns": 3, "zero3": 3}  # by module; what is not here runs at stage 1


def my_zerolab(folder: str | Path | None = None) -> Path:
    """Write a runnable copy of the package with your functions in it; return its folder.

    What an earlier call has put there stays, unless the function is plugged in anew. Delete the
    folder to start from the reference.

    Args:
        folder: where `my_zerolab/` is put; None for your workspace, or the current folder.

    Raises:
        UsageError: a function's text cannot be found, or a file in the copy was edited by hand.
    """
    copy = home(folder)
    texts = remembered(copy)
    texts |= {target: own_text.text_of(target, entry) for target, entry in plug.entries().items()}
    _write(copy, _spliced(texts), texts)
    cards.show(_card(copy, texts))
    return copy


def home(folder: str | Path | None = None) -> Path:
    """Return where the copy lies or would lie: in a folder, else the workspace, else here."""
    log = progress.path()
    above = Path(folder) if folder is not None else (log.parent if log else Path.cwd())
    return above.resolve() / NAME


def in_workspace() -> frozenset[str]:
    """Return the targets that the copy of the workspace has the learner's function of."""
    if progress.path() is None:
        return frozenset()
    try:
        return frozenset(_remembered(home())["functions"])
    except UsageError:
        return frozenset()  # `resume` says what is wrong with it


def forget(target: str) -> bool:
    """Put the reference back in the copy for one target; tells whether it was the learner's."""
    copy = home()
    texts = remembered(copy)
    if texts.pop(target, None) is None:
        return False
    _write(copy, _spliced(texts), texts)
    return True


# Phase 1: remember.


def remembered(copy: Path) -> dict[str, own_text.Text]:
    """Return the learner's texts in a copy, by target.

    Raises:
        UsageError: a file in it was edited by hand, or its memory cannot be read.
    """
    memory = _remembered(copy)
    _refuse_edits(copy, memory["files"])
    return {target: _from_json(entry) for target, entry in memory["functions"].items()}


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


def _from_json(entry: dict[str, Any]) -> own_text.Text:
    return own_text.Text(entry["source"], tuple(entry["helpers"]), bool(entry["verified"]))


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


# Phase 2: splice.


def _spliced(texts: dict[str, own_text.Text]) -> dict[str, str]:
    """Return every Python file of the copy as text, by its path in the package."""
    found: dict[str, dict[str, own_text.Text]] = {}
    for target, text in texts.items():
        module, _, name = target.partition(":")
        path = module.partition(".")[2].replace(".", "/") + ".py"
        found.setdefault(path, {})[name] = text
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        files[name] = splice(path.read_text(encoding="utf-8"), found.get(name, {}))
    return files


def splice(source: str, texts: dict[str, own_text.Text]) -> str:
    """Return a module's text with some functions replaced, and a comment that says which.

    Args:
        source: the module's text.
        texts: by the name of a function or class, or of a method as "Zero1.reduce".
    """
    nodes = _definitions(ast.parse(source))
    for name in texts:
        if name not in nodes:
            raise UsageError(f"the package has no {name} any more: delete {NAME} and start anew")
    lines = source.splitlines()
    for owner in sorted(owners_of(texts), key=lambda one: nodes[one].lineno, reverse=True):
        _replace(lines, nodes, owner, texts)
    return "\n".join([_header(nodes, texts), *lines, ""])


def owners_of(texts: Iterable[str]) -> set[str]:
    """Return the functions and classes that names stand for or stand in."""
    return {name.partition(".")[0] for name in texts}


def _replace(
    lines: list[str], nodes: dict[str, Any], owner: str, texts: dict[str, own_text.Text]
) -> None:
    """Replace one function or class, or some methods of a class, from the last to the first."""
    inside = [owner] if owner in texts else [n for n in texts if n.startswith(f"{owner}.")]
    for name in sorted(inside, key=lambda one: nodes[one].lineno, reverse=True):
        new = textwrap.indent(texts[name].source, " " * nodes[name].col_offset)
        lines[own_text.first_line(nodes[name]) : nodes[name].end_lineno] = new.splitlines()
    helpers = dict.fromkeys(helper for name in inside for helper in texts[name].helpers)
    start = own_text.first_line(nodes[owner])
    lines[start:start] = "\n\n\n".join([*helpers, ""]).splitlines()


def _definitions(tree: ast.Module) -> dict[str, Any]:
    """Return a module's functions and classes by name, methods as "Class.method"."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{one.name}": one for one in methods}
    return found


def _header(nodes: Iterable[str], texts: dict[str, own_text.Text]) -> str:
    """Return the comment at the top of a file of the copy."""
    if not texts:
        return f"# {NAME}: all of this file is the reference."
    yours = [n + ("" if texts[n].verified else " (unverified)") for n in sorted(texts)]
    rest = [name for name in nodes if "." not in name and name not in texts]
    wrap = {"width": 96, "initial_indent": "# ", "subsequent_indent": "#     "}
    return "\n".join(
        [
            *textwrap.wrap(f"{NAME}: yours: {', '.join(yours)}.", **wrap),
            *textwrap.wrap(f"{NAME}: reference: {', '.join(rest) or 'nothing'}.", **wrap),
        ]
    )


# Phase 3: write.


def _write(copy: Path, files: dict[str, str], texts: dict[str, own_text.Text]) -> None:
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


def _card(copy: Path, texts: dict[str, own_text.Text]) -> Card:
    names = [
        target.replace(":", ".").partition(".")[2] + ("" if text.verified else " (unverified)")
        for target, text in sorted(texts.items())
    ]
    train = f"-m {NAME} train --stage {_latest_stage(texts)} --model gpt-nano"
    rows = (
        Row("yours", ", ".join(names) or "nothing yet"),
        Row("run it", f"cd {copy.parent}\npython {train}", True),
        Row("in processes", f"torchrun --nproc-per-node 4 {train}", True),
    )
    return Card("--jp-success-color1", f"{NAME} is written", rows=rows)


def _latest_stage(texts: Iterable[str]) -> int:
    """Return the highest stage that has a function or class of the learner's; at least 1."""
    modules = (target.partition(":")[0].rpartition(".")[2] for target in texts)
    return max((STAGE_OF.get(module, 1) for module in modules), default=1)
