"""Chapter 0: plugging, how the learner's function becomes part of the engine.

Owns the list of what is plugged in. The engine looks every exercise up through its module
(`flat.shard_bounds(...)`), so that setting the module's attribute is enough. A plugged
function sees the names of that module first and the notebook's functions, classes and
modules after them: a scratch variable of the notebook cannot break the engine. What is plugged in
travels to rank processes with every run, and is taken out there when the run ends.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..comm import travel
from . import exercise as exercises
from .exercise import target_module

SHARED_TYPES = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)


@dataclass(frozen=True, slots=True)
class Plugged:
    """One function that stands in for the package's own."""

    function: Callable[..., Any]
    verified: bool  # its check passed
    original: Callable[..., Any]
    written: Callable[..., Any]  # as the learner wrote it, in the notebook's namespace


_plugged: dict[str, Plugged] = {}


class Namespace(dict):
    """The globals of a plugged function: what it sets itself, its module's, the notebook's."""

    def __init__(self, module: types.ModuleType, notebook: dict[str, Any]) -> None:
        super().__init__(__builtins__=__builtins__, __name__=module.__name__)
        self._module = module
        self._notebook = notebook._notebook if isinstance(notebook, Namespace) else notebook

    def __missing__(self, name: str) -> Any:
        if name in vars(self._module):
            return vars(self._module)[name]
        value = self._notebook.get(name)
        if isinstance(value, SHARED_TYPES):
            return value
        raise KeyError(name)


def rebind(function: Callable[..., Any], module: types.ModuleType) -> Callable[..., Any]:
    """Return a function or class as if it had been written in `module`; other callables as is."""
    if isinstance(function, type):
        return _rebind_class(function, module)
    if isinstance(function, types.FunctionType):
        return _rebind_function(function, module, function.__closure__)
    return function


def _rebind_function(
    function: types.FunctionType,
    module: types.ModuleType,
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    bound = types.FunctionType(
        function.__code__,
        Namespace(module, function.__globals__),
        function.__name__,
        function.__defaults__,
        closure,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__doc__ = function.__doc__
    bound.__qualname__ = function.__qualname__
    bound.__dict__.update(function.__dict__)
    return bound


def _rebind_class(own: type, module: types.ModuleType) -> type:
    """Return a copy of a class whose methods are rebound; `super()` in them finds the copy."""
    if "__slots__" in vars(own):
        return own  # a copy would clash with its own descriptors
    itself = types.CellType()
    members = {
        name: _rebind_member(member, module, itself)
        for name, member in vars(own).items()
        if name not in ("__dict__", "__weakref__")
    }
    copy = type(own)(own.__name__, own.__bases__, members)
    itself.cell_contents = copy
    return copy


def _rebind_member(member: Any, module: types.ModuleType, itself: types.CellType) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return type(member)(_rebind_member(member.__func__, module, itself))
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return property(*(_rebind_member(part, module, itself) for part in parts))
    if not isinstance(member, types.FunctionType):
        return member
    names = member.__code__.co_freevars
    cells = member.__closure__ or ()
    closure = [itself if n == "__class__" else c for n, c in zip(names, cells, strict=True)]
    return _rebind_function(member, module, tuple(closure) if cells else None)


def plug(target: str, function: Callable[..., Any], *, verified: bool) -> None:
    """Let the engine use `function` for `target` until `unplug`.

    Args:
        target: such as "zerolab.flat:shard_bounds".
        function: the learner's.
        verified: whether its check passed.
    """
    module, name = target_module(target), target.partition(":")[2]
    original = _plugged[target].original if target in _plugged else getattr(module, name)
    bound = rebind(function, module)
    _plugged[target] = Plugged(bound, verified, original, function)
    setattr(module, name, bound)


def unplug(target: str) -> None:
    """Let the engine use its own function again; does nothing where it does already."""
    entry = _plugged.pop(target, None)
    if entry is not None:
        setattr(target_module(target), target.partition(":")[2], entry.original)


def reset() -> None:
    """Unplug everything: the whole engine is the package's own."""
    for target in list(_plugged):
        unplug(target)


@contextmanager
def plugged(target: str, function: Callable[..., Any]) -> Iterator[None]:
    """Use `function` for `target` inside the `with` block, and what was there before after it."""
    module, name = target_module(target), target.partition(":")[2]
    before = getattr(module, name)
    setattr(module, name, rebind(function, module))
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def set_aside() -> Iterator[None]:
    """Run on the package's own functions inside the `with` block, whatever is plugged in."""
    kept = dict(_plugged)
    reset()
    try:
        yield
    finally:
        reset()
        for target, entry in kept.items():
            _plugged[target] = entry
            setattr(target_module(target), target.partition(":")[2], entry.function)


def running(target: str) -> Callable[..., Any]:
    """Return the function that the engine uses for `target` now."""
    return getattr(target_module(target), target.partition(":")[2])


def reference(target: str) -> Callable[..., Any]:
    """Return the package's own function, whatever is plugged in."""
    return _plugged[target].original if target in _plugged else running(target)


@dataclass(frozen=True, slots=True)
class Travelling:
    """What is plugged in here, on its way to a rank process: each function as bytes."""

    functions: tuple[tuple[str, bytes, bool], ...]  # target, function, verified

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Plug it in there, for one run."""
        reset()
        for target, data, verified in self.functions:
            function, _ = travel.unpack(data)
            plug(target, function, verified=verified)
        try:
            yield
        finally:
            reset()


def travelling() -> Travelling | None:
    """Return what rank processes are to plug in, None when nothing is.

    Raises:
        UsageError: a function uses something that cannot leave this process.
    """
    if not _plugged:
        return None
    return Travelling(
        tuple(
            (target, travel.pack_call(entry.written, ()), entry.verified)
            for target, entry in _plugged.items()
        )
    )


travel.register_luggage("lab.plug", travelling)


def code_of(answer: Any) -> types.CodeType | None:
    """Return the code of a function, or of the first method of a class; None for others."""
    members = vars(answer).values() if isinstance(answer, type) else [answer]
    return next((m.__code__ for m in members if isinstance(m, types.FunctionType)), None)


def entries() -> dict[str, Plugged]:
    """Return what is plugged in, by target."""
    return dict(_plugged)


def codes() -> set[types.CodeType]:
    """Return the code of everything that is plugged in: what runs as the learner's own."""
    found = [entry.function for entry in _plugged.values()]
    found += [member for own in found if isinstance(own, type) for member in vars(own).values()]
    return {one.__code__ for one in found if isinstance(one, types.FunctionType)}


def status(chapter: str) -> str:
    """Say of each exercise of a chapter whose function the engine runs on.

    Example: "running on: your shard_bounds, reference padded_numel".
    """
    words = [whose(exercise.target) for exercise in exercises.in_chapter(chapter)]
    return f"running on: {', '.join(words)}"


def whose(target: str) -> str:
    """Say whose function stands behind a target: "your NAME" or "reference NAME"."""
    name = target.partition(":")[2]
    if target not in _plugged:
        return f"reference {name}"
    return f"your {name}" if _plugged[target].verified else f"your {name} (unverified)"
