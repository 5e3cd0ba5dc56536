"""Chapter 0: the course builder. One source a chapter becomes two notebooks, always the same bytes.

Owns nothing at run time. Reads `course/_src/NN_name.py` (percent cells) and the package, and
writes `course/NN_name.ipynb` for the learner and `solutions/NN_name.ipynb` with the answers.

    # %% [markdown] LABEL [tags=a,b] [hidden]        prose, in comment lines
    # %% LABEL [tags=a,b] [hidden]                   code
    # %% exercise zerolab.flat:shard_bounds          a function of the package, then these lines
    # %% exercise zerolab.zero1:Zero1.reduce, Zero1.publish    a class, these methods to be written
    # %% exercise zerolab.zero1:Zero1                a class, all of its methods to be written

Phases: cut the source into cells, fetch each exercise from the package by its syntax tree
(signature, docstring and a raise for the learner; the whole function in the solution; of a
class the methods that are not to be written stay as they are), give
every cell the id that its label names, and run the solution where a cell asks for its output
to be kept (tag `nbval-check-output`). A cell id never depends on a position, so that an
inserted cell costs no learner an answer.

    python course/build.py [--check] [--execute]
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "zerolab/zerolab"  # owner/name on GitHub: where Colab finds the course
MARKER = re.compile(r"^# %%(?P<header>.*)$", re.M)
LABEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
KEEP_OUTPUT = "nbval-check-output"
TIMEOUT_SECONDS = 300
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class SourceError(ValueError):
    """The chapter's source cannot be built: the message names the file, the cell and the rule."""


@dataclass(frozen=True)
class Cell:
    """One cell as the source states it."""

    kind: str  # "markdown", "code" or "exercise"
    label: str  # becomes the cell's id
    target: str  # "module:function" of an exercise, else ""
    tags: tuple[str, ...]
    hidden: bool  # the notebook opens with the code folded away
    body: str


# Phase 1: cut the source into cells.


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of one chapter's source, in order."""
    text = path.read_text(encoding="utf-8").replace("{repository}", REPOSITORY)
    parts = MARKER.split(text)
    headers, bodies = parts[1::2], parts[2::2]
    found = [parse_cell(h, b, path.name) for h, b in zip(headers, bodies, strict=True)]
    labels = [cell.label for cell in found]
    for label in labels:
        if labels.count(label) > 1:
            raise SourceError(f"{path.name}: label {label!r} is used twice; ids must differ")
    return found


def parse_cell(header: str, body: str, file: str) -> Cell:
    """Read one cell's header: its kind, label, tags and flags."""
    words = header.split()
    hidden = "hidden" in words
    tags = tuple(t for w in words if w.startswith("tags=") for t in w[5:].split(","))
    words = [w for w in words if w != "hidden" and not w.startswith("tags=")]
    if words[:1] == ["exercise"]:
        words = ["exercise", *([" ".join(words[1:])] if words[1:] else [])]
    kind = {"[markdown]": "markdown", "exercise": "exercise"}.get(words[0] if words else "", "code")
    names = words if kind == "code" else words[1:]
    if len(names) != 1:
        raise SourceError(f"{file}: `# %%{header}` needs exactly one label; give the cell a name")
    target = names[0] if kind == "exercise" else ""
    label = exercise_label(target) if target else names[0]
    if not LABEL.fullmatch(label):
        raise SourceError(f"{file}: label {label!r} may hold only a-z, 0-9, - and _")
    return Cell(kind, label, target, tags, hidden, body.strip("\n"))


def exercise_label(target: str) -> str:
    """Return an exercise's label: the function's name, or the class's and its methods'."""
    names = target.partition(":")[2].replace(" ", "").split(",")
    words = [names[0].partition(".")[0], *(m for n in names if (m := n.partition(".")[2]))]
    return "-".join(["exercise", *words]).lower()


# Phase 2: fetch an exercise from the package.


@dataclass(frozen=True)
class Exercise:
    """The two texts of one exercise."""

    answer: str
    stub: str


