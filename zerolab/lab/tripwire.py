"""Chapter 0: the tripwire, which notices that an answer calls the function it should replace.

Owns nothing between two checks. The code object of the package's function is replaced, not a
name: an alias that was taken before is the same function object. `calls_by_attribute` finds the
other way to go round in circles: while an answer is checked it stands in the package's place, so
that `flat.shard_bounds(...)` inside it calls the answer itself.
"""

import dis
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any


class ReferenceCalled(Exception):  # noqa: N818 - a verdict, not an error of the program
    """The answer called the package's own function instead of doing the work."""


def _tripwire(*args: Any, _trip: Callable[[], None], **kwargs: Any) -> Any:
    _trip()


@contextmanager
def tripwire(function: Any) -> Iterator[None]:
    """Let every call of `function`, under whatever name, raise `ReferenceCalled`.

    Of a class, every method is guarded that can be.
    """
    if isinstance(function, type):
        with ExitStack() as methods:
            for method in vars(function).values():
                methods.enter_context(tripwire(method))
            yield
        return
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        yield
        return

    def trip() -> None:
        raise ReferenceCalled(function.__name__)

    code, keyword_defaults = function.__code__, function.__kwdefaults__
    function.__code__, function.__kwdefaults__ = _tripwire.__code__, {"_trip": trip}
    try:
        yield
    finally:
        function.__code__, function.__kwdefaults__ = code, keyword_defaults


def calls_by_attribute(code: CodeType | None, name: str) -> bool:
    """Tell whether some code takes `name` from an object, as in `flat.shard_bounds`."""
    if code is None:
        return False
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.opname.startswith(
            ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
        ):
            return True
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return any(calls_by_attribute(one, name) for one in inner)
