"""Chapter 0: plugging, how the learner's function becomes part of the engine.

Owns the list of what is plugged in. The engine looks every exercise up through its module
(`flat.shard_bounds(...)`), so that setting the module's attribute is enough; of a class one
method can be replaced ("zerolab.zero1:Zero1.reduce"). `rebinding` gives a plugged function the
names of its module. What is plugged in travels to rank processes with every run, and is taken
out there when the run ends.
"""

import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ..comm import travel
from ..errors import UsageError
from . import exercise as exercises
from . import rebuild
from .exercise import target_module
from .rebinding import rebind, rebind_member
from .tripwire import tripwire


@dataclass(frozen=True, slots=True)
class Plugged:
    """One function that stands in for the package's own."""

    function: Callable[..., Any]
    verified: bool  # its check passed
    original: Callable[..., Any]
    written: Callable[..., Any]  # as the learner wrote it, in the notebook's namespace
    guarded: bool = False  # calling the package's own meanwhile is a verdict: it is being checked


_plugged: dict[str, Plugged] = {}
_skipped: set[str] = set()  # targets whose exercise the learner goes on without


def plug(target: str, function: Callable[..., Any], *, verified: bool) -> None:
    """Let the engine use `function` for `target` until `unplug`.

    Args:
        target: such as "zerolab.flat:shard_bounds", or a method, "zerolab.zero1:Zero1.reduce".
        function: the learner's; for a method, the class in which it stands will do.
        verified: whether its check passed.
    """
    bound, original = stand_in(target, function), reference(target)
    _change(target, Plugged(bound, verified, original, function), bound)


def unplug(target: str) -> None:
    """Let the engine use its own function again; does nothing where it does already."""
    if target in _plugged:
        _change(target, None, _plugged[target].original)


def reset() -> None:
    """Unplug everything: the whole engine is the package's own."""
    for target in list(_plugged):
        unplug(target)


def skip(target: str) -> None:
    """Note that the learner goes on without this one, until something is plugged in for it."""
    unplug(target)
    _skipped.add(target)


def _change(target: str, entry: Plugged | None, function: Callable[..., Any]) -> None:
    """Put a function in its place; engines that live will ask to be built anew."""
    before = signature()
    _skipped.discard(target)
    owner, name = place(target)
    if entry is None:
        _plugged.pop(target, None)
    else:
        _plugged[target] = entry
    setattr(owner, name, function)
    rebuild.watch(before, signature)


def signature() -> dict[str, Hashable]:
    """Return what is plugged in as values to compare: the same code is equal, wherever it is."""
    found = {target: entry.written for target, entry in _plugged.items()}
    return {target: tuple(codes_of(own)) or id(own) for target, own in found.items()}


def place(target: str) -> tuple[Any, str]:
    """Return the module or class that has a target as its attribute, and the attribute's name."""
    owner: Any = target_module(target)
    *classes, name = target.partition(":")[2].split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def stand_in(target: str, function: Any) -> Any:
    """Return the learner's function, class or method as if it had been written in its place.

    Raises:
        UsageError: a class lacks the method that was asked for.
    """
    owner, name = place(target)
    module = target_module(target)
    if not isinstance(owner, type):
        return rebind(function, module)
    if isinstance(function, type):
        if name not in vars(function):
            raise UsageError(f"class {function.__name__} has no method {name}: define it there")
        function = vars(function)[name]
    return rebind_member(function, module, types.CellType(owner))


@contextmanager
def plugged(
    target: str,
    function: Callable[..., Any],
    *,
    written: Callable[..., Any] | None = None,
    guarded: bool = False,
) -> Iterator[None]:
    """Use `function` for `target` inside the `with` block, and what was there before after it.

    Args:
        target: such as "zerolab.flat:shard_bounds".
        function: what stands in for it here, and in rank processes.
        written: what rank processes use instead, where `function` only wraps it.
        guarded: let rank processes notice a call of the package's own function.
    """
    before, entry = running(target), _plugged.get(target)
    bound, original = stand_in(target, function), reference(target)
    _change(target, Plugged(bound, False, original, written or function, guarded), bound)
    try:
        yield
    finally:
        _change(target, entry, before)


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
            _change(target, entry, entry.function)


def running(target: str) -> Any:
    """Return the function that the engine uses for `target` now."""
    owner, name = place(target)
    return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)


def reference(target: str) -> Any:
    """Return the package's own function, whatever is plugged in."""
    return _plugged[target].original if target in _plugged else running(target)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One function on its way to a rank process."""

    target: str
    function: bytes
    verified: bool
    guarded: bool


@dataclass(frozen=True, slots=True)
class Travelling:
    """What is plugged in here, on its way to a rank process."""

    parcels: tuple[Parcel, ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Plug it in there, for one run."""
        reset()
        with ExitStack() as guards:
            for parcel in self.parcels:
                function, _ = travel.unpack(parcel.function)
                if parcel.guarded:
                    guards.enter_context(tripwire(reference(parcel.target)))
                plug(parcel.target, function, verified=parcel.verified)
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
            Parcel(target, travel.pack_call(one.written, ()), one.verified, one.guarded)
            for target, one in _plugged.items()
        )
    )


travel.register_luggage("lab.plug", travelling)


def functions_of(answer: Any) -> list[types.FunctionType]:
    """Return a function itself, or all methods of a class; nothing for other things."""
    members = list(vars(answer).values()) if isinstance(answer, type) else [answer]
    members = [getattr(m, "__func__", m) for m in members]  # of static and class methods
    members += [m.fget for m in members if isinstance(m, property)]
    return [member for member in members if isinstance(member, types.FunctionType)]


def codes_of(answer: Any) -> list[types.CodeType]:
    """Return the code of a function, or of all methods of a class."""
    return [function.__code__ for function in functions_of(answer)]


def code_of(answer: Any) -> types.CodeType | None:
    """Return the code of a function, or of the first method of a class; None for others."""
    return next(iter(codes_of(answer)), None)


def entries() -> dict[str, Plugged]:
    """Return what is plugged in, by target."""
    return dict(_plugged)


def codes() -> set[types.CodeType]:
    """Return the code of everything that is plugged in: what runs as the learner's own."""
    return {code for entry in _plugged.values() for code in codes_of(entry.function)}


def status(chapter: str) -> str:
    """Say of each exercise of a chapter whose function the engine runs on.

    Example: "running on: your shard_bounds, reference padded_numel".
    """
    return listed([exercise.target for exercise in exercises.in_chapter(chapter)])


def listed(targets: list[str]) -> str:
    """Say of some targets whose function stands behind each."""
    return f"running on: {', '.join(map(whose, dict.fromkeys(targets)))}"


def whose(target: str) -> str:
    """Say whose function stands behind a target: "your NAME" or "reference NAME"."""
    name = target.partition(":")[2]
    if target not in _plugged:
        return f"reference {name}{' (skipped)' if target in _skipped else ''}"
    return f"your {name}" if _plugged[target].verified else f"your {name} (unverified)"
