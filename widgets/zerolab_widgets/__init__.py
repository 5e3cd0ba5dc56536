"""Chapter 0: the pictures. They read records, plain data about what ranks did, and never an engine.

Reading order: `theme` (the only place with colours), `bars` (what memory_bars draws, as plain
data), `memory_bars` (the widget).
"""

from .memory_bars import MemoryBars

__all__ = ["MemoryBars"]
