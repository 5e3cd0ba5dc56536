"""Chapter 3: wrong answers made from the right one, by changing its text.

Owns no data. A wrong answer of thirty lines that differs in one is written as that one line:
what somebody who believes this would have typed in its place. The text is the package's own, so
it must hold the line exactly once; otherwise the package has changed and this says so.
"""

import inspect
import linecache
import sys
from typing import Any

from ..exercise import Mutant, target_module


def source_of(target: str) -> str:
    """Return the package's text of "zerolab.turns:Turn", whatever is plugged in."""
    module, name = target_module(target), target.partition(":")[2]
    lines = inspect.getsource(sys.modules[module.__name__]).splitlines(keepends=True)
    heads = (f"def {name}(", f"class {name}(", f"class {name}:")
    first = next(number for number, line in enumerate(lines) if line.startswith(heads))
    return "".join(inspect.getblock(lines[first:]))


def rewritten(target: str, name: str, believes: str, *changes: tuple[str, str]) -> Mutant:
    """Return the package's function or class with some lines changed, as a mutant.

    Args:
        target: what is changed, such as "zerolab.turns:Turn".
        name: of the mutant.
        believes: the misconception of somebody who writes this.
        changes: pairs (text that is there once, text in its place).
    """
    source, module, old_name = source_of(target), target_module(target), target.partition(":")[2]
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{target} holds {old!r} {source.count(old)} times, not once")
        source = source.replace(old, new)
    for head in ("def ", "class "):
        source = source.replace(f"{head}{old_name}", f"{head}{name}", 1)
    file = f"<mutant {name} of {target}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = dict(vars(module))
    exec(compile(source, file, "exec"), namespace)
    mutant = namespace[name]
    mutant.__doc__ = believes
    return Mutant(mutant)