def find_exercise(target: str) -> Exercise:
    """Return the answer and the stub of an exercise, as the package has them.

    Args:
        target: "module:function", "module:Class" or "module:Class.method, Class.other".
    """
    module, _, names = target.partition(":")
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        raise SourceError(f"exercise {target}: there is no {path.relative_to(ROOT)}")
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    name, methods = split_names(names, target)
    node = next((n for n in tree.body if getattr(n, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise SourceError(f"exercise {target}: {module} has no function {name}")
    emptied = methods_of(node, methods, target) if isinstance(node, ast.ClassDef) else [node]
    lines = source.splitlines()
    first = first_line(node)
    answer = lines[first : node.end_lineno]
    stub = list(answer)
    for function in reversed(emptied):
        if ast.get_docstring(function) is None:
            raise SourceError(f"exercise {target}: a docstring must state the contract")
        stub[body_start(function) - first : (function.end_lineno or 0) - first] = [
            f'{" " * function.body[0].col_offset}raise NotImplementedError("Exercise: '
            f'{function.name}")'
        ]
    imports = needed_imports(tree, node, module)
    return Exercise(imports + "\n".join(answer), imports + "\n".join(stub))


def split_names(names: str, target: str) -> tuple[str, list[str]]:
    """Split "Zero1.reduce, Zero1.publish" into the class and its methods."""
    pairs = [name.strip().partition(".") for name in names.split(",")]
    whole = [owner for owner, _, method in pairs if not method]
    if len({owner for owner, _, _ in pairs}) != 1 or (whole and len(pairs) > 1):
        raise SourceError(f"exercise {target}: name one function, or methods of one class")
    return pairs[0][0], [method for _, _, method in pairs if method]


def methods_of(node: ast.ClassDef, names: list[str], target: str) -> list[ast.FunctionDef]:
    """Return the methods that the learner writes, in the order of the source; all for no names."""
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    for name in names:
        if name not in {method.name for method in methods}:
            raise SourceError(f"exercise {target}: class {node.name} has no method {name}")
    return [method for method in methods if not names or method.name in names]


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Return the index of a definition's first line, its decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1


def body_start(function: ast.FunctionDef) -> int:
    """Return the index of the line after a function's docstring."""
    return function.body[0].end_lineno or 0


def needed_imports(tree: ast.Module, node: ast.FunctionDef | ast.ClassDef, module: str) -> str:
    """Return the imports that a definition needs to stand alone in a cell, local classes too."""
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    statements = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    wanted = [line for n in statements for line in import_lines(n, used, module)]
    text = ast.unparse(node)  # `import torch._dynamo` binds torch too, and is for the module alone
    wanted = [w for w in wanted if not re.fullmatch(r"import \S+\.\S+", w) or w[7:] in text]
    own = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n is not node]
    wanted += [f"from {module} import {name}" for name in own if name in used]
    return "\n".join(wanted) + "\n\n\n" if wanted else ""


def import_lines(node: ast.Import | ast.ImportFrom, used: set[str], module: str) -> Iterator[str]:
    """Yield the parts of one import that bind a used name, relative ones made absolute."""
    for alias in node.names:
        if (alias.asname or alias.name).split(".")[0] not in used:
            continue
        named = alias.name + (f" as {alias.asname}" if alias.asname else "")
        if isinstance(node, ast.Import):
            yield f"import {named}"
            continue
        package = module.split(".")[: -node.level] if node.level else []
        yield f"from {'.'.join([*package, *filter(None, [node.module])])} import {named}"


# Phase 3: notebooks.


def build_notebook(cells: list[Cell], *, solution: bool) -> dict[str, Any]:
    """Return the notebook (without outputs) as plain data."""
    built = [notebook_cell(cell, solution=solution) for cell in cells]
    return {"cells": built, "metadata": NOTEBOOK_METADATA, "nbformat": 4, "nbformat_minor": 5}


def notebook_cell(cell: Cell, *, solution: bool) -> dict[str, Any]:
    """Return one cell as nbformat 4.5 wants it, keys in sorted order."""
    text = cell_text(cell, solution=solution)
    tags = [*(["exercise"] if cell.kind == "exercise" else []), *cell.tags]
    metadata: dict[str, Any] = {"jupyter": {"source_hidden": True}} if cell.hidden else {}
    if tags:
        metadata["tags"] = tags
    built: dict[str, Any] = {
        "cell_type": "markdown" if cell.kind == "markdown" else "code",
        "id": cell.label,
        "metadata": metadata,
        "source": text.splitlines(keepends=True),
    }
    if cell.kind != "markdown":
        built |= {"execution_count": None, "outputs": []}
    return dict(sorted(built.items()))


def cell_text(cell: Cell, *, solution: bool) -> str:
    """Return what stands in the cell."""
    if cell.kind == "markdown":
        lines = cell.body.split("\n")
        return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    if cell.kind == "exercise":
        exercise = find_exercise(cell.target)
        text = exercise.answer if solution else exercise.stub
        return f"{text}\n\n\n{cell.body}" if cell.body else text
    return cell.body


def to_json(notebook: dict[str, Any]) -> str:
    """Write a notebook the same way each time."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


# Phase 4: outputs of the cells that ask for them.


def keeps_output(cell: dict[str, Any]) -> bool:
    """Tell whether this cell's output is part of the solution notebook."""
    return KEEP_OUTPUT in cell["metadata"].get("tags", [])


def same_source(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Tell whether two notebooks differ in outputs at most."""
    bare = [{**c, "outputs": [], "execution_count": None} for c in old["cells"] if "outputs" in c]
    return [c for c in new["cells"] if "outputs" in c] == bare


def take_outputs(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Copy the kept outputs of an executed notebook into a fresh one, and nothing else."""
    executed = {cell["id"]: cell for cell in old["cells"]}
    for cell in new["cells"]:
        if keeps_output(cell):
            cell["outputs"] = executed[cell["id"]]["outputs"]
            cell["execution_count"] = executed[cell["id"]]["execution_count"]


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a notebook down to the last cell that keeps its output; no timing, no widget state."""
    import nbformat
    from nbclient import NotebookClient

    last = max(i for i, cell in enumerate(notebook["cells"]) if keeps_output(cell))
    cells = notebook["cells"][: last + 1]
    node = nbformat.reads(to_json({**notebook, "cells": cells}), as_version=4)
    client = NotebookClient(
        node,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return json.loads(nbformat.writes(client.execute()))


# Phase 5: the files.


@dataclass(frozen=True)
class Product:
    """One file that the builder writes, and what it must hold."""

    path: Path
    notebook: dict[str, Any]

    @property
    def stale(self) -> bool:
        """Whether the file on disk is missing or differs."""
        return not self.path.exists() or self.path.read_text(encoding="utf-8") != self.text

    @property
    def text(self) -> str:
        """The file's text."""
        return to_json(self.notebook)


def build_chapter(source: Path, root: Path = ROOT, *, fresh: bool = False) -> list[Product]:
    """Return the chapter's two files; outputs come from disk while the code is the same.

    Args:
        source: the chapter's percent file.
        root: where `course/` and `solutions/` lie.
        fresh: run the solution although its code did not change.
    """
    cells = read_cells(source)
    learner = Product(
        root / "course" / f"{source.stem}.ipynb", build_notebook(cells, solution=False)
    )
    path = root / "solutions" / f"{source.stem}.ipynb"
    solution = build_notebook(cells, solution=True)
    if any(keeps_output(cell) for cell in solution["cells"]):
        old = None if fresh or not path.exists() else json.loads(path.read_text(encoding="utf-8"))
        if old is None or not same_source(old, solution):
            old = execute(solution, path.parent)
        take_outputs(old, solution)
    return [learner, Product(path, solution)]


def check_chapter(source: Path, root: Path = ROOT) -> list[Path]:
    """Return the chapter's stale files, without running anything."""
    cells, stale = read_cells(source), []
    for folder, solution in (("course", False), ("solutions", True)):
        product = Product(
            root / folder / f"{source.stem}.ipynb", build_notebook(cells, solution=solution)
        )
        if solution and product.path.exists():
            old = json.loads(product.path.read_text(encoding="utf-8"))
            if same_source(old, product.notebook):
                take_outputs(old, product.notebook)
        if product.stale:
            stale.append(product.path)
    return stale


def main(arguments: list[str]) -> int:
    """Build or check every chapter; the exit code is 1 when a file is stale."""
    unknown = set(arguments) - {"--check", "--execute"}
    if unknown:
        print(f"unknown option {sorted(unknown)[0]}: use --check or --execute", file=sys.stderr)
        return 2
    sources = sorted((ROOT / "course/_src").glob("[0-9][0-9]_*.py"))
    if "--check" in arguments:
        stale = [path for source in sources for path in check_chapter(source)]
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run `python course/build.py`")
        return 1 if stale else 0
    for product in (p for s in sources for p in build_chapter(s, fresh="--execute" in arguments)):
        if product.stale:
            product.path.parent.mkdir(exist_ok=True)
            product.path.write_text(product.text, encoding="utf-8")
            print(f"wrote {product.path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
