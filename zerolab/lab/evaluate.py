"""Chapter 0: one attempt, evaluated: run the check on the answer and say what came of it.

Owns the tripwire that notices when an answer calls the function it should replace. The same
code runs in the child process (see `child`) and, with `debug=True`, in the notebook's own.
Phases: lay the tripwire, plug the answer in, gather evidence, turn whatever happened into a
`Report`; after a wrong answer, look for the mutant that fails in exactly the same way.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch

from ..errors import DeadlockError
from . import plug
from .exercise import Exercise, Mutant
from .outcome import Outcome, Report, Wrong

MAX_REPR = 120


class ReferenceCalled(Exception):  # noqa: N818 - a verdict, not an error of the program
    """The answer called the package's own function instead of doing the work."""


class Recorder:
    """The learner's function, with a memory of its last call."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = name
        self.call = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and remember how."""
        parts = [short(a) for a in args] + [f"{k}={short(v)}" for k, v in kwargs.items()]
        self.call = f"{self.__name__}({', '.join(parts)})"
        return self.function(*args, **kwargs)


def short(value: Any) -> str:
    """Return a value's repr, cut to what a card can hold; a tensor as its type and shape."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}..."


def _tripwire(*args: Any, _trip: Callable[[], None], **kwargs: Any) -> Any:
    _trip()


@contextmanager
def tripwire(function: Any) -> Iterator[None]:
    """Let every call of `function`, under whatever name, raise `ReferenceCalled`.

    The code object is replaced, not a name: an alias taken before is the same function object.
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


def evaluate(exercise: Exercise, answer: Callable[..., Any]) -> Report:
    """Run the check on an answer and report, however it ends (Ctrl-C aside)."""
    report = _attempt(exercise, answer)
    if report.outcome is Outcome.FAIL:
        mutant = _look_alike(exercise, report)
        if mutant is not None:
            report.mutant, report.misconception = mutant.name, mutant.misconception
    return report


def _attempt(exercise: Exercise, answer: Callable[..., Any]) -> Report:
    """Run the check once."""
    report = Report(exercise.id, Outcome.PASS)
    original = plug.reference(exercise.target)
    bound = plug.rebind(answer, exercise.module)
    recorder = bound if isinstance(bound, type) else Recorder(bound, exercise.name)
    try:
        if _is_reference(answer, original):
            raise ReferenceCalled(exercise.name)
        with tripwire(original), plug.plugged(exercise.target, recorder):
            for fact in exercise.check(recorder):
                report.proven.append(fact)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        explain(report, error, exercise, getattr(recorder, "call", ""))
        _locate(report, error, answer)
    return report


def _is_reference(answer: Any, original: Any) -> bool:
    """Whether an answer is the package's own, or a class that inherits it."""
    if isinstance(original, type):
        return isinstance(answer, type) and issubclass(answer, original)
    return getattr(answer, "__code__", None) is original.__code__


def _look_alike(exercise: Exercise, report: Report) -> Mutant | None:
    """Return the mutant that fails with the same message, if there is one."""
    for mutant in exercise.mutants:
        if _attempt(exercise, mutant.function).message == report.message:
            return mutant
    return None


def explain(report: Report, error: BaseException, exercise: Exercise, call: str) -> None:
    """Fill the report with what an error means."""
    report.call = getattr(error, "call", "") or call
    if isinstance(error, Wrong):
        report.outcome, report.message = Outcome.FAIL, error.message
        report.expected, report.observed = error.expected, error.observed
        report.rank = error.rank
    elif isinstance(error, ReferenceCalled):
        report.outcome, report.usable = Outcome.FAIL, False
        report.message = (
            f"This calls {exercise.target.replace(':', '.')}, the function that you are asked "
            f"to write. Compute the answer yourself."
        )
    elif isinstance(error, NotImplementedError):
        report.outcome, report.usable = Outcome.UNATTEMPTED, False
        report.message = "Nothing here yet: replace the line that raises NotImplementedError."
    elif isinstance(error, DeadlockError):
        report.outcome, report.message = Outcome.DEADLOCK, str(error)
    elif isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        report.outcome, report.message = Outcome.OOM, str(error) or "The process ran out of memory."
    else:
        report.outcome = Outcome.EXCEPTION
        report.message = describe(error)
        report.usable = isinstance(error, Exception)  # SystemExit would end the kernel


def describe(error: BaseException) -> str:
    """Say an exception in a line, with a word for those that say little themselves."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, SystemExit):
        return f"It raised SystemExit({text}): leave sys.exit() and exit() out of a function."
    if isinstance(error, RecursionError):
        return "RecursionError: the function calls itself without an end."
    if isinstance(error, NameError):
        return f"NameError: {text}. Variables of the notebook are not visible in here; pass them."
    return f"{name}: {text}" if text else name


def _locate(report: Report, error: BaseException, answer: Callable[..., Any]) -> None:
    """Note the last line of the learner's own code that the error passed through."""
    code = plug.code_of(answer)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    if own and report.outcome not in (Outcome.FAIL, Outcome.UNATTEMPTED):
        report.file, report.line = own[-1].filename, own[-1].lineno or 0
