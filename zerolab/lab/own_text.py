"""Chapter 0: the text of what a learner wrote, and the function that a text defines.

Owns nothing. A `Text` stands alone: beside the function, class or method it has whatever of the
notebook that uses, helper functions and imports, so that it can be put into `my_zerolab` (see
`own_copy`) or plugged in again after the notebook's kernel has been restarted.
"""

import ast
import builtins
import dis
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from . import exercise, plug

COPY = "my_zerolab"  # the name of the package into which texts are put


@dataclass(frozen=True, slots=True)
class Text:
    """A function that the learner wrote, as text."""

    source: str  # of the function alone, not indented
    helpers: tuple[str, ...]  # sources of the notebook's functions and imports that it uses
    verified: bool


def text_of(target: str, entry: plug.Plugged) -> Text:
    """Return the text of what is plugged in for a target, and of what it needs."""
    name = target.partition(":")[2]
    source = _source(entry.written, target)
    defined = getattr(entry.written, "__name__", name)
    if "." in name and isinstance(entry.written, type):
        source = _method(source, name.rpartition(".")[2])
    elif defined != name:
        word = "class " if isinstance(entry.written, type) else "def "
        source = source.replace(word + defined, word + name.rpartition(".")[2], 1)
    module = exercise.target_module(target)
    helpers = _helpers(entry.written, module, {name.partition(".")[0]})
    return Text(source, tuple(helpers), entry.verified)


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
    return _segment(text, nodes[-1]) if nodes else ""


def _method(source: str, name: str) -> str:
    """Return one method's text out of that of its class, not indented."""
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)).body
    return _segment(source, next(n for n in body if getattr(n, "name", "") == name))


def _segment(text: str, node: Any) -> str:
    """Return the text of a definition with its decorators, not indented."""
    lines = text.splitlines()[first_line(node) : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def first_line(node: Any) -> int:
    """Return the index of a definition's first line, its decorators included."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1


def _helpers(thing: Any, module: types.ModuleType, seen: set[str]) -> Iterator[str]:
    """Yield the text of whatever a function or class uses that only the notebook has."""
    for part in plug.functions_of(thing):
        for name in sorted(_names(part.__code__)):
            known = name in vars(module) or hasattr(builtins, name) or name in seen
            value = part.__globals__.get(name)
            if known or value is None:
                continue
            seen.add(name)
            yield from _helper(name, value, part.__module__, module, seen)


def _helper(
    name: str, value: Any, notebook: str, module: types.ModuleType, seen: set[str]
) -> Iterator[str]:
    """Yield the text that gives a function one name of the notebook."""
    if value is sys.modules[exercise.PACKAGE]:
        yield f"import {COPY} as {name}"
    elif isinstance(value, types.ModuleType):
        package, _, last = value.__name__.rpartition(".")
        inside = value.__name__.startswith(f"{exercise.PACKAGE}.")
        plain = f"import {value.__name__} as {name}"
        yield f"from {_relative(package, module)} import {last} as {name}" if inside else plain
    elif isinstance(value, types.FunctionType | type) and value.__module__ == notebook:
        yield from _helpers(value, module, seen)
        yield _source(value, f"helper:{name}")
    elif getattr(value, "__module__", None) in sys.modules and hasattr(value, "__name__"):
        yield f"from {_relative(value.__module__, module)} import {value.__name__} as {name}"


def _relative(package: str, module: types.ModuleType) -> str:
    """Return a module of this package as the copy must name it: seen from the function's own."""
    inside, depth = f"{package}.".startswith(f"{exercise.PACKAGE}."), module.__name__.count(".")
    return "." * depth + package.partition(".")[2] if inside else package


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function looks up, its inner functions included."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(_names, inner))


# The other way round.


def function_of(target: str, text: Text) -> Callable[..., Any]:
    """Return what a remembered text defines, as a cell of a notebook would define it.

    Its lines stay known to Python, so that errors quote them and it can be written out again.
    """
    file = f"<{COPY} {target.partition(':')[2]} {abs(hash(text.source))}>"
    source = "\n\n\n".join([*text.helpers, text.source]) + "\n"
    if isinstance(plug.place(target)[0], type):
        source = _in_a_class(text, target)
    source = source.replace(f"import {COPY} as ", f"import {exercise.PACKAGE} as ")
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = exercise.target_module(target)
    names: dict[str, Any] = {**vars(module), "__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    return names[target.partition(":")[2].partition(".")[0]]


def _in_a_class(text: Text, target: str) -> str:
    """Return a remembered method inside a class of its name."""
    class_name = target.partition(":")[2].partition(".")[0]
    method = textwrap.indent(text.source, "    ")
    return "\n\n\n".join([*text.helpers, f"class {class_name}:\n{method}"]) + "\n"
