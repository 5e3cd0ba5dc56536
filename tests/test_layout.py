"""The shape of the package: who may import whom, and how an exercise stays replaceable."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zerolab"
WIDGETS = ROOT / "widgets" / "zerolab_widgets"

# Rows of the table in zerolab/__init__.py: names, then the number of the chapter.
ROWS = re.findall(
    r"^    ([a-z_0-9]+(?: [a-z_0-9]+)*) {2,}\d", (PACKAGE / "__init__.py").read_text(), re.M
)
# Reading order. A module may import those before it, and itself when it is a folder.
ORDER = [name for row in ROWS for name in row.split()] + ["__main__"]
ENGINE = ORDER[: ORDER.index("sim")]
# Their functions can become exercises, so they are reached through the module.
CHAPTERS = ["spec", *ORDER[ORDER.index("flat") : ORDER.index("zero3") + 1]]
NOT_FOR_THE_ENGINE = {"IPython", "ipywidgets", "plotly", "anywidget", "typer", "zerolab_widgets"}


def sources(folder):
    """Every Python file of a package as (dotted name inside it, tree)."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield parts, ast.parse(path.read_text(encoding="utf-8"))


def at_run_time(node):
    """Walk a tree, but not into `if TYPE_CHECKING:`, which only a type checker reads."""
    yield node
    if not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from at_run_time(child)


def imports(parts, tree, package="zerolab"):
    """Yield (line, module, name) of each import, relative ones as "zerolab.x".

    `from . import flat` yields the module "zerolab.flat" and no name.
    """
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = (package, *parts)[: len(parts) + 1 - node.level]
                base = ".".join((*above, base)).rstrip(".")
            for alias in node.names:
                if base == "zerolab":
                    yield node.lineno, f"zerolab.{alias.name}", None
                else:
                    yield node.lineno, base, alias.name


def internal(module):
    """The name in ORDER that a dotted module belongs to, None for other packages."""
    head, _, rest = module.partition(".")
    return rest.partition(".")[0] if head == "zerolab" and rest else None


def upward_imports(parts, tree):
    """List the imports of what comes later in ORDER."""
    if parts == ("__init__",) or parts[0] not in ORDER:  # lazy; told of by the test of the table
        return []
    own = ORDER.index(parts[0])
    found = [(line, internal(module)) for line, module, _ in imports(parts, tree)]
    return [
        f"line {line} imports {name}"
        for line, name in found
        if name in ORDER and (ORDER.index(name) > own)
    ]


def foreign_imports(parts, tree, forbidden):
    """List the imports of packages that must not be reached from here."""
    return [
        f"line {line} imports {module}"
        for line, module, _ in imports(parts, tree)
        if module.partition(".")[0] in forbidden
    ]


def functions_imported_by_name(parts, tree):
    """List `from .flat import shard_bounds`: a plugged-in version would not be seen."""
    return [
        f"line {line}: from {module} import {name}"
        for line, module, name in imports(parts, tree)
        if name and internal(module) in CHAPTERS and name.islower() and internal(module) != parts[0]
    ]


def is_torch_distributed(node):
    """Tell whether a node names torch.distributed, by import, attribute or string."""
    if isinstance(node, ast.Attribute):
        return node.attr == "distributed" and getattr(node.value, "id", "") == "torch"
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.distributed") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        return any(name.startswith("torch.distributed") for name in whole)
    return isinstance(node, ast.Constant) and node.value == "torch.distributed"


def names_torch_distributed(tree):
    """List the lines that name torch.distributed outside docstrings and comments."""
    return [node.lineno for node in ast.walk(tree) if is_torch_distributed(node)]


