"""Chapter 0: one attempt, evaluated: run the check on the answer and say what came of it.

Owns the memory of the answer's last call. The same code runs in the child process (see `child`)
and, with `debug=True`, in the notebook's own; its evidence comes from ranks of the world that
ZEROLAB_WORLD names (see `evidence`). Phases: lay the tripwire, plug the answer in, gather
evidence, turn whatever happened into a `Report`; after a wrong answer, look for the mutant that
fails in exactly the same way.
"""

import re
import threading
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..comm import RunTimeoutError, source
from ..errors import DeadlockError
from ..records import RankRow
from . import evidence, plug
from .exercise import Exercise, Mutant
from .outcome import Outcome, Report, Skipped, Wrong
from .tripwire import ReferenceCalled, calls_by_attribute, tripwire

MAX_REPR = 120
MAX_DEPTH = 64  # of an answer inside itself: deeper, and a callback of torch's may not survive it
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
RANK = re.compile(r"raised by rank (?P<rank>\d+);")  # a note that a run puts on an error
MEMORY = (torch.OutOfMemoryError, MemoryError)
VERDICTS = (
    (Wrong, Outcome.FAIL),
    (ReferenceCalled, Outcome.FAIL),
    (Skipped, Outcome.SKIPPED),
    (NotImplementedError, Outcome.UNATTEMPTED),
    (DeadlockError, Outcome.DEADLOCK),
    (RunTimeoutError, Outcome.TIMEOUT),
    (MEMORY, Outcome.OOM),
)
OTHERWISE = Outcome.EXCEPTION
UNUSABLE = (ReferenceCalled, NotImplementedError, RunTimeoutError)
SAY_IT_THEMSELVES = (Wrong, Skipped, DeadlockError, *MEMORY)
SAID_FOR = {
    "MemoryError": "The process ran out of memory.",
    "NotImplementedError": "Nothing here yet: replace the line that raises NotImplementedError.",
    "RecursionError": "RecursionError: the function calls itself without an end.",
}


_inside = threading.local()  # `depth`: how deep the rank of this thread is in the answer


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
        depth = getattr(_inside, "depth", 0)
        if depth == MAX_DEPTH:
            raise RecursionError(f"{self.__name__} calls itself, {depth} deep")
        _inside.depth = depth + 1
        try:
            return self.function(*args, **kwargs)
        finally:
            _inside.depth = depth


def short(value: Any) -> str:
    """Return a value's repr, cut to what a card can hold; a tensor as its type and shape."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}..."


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
    evidence.forget_worlds()
    original = plug.reference(exercise.target)
    recorder: Any = None
    try:
        if _is_reference(answer, original, exercise):
            raise ReferenceCalled(exercise.name)
        recorder = _recorded(answer, exercise)
        stand_in = plug.plugged(exercise.target, recorder, written=answer, guarded=True)
        with tripwire(original), stand_in:
            for fact in exercise.check(recorder):
                report.proven.append(fact)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = _verdict_on(raised, exercise, answer)
        explain(report, error, exercise, getattr(recorder, "call", ""))
        _locate(report, error, answer)
    report.world = evidence.worlds_seen()
    return report


def _recorded(answer: Any, exercise: Exercise) -> Any:
    """Return what stands in for the answer: a function remembers its calls."""
    bound = plug.stand_in(exercise.target, answer)
    is_part = isinstance(plug.place(exercise.target)[0], type) or isinstance(bound, type)
    return bound if is_part else Recorder(bound, exercise.name)


def _is_reference(answer: Any, original: Any, exercise: Exercise) -> bool:
    """Whether an answer is the package's own, or a class that inherits it."""
    if isinstance(original, type):
        return isinstance(answer, type) and issubclass(answer, original)
    if isinstance(answer, type):
        owner, name = plug.place(exercise.target)
        inherits = isinstance(owner, type) and issubclass(answer, owner)
        answer = vars(answer).get(name, original if inherits else None)
    return getattr(answer, "__code__", None) is original.__code__


