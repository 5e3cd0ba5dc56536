"""Chapter 0: the lab, what a notebook needs to teach: exercises, checks, plugging, runs to look at.

Reading order:

    outcome exercise       how an attempt can end; what an exercise is
    rebinding plug         the answer becomes part of the engine
    rebuild whose          ... and engines that are older say so; whose code runs
    tripwire evaluate      no answer may call the reference; evidence is gathered
    evidence               ranks, and one tiny model that they train
    child sandbox          ... in another process, which may hang or die
    cards checking         what the learner sees: check, hint, solution
    hunting                a wrong engine, found by the evidence it leaves
    live training table    a run whose memory can be watched; runs side by side
    tracing                one step as a tree of calls, the learner's own among them
    engine_pieces          the same step by module and moment, for a picture
    prediction             a number to commit to before it is measured
    quiz_*                 questions: schema, bank, expression, units, grade, page, session
    progress               the learner's own log, and what it adds up to (progress_summary)
    own_text own_copy      a package that runs by itself, with the learner's functions in it
    steering               resume, reset, skip: which of them the engine runs on
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
    "engine_map": "engine_pieces",
    "hint": "checking",
    "my_zerolab": "own_copy",
    "plugged": "plug",
    "predict": "prediction",
    "quiz": "quiz_session",
    "reset": "steering",
    "resume": "steering",
    "running": "whose",
    "self_test": "quiz_self_test",
    "skip": "steering",
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
