"""Chapter 0: the pictures. They read records, plain data about what ranks did, and never an engine.

Reading order: `theme` (the only place with colours), `scripts` (how a script is put together),
`bars` (what memory_bars draws, as plain data), `memory_bars` (the widget), `quiz_card` (questions,
asked one by one), `runs` (a run as pictures read it), `picture` (what small pictures share). Then
each picture comes after its data:

    explore memory_explorer            1   four stages under a capacity line, estimated
    curves memory_timeline             1   the bytes of every rank, event by event
    rounds messages collective_steps   2   a collective, step by step
    stuck deadlock_table               2   the rows of a run that cannot go on
    pulse live_dashboard               3   bars, losses, communication, while a run goes on
    windows lanes step_timeline        3   compute, communication and copies of a step
    engine_map                         3   functions by module and moment, the learner's lit
    layouts shard_map                  4   flat buffers, padding, owners
    lifecycle unit_lifecycle           6   where the parameters of every unit are
"""

from .collective_steps import CollectiveSteps
from .deadlock_table import DeadlockTable
from .engine_map import EngineMap
from .live_dashboard import LiveDashboard
from .memory_bars import MemoryBars
from .memory_explorer import MemoryExplorer
from .memory_timeline import MemoryTimeline
from .quiz_card import QuizCard
from .shard_map import ShardMap
from .step_timeline import StepTimeline
from .unit_lifecycle import UnitLifecycle

__all__ = [
    "CollectiveSteps",
    "DeadlockTable",
    "EngineMap",
    "LiveDashboard",
    "MemoryBars",
    "MemoryExplorer",
    "MemoryTimeline",
    "QuizCard",
    "ShardMap",
    "StepTimeline",
    "UnitLifecycle",
]