def _look_alike(exercise: Exercise, report: Report) -> Mutant | None:
    """Return the mutant that fails with the same message, if there is one."""
    for mutant in exercise.mutants:
        if _said_of(exercise, mutant, evidence.chosen_world()) == report.message:
            return mutant
    return None


@cache
def _said_of(exercise: Exercise, mutant: Mutant, world: str) -> str:
    """Return the message of a mutant in a world; it is the same each time."""
    return _attempt(exercise, mutant.function).message


def explain(report: Report, error: BaseException, exercise: Exercise, call: str) -> None:
    """Fill the report with what an error means."""
    report.call = getattr(error, "call", "") or call
    report.outcome = next((out for kind, out in VERDICTS if isinstance(error, kind)), OTHERWISE)
    report.message = describe(error, exercise)
    # SystemExit would end the kernel, and what hangs here hangs in the notebook too.
    report.usable = isinstance(error, Exception) and not isinstance(error, UNUSABLE)
    if isinstance(error, Wrong):
        report.expected, report.observed = error.expected, error.observed
        report.rank = error.rank
    elif isinstance(error, RunTimeoutError):
        busy = [row.rank for row in _busy(error)]
        report.rank = busy[0] if len(busy) == 1 else None
    elif report.outcome is OTHERWISE:
        found = RANK.search("\n".join(getattr(error, "__notes__", ())))
        report.rank = int(found["rank"]) if found else None


def describe(error: BaseException, exercise: Exercise) -> str:
    """Say an exception in a sentence, with a word for those that say little themselves."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, RunTimeoutError):
        return f"It did not come back: {text.removeprefix('timeout: ')}"
    if isinstance(error, SAY_IT_THEMSELVES):
        return text or SAID_FOR.get(name, name)
    if isinstance(error, ReferenceCalled):
        asked = f"This calls {exercise.target.replace(':', '.')}, the function that you are asked"
        itself = isinstance(error.__cause__, RecursionError)
        why = " to write: while it is checked that is your answer, which calls itself." * itself
        return f"{asked}{why or ' to write.'} Compute the answer yourself."
    if isinstance(error, SystemExit):
        return f"It raised SystemExit({text}): leave sys.exit() and exit() out of a function."
    if isinstance(error, NameError):
        return f"NameError: {text}. Variables of the notebook are not visible in here; pass them."
    return SAID_FOR.get(name) or (f"{name}: {text}" if text else name)


def _verdict_on(error: BaseException, exercise: Exercise, answer: Any) -> BaseException:
    """Return the error, or what an endless recursion through the package's name really is."""
    name = exercise.name.rpartition(".")[2]
    codes = plug.codes_of(answer)
    if isinstance(error, RecursionError) and any(calls_by_attribute(code, name) for code in codes):
        verdict = ReferenceCalled(name)
        verdict.__cause__ = error
        return verdict
    return error


def _busy(error: BaseException) -> list[RankRow]:
    """Return which ranks computed when a run was ended; one without a turn has no line."""
    rows = error.table if isinstance(error, RunTimeoutError) else ()
    return [row for row in rows if row.state == "computing" and row.where]


def _locate(report: Report, error: BaseException, answer: Callable[..., Any]) -> None:
    """Note the last line of the learner's own code that the error passed through, on any rank."""
    files = {code.co_filename for code in plug.codes_of(answer)}
    frames = traceback.extract_tb(error.__traceback__)
    passed = [(frame.filename, frame.lineno or 0) for frame in frames]
    for note in getattr(error, "__notes__", ()):  # a rank process sends its traceback as text
        passed += [(found["file"], int(found["line"])) for found in FRAME.finditer(note)]
    for row in _busy(error):  # it was stopped in its thread: the error passed through no frame
        _, _, line = row.where.rpartition(":")
        passed += [(f, int(line)) for f in files if source.short(f"{f}:{line}") == row.where]
    own = [(file, line) for file, line in passed if file in files]
    if own and report.outcome not in (Outcome.FAIL, Outcome.UNATTEMPTED, Outcome.SKIPPED):
        report.file, report.line = own[-1]
