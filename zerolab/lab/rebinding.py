"""Chapter 0: rebinding, the learner's function as if it had been written in the engine's module.

Owns nothing. A rebound function sees the names of that module first and the notebook's
functions, classes and modules after them: a scratch variable of the notebook cannot break the
engine.
"""

import types
from collections.abc import Callable
from typing import Any

SHARED_TYPES = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)


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

    def __contains__(self, name: object) -> bool:
        """Tell what can be looked up, for whoever sends the function to another process."""
        return super().__contains__(name) or (isinstance(name, str) and self._finds(name))

    def _finds(self, name: str) -> bool:
        in_notebook = isinstance(self._notebook.get(name), SHARED_TYPES)
        return name in vars(self._module) or in_notebook


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
    # Not the engine's module: a rank process would be sent its name, and find the engine's own.
    bound.__module__ = function.__module__
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
        name: rebind_member(member, module, itself)
        for name, member in vars(own).items()
        if name not in ("__dict__", "__weakref__")
    }
    copy = type(own)(own.__name__, own.__bases__, members)
    itself.cell_contents = copy
    return copy


def rebind_member(member: Any, module: types.ModuleType, itself: types.CellType) -> Any:
    """Return a member of a class as if that class, which the cell holds, stood in `module`."""
    if isinstance(member, staticmethod | classmethod):
        return type(member)(rebind_member(member.__func__, module, itself))
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return property(*(rebind_member(part, module, itself) for part in parts))
    if not isinstance(member, types.FunctionType):
        return member
    names = member.__code__.co_freevars
    cells = member.__closure__ or ()
    closure = [itself if n == "__class__" else c for n, c in zip(names, cells, strict=True)]
    return _rebind_function(member, module, tuple(closure) if cells else None)
