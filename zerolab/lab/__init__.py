"""Chapter 0: the lab, what a notebook needs to teach: exercises, checks, plugging, runs to look at.

Reading order:

    outcome exercise       how an attempt can end; what an exercise is
    plug evaluate          the answer becomes part of the engine; evidence is gathered
    child sandbox          ... in another process, which may hang or die
    cards checking         what the learner sees: check, hint, solution
    live training table    a run whose memory can be watched; runs side by side
    quiz_*                 questions: bank, expression, units, grade, page, session, self_test
    progress               the learner's own log, and what it adds up to (progress_summary)
    workspace              where the learner's copy of the course lies
    chapters               the exercises of each chapter

The names below are all that a notebook uses.
"""

from .checking import begin, check, hint, solution
from .plug import plugged, reset, running
from .quiz_self_test import self_test
from .quiz_session import quiz
from .table import compare
from .training import Training, train, world_size

__all__ = [
    "Training",
    "begin",
    "check",
    "compare",
    "hint",
    "plugged",
    "quiz",
    "reset",
    "running",
    "self_test",
    "solution",
    "train",
    "world_size",
]
