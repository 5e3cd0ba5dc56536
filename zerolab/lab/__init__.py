"""Chapter 0: the lab, what a notebook needs to teach: exercises, checks, plugging, runs to look at.

Reading order:

    outcome exercise       how an attempt can end; what an exercise is
    plug evaluate          the answer becomes part of the engine; evidence is gathered
    child sandbox          ... in another process, which may hang or die
    cards checking         what the learner sees: check, hint, solution
    hunting                a wrong engine, found by the evidence it leaves
    live training table    a run whose memory can be watched; runs side by side
    tracing                one step as a tree of calls, the learner's own among them
    prediction             a number to commit to before it is measured
    quiz_*                 questions: schema, bank, expression, units, grade, page, session
    progress               the learner's own log, and what it adds up to (progress_summary)
    own_copy               a package that runs by itself, with the learner's functions in it
    workspace              where the learner's copy of the course lies
    chapters               the exercises of each chapter

The names below are all that a notebook uses. They are loaded when they are first used: the
command line reads the workspace without waiting for torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Training": "training",
    "begin": "checking",
    "bug_hunt": "hunting",
    "check": "checking",
    "compare": "table",
    "hint": "checking",
    "my_zerolab": "own_copy",
    "plugged": "plug",
    "predict": "prediction",
    "quiz": "quiz_session",
    "reset": "plug",
    "running": "plug",
    "self_test": "quiz_self_test",
    "solution": "checking",
    "trace": "tracing",
    "train": "training",
    "world_size": "training",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Let a notebook complete the names."""
    return sorted(_HOME)
