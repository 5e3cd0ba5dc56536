"""Chapter 2: what travels between the caller and its rank processes, as bytes.

Owns the list of what else travels with every call (`register_luggage`), such as the functions
that a learner has plugged in. Functions of a notebook or a script travel by value, so that a
rank needs neither the notebook nor the file, and sees the latest edit. Exceptions travel with
their type where they can; the source lines of notebook cells travel too, so that a table can
quote them.
"""

import importlib
import io
import linecache
import marshal
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from ..errors import RankError, UsageError
from . import source


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with code that keeps its file name and odd modules that go by name."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce code by `marshal`, and a module like torch.backends.mkldnn to its import."""
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        odd = isinstance(obj, ModuleType) and type(obj) is not ModuleType
        if odd and obj.__name__ in sys.modules:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def pack(thing: Any) -> bytes:
    """Turn a result, a report or an argument into bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(thing)
    return buffer.getvalue()


def pack_call(fn: Callable[..., Any], args: tuple) -> bytes:
    """Turn a function and its arguments into bytes; the user's own module goes by value.

    Raises:
        UsageError: something in it cannot travel, such as an open file.
    """
    try:
        with _own_module_by_value(fn):
            return pack((fn, args))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UsageError(
            f"{getattr(fn, '__name__', fn)!r} cannot travel to rank processes: {error}; make what "
            "it needs inside the function, or use the lockstep world"
        ) from error


@contextmanager
def _own_module_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Make cloudpickle copy the functions of the user's module instead of naming them."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    filename = getattr(module, "__file__", None)
    own = filename and not source.is_hidden(filename) and "-packages" not in filename
    if module is None or not own or module.__name__ == "__main__":
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


Scope = Callable[[], AbstractContextManager[Any]]

_luggage: dict[str, Callable[[], Scope | None]] = {}


def register_luggage(name: str, make: Callable[[], Scope | None]) -> None:
    """Let something from outside this package travel to rank processes with every call.

    Args:
        name: whose it is; registering a name again replaces it.
        make: called when ranks are about to be started; returns what every rank process enters
            around the user's function, or None when there is nothing to take along.
    """
    _luggage[name] = make


def pack_luggage() -> list[bytes]:
    """Turn what is to be taken along into bytes."""
    scopes = [make() for make in _luggage.values()]
    return [pack(scope) for scope in scopes if scope is not None]


def unpack(data: bytes) -> Any:
    """Turn bytes back into what `pack` was given."""
    return pickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """Turn an exception into bytes, of its own type if that survives the journey."""
    step = error.__traceback__
    while step is not None and source.is_hidden(step.tb_frame.f_code.co_filename):
        step = step.tb_next  # how the rank process came to call the user's function
    trace = "".join(traceback.format_exception(type(error), error, step or error.__traceback__))
    try:
        data = pack(error)
        unpack(data)
    except Exception:
        data = pack(RankError(f"{type(error).__name__}: {error}"))
    return pack((data, trace))


def unpack_error(data: bytes) -> tuple[BaseException, str]:
    """Return the exception and the traceback it had in its process."""
    inner, trace = unpack(data)
    return unpack(inner), trace


def cell_lines() -> dict[str, list[str]]:
    """Return the source of notebook cells and other code that is in no file."""
    cached = linecache.cache.items()
    return {name: entry[2] for name, entry in list(cached) if len(entry) == 4 and entry[1] is None}


def learn_lines(lines: dict[str, list[str]]) -> None:
    """Make the source of the caller's cells known in this process."""
    for name, text in lines.items():
        linecache.cache[name] = (sum(map(len, text)), None, text, name)
