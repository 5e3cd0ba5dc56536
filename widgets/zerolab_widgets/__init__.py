"""Chapter 0: the pictures. They read records, plain data about what ranks did, and never an engine.

Reading order: `theme` (the only place with colours), `bars` (what memory_bars draws, as plain
data), `memory_bars` (the widget), `quiz_card` (questions, asked one by one).
"""

from .memory_bars import MemoryBars
from .quiz_card import QuizCard

__all__ = ["MemoryBars", "QuizCard"]