def exercises():
    """Every (module, function) that the course asks a learner to write."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "course/_src").glob("*.py"))
    return set(re.findall(r"^# %% exercise zerolab\.([\w.]+):(\w+)", text, re.MULTILINE))


def mentions(node, name):
    """Tell whether an expression names a function, bare or through a module."""
    return any(name in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(node))


def bound_early(tree, name, home=True):
    """List the places that take hold of a function before it is called: these keep the old one.

    `home` is whether this is the function's own module: elsewhere another may have its name.
    """
    early = [(node.lineno, node.value) for node in tree.body if isinstance(node, ast.Assign)]
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            early += [(d.lineno, d) for d in (*node.defaults, *node.kw_defaults) if d is not None]
        elif isinstance(node, ast.Call) and mentions(node.func, "partial"):
            early += [(node.lineno, argument) for argument in node.args]
        elif home and isinstance(node, ast.FunctionDef) and node.name == name:
            early += [(d.lineno, ast.Name(name)) for d in node.decorator_list]
    return [f"line {line} holds {name}" for line, value in early if mentions(value, name)]


def everywhere(rule):
    """Apply a rule to every file of the package and name the files in what it finds."""
    return [
        f"{'/'.join(parts)}: {f}" for parts, tree in sources(PACKAGE) for f in rule(parts, tree)
    ]


def test_the_table_of_the_package_names_every_module():
    assert {parts[0] for parts, _ in sources(PACKAGE)} - {"__init__"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_imports_point_downward():
    assert everywhere(upward_imports) == []


def test_the_package_names_itself_only_relatively():
    def absolute(parts, tree):
        return [
            f"line {node.lineno}"
            for node in ast.walk(tree)
            if (isinstance(node, ast.Import) and any(internal(a.name) for a in node.names))
            or (isinstance(node, ast.ImportFrom) and not node.level and node.module == "zerolab")
            or (isinstance(node, ast.ImportFrom) and not node.level and internal(node.module))
        ]

    assert everywhere(absolute) == []


def test_the_engine_knows_no_notebook_and_no_picture():
    def rule(parts, tree):
        return foreign_imports(parts, tree, NOT_FOR_THE_ENGINE) if parts[0] in ENGINE else []

    assert everywhere(rule) == []


def test_only_comm_names_torch_distributed():
    def rule(parts, tree):
        return [] if parts[0] == "comm" else names_torch_distributed(tree)

    assert everywhere(rule) == []


def test_widgets_read_records_and_estimates_only():
    """What ran comes from records; what has not run from zerolab.sim, and from flat (shard_map)."""
    read = {
        internal(module) or module
        for parts, tree in sources(WIDGETS)
        for _, module, _ in imports(parts, tree, "zerolab_widgets")
        if module.startswith("zerolab.")
    }
    assert read <= {"records", "errors", "sim", "device", "flat"}  # sizes as text; shard_map


def test_functions_of_chapters_are_called_through_their_module():
    assert everywhere(functions_imported_by_name) == []


def test_no_exercise_is_held_before_it_is_called():
    def rule(parts, tree):
        here = ".".join(parts)
        found = [bound_early(tree, name, here == home) for home, name in sorted(exercises())]
        return [place for places in found for place in places]

    assert everywhere(rule) == []


def test_every_exercise_of_the_course_is_a_function_of_the_package():
    defined = {
        (".".join(parts), node.name)
        for parts, tree in sources(PACKAGE)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert exercises()
    assert exercises() <= defined


@pytest.mark.parametrize(
    ("rule", "where", "text"),
    [
        (upward_imports, "flat", "from . import zero3"),
        (upward_imports, "comm/lockstep", "from ..engine import initialize"),
        (upward_imports, "device/ledger", "def late():\n    from .. import comm"),
        (functions_imported_by_name, "zero1", "from .flat import shard_bounds"),
        (functions_imported_by_name, "lab/checks", "from ..optim import segments"),
        (lambda p, t: foreign_imports(p, t, NOT_FOR_THE_ENGINE), "ddp", "import plotly.express"),
        (lambda p, t: names_torch_distributed(t), "ddp", "import torch.distributed as dist"),
        (lambda p, t: names_torch_distributed(t), "ddp", "from torch import distributed"),
        (lambda p, t: names_torch_distributed(t), "ddp", "torch.distributed.barrier()"),
        (lambda p, t: names_torch_distributed(t), "ddp", "import_module('torch.distributed')"),
        (lambda p, t: bound_early(t, "cut"), "ddp", "def f(cutter=flat.cut): ..."),
        (lambda p, t: bound_early(t, "cut"), "ddp", "def f():\n    return partial(flat.cut, 3)"),
        (lambda p, t: bound_early(t, "cut"), "ddp", "cutter = flat.cut"),
        (lambda p, t: bound_early(t, "cut"), "flat", "@cache\ndef cut(): ..."),
    ],
)
def test_a_planted_offence_is_found(rule, where, text):
    assert rule(tuple(where.split("/")), ast.parse(text))


@pytest.mark.parametrize(
    ("rule", "where", "text"),
    [
        (upward_imports, "zero3", "from . import flat"),
        (upward_imports, "comm/lockstep", "from . import group\nfrom ..records import Mark"),
        (upward_imports, "flat", "if TYPE_CHECKING:\n    from .engine import Engine"),
        (functions_imported_by_name, "zero2", "from .zero1 import Zero1\nfrom . import flat"),
        (lambda p, t: names_torch_distributed(t), "ddp", '"""As torch.distributed does."""'),
        (lambda p, t: bound_early(t, "cut"), "ddp", "def f():\n    return flat.cut(3)"),
    ],
)
def test_good_style_is_left_alone(rule, where, text):
    assert not rule(tuple(where.split("/")), ast.parse(text))


USE_THE_COPY = """
import sys, torch
import my_zerolab
from my_zerolab import comm

def one_sum():
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    return tensor.tolist()

assert my_zerolab.run(one_sum, world_size=2) == [[2.0] * 3] * 2
my_zerolab.initialize
print([name for name in sys.modules if name.partition(".")[0] == "zerolab"])
"""


def test_a_copy_under_another_name_runs_without_the_original(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "my_zerolab", ignore=ignored)
    script = [sys.executable, "-c", USE_THE_COPY]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "[]\n"
