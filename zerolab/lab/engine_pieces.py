"""Chapter 3: the pieces of the engine by module and moment, and which of them are the learner's.

Owns nothing. One real step is traced (`tracing`), and every function in it is put where it was
called: while the stage was set up, or at one of the five moments. What comes out is plain data,
for a picture that knows no lab.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from . import tracing
from .tracing import Node

MOMENTS = ("init", "pre_forward", "post_forward", "pre_backward", "post_backward", "step")
# What a part of the trace counts as, unless a call in it says otherwise.
_USUAL = {"init": "init", "forward": "pre_forward", "backward": "post_backward", "step": "step"}
_HOOKS = {
    "after_forward": "post_forward",
    "after_model": "post_forward",
    "before_backward": "pre_backward",
    "first_grad": "pre_backward",
}
_DEPTH = 24  # deeper than any call of the engine


def engine_map(*, stage: int = 3, model: str = "gpt-nano") -> dict[str, Any]:
    """Return the functions that one step of the engine calls, for `zerolab_widgets.EngineMap`.

    Args:
        stage: ZeRO stage, 0 to 3.
        model: a preset of `zerolab.gpt`.

    Returns:
        ``stage``, ``moments``, and ``pieces``: one dict for each function and moment, with
        ``module``, ``name``, ``moment``, ``yours``, ``calls``, ``moved`` in bytes on rank 0, and
        ``does``, the first line of its docstring.

    Raises:
        UsageError: a value cannot work.
    """
    trace = tracing.trace(stage=stage, depth=_DEPTH, model=model)
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for part in trace.moments:
        for moment, node in _calls(part, _USUAL[part.name], part.name == "step"):
            module, name = _split(node.name)
            piece = found.setdefault((module, name, moment), _piece(module, name, moment))
            piece["yours"] |= node.yours
            piece["calls"] += node.calls
            piece["moved"] += node.moved
    return {"stage": stage, "moments": list(MOMENTS), "pieces": list(found.values())}


def _calls(node: Node, moment: str, fixed: bool) -> Iterator[tuple[str, Node]]:
    """Return every call below a node with the moment that it belongs to."""
    for child in node.children:
        name = child.name.rpartition(".")[2]
        named = name if name in MOMENTS[1:] else _HOOKS.get(name, moment)
        inside = moment if fixed or moment == "init" else named
        yield inside, child
        yield from _calls(child, inside, fixed)


def _split(name: str) -> tuple[str, str]:
    """Split "zero1.Zero1.reduce" into module and function: ("zero1", "Zero1.reduce")."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:first]), ".".join(parts[first:])


def _piece(module: str, name: str, moment: str) -> dict[str, Any]:
    """Return a function that was not yet called."""
    facts = {"module": module, "name": name, "moment": moment, "does": _does(module, name)}
    return {**facts, "yours": False, "calls": 0, "moved": 0}


def _does(module: str, name: str) -> str:
    """Return the first line of a function's docstring, "" where there is none."""
    thing: Any = importlib.import_module(f"{tracing.PACKAGE}.{module}")
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return (inspect.getdoc(thing) or "").partition("\n")[0] if callable(thing) else ""
