"""Chapter 0: the records, plain facts about what one rank did. All pictures are drawn from these.

Owns no state of a run. Four kinds of fact: a `MemoryEvent` (bytes appeared or went), a
`CollectiveEvent` (ranks talked), a `Mark` (a named moment with the bytes held then) and a
`RankRow` (what a rank was doing when a run stopped). `Records` holds those of one rank in
the order in which they happened, and turns to JSON and back.

Sizes are bytes, times are seconds since the run began, elements count the full logical
tensor of a collective, once a call.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = (
    "param",  # parameters, or a rank's shard of them
    "gathered",  # full parameters of a unit, there only while they are used (stage 3)
    "grad",  # gradients that wait for the optimizer
    "bucket",  # gradients on their way to the other ranks
    "master",  # fp32 copies of the parameters that the optimizer updates
    "optimizer",  # what the optimizer remembers
    "activation",  # born in forward, still alive when backward starts
    "input",  # batches and whatever was made outside the virtual GPU
    "temp",  # everything else
)


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that appeared (`delta` > 0) or went (`delta` < 0) on one virtual GPU."""

    time: float
    delta: int
    total: int  # bytes held after the event
    kind: str  # one of KINDS, what the block turned out to be: the same at its birth and its death
    block: int  # number of the storage, the same for its birth and its death
    op: str  # the operation that allocated, such as "aten.mm"; "free" for a death
    phase: str  # "init", "forward", "backward", "step" or "idle"
    where: str  # "file:line" of the caller's source, "" where unknown


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """One collective as one rank called it. The parts of a composed collective are no events."""

    time: float
    seq: int  # the how-manieth collective of this rank, from 0
    op: str  # "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "send", "recv"
    elements: int  # of the full logical tensor
    nbytes: int  # elements times the size of one
    dtype: str  # "float32", ...
    ranks: int  # how many take part
    purpose: str  # "data", or "control" for norms, flags, losses and the first broadcast
    asynchronous: bool
    phase: str
    where: str  # "file:line" of the caller's source
    label: str = ""  # what is sent, such as the name of a bucket
    peer: int = -1  # the partner of a message, the source of a broadcast
    start: int = -1  # where in its storage a message's tensor begins; -1 where it is all of it
    ended: float = 0.0  # when its `wait` returned; 0 while it is on its way
    blocked: float = 0.0  # seconds in which this rank did nothing else: launching, waiting

    def end(self, ended: float, blocked: float) -> None:
        """Fill in the end, the one fact about a call that is not known when it is made."""
        object.__setattr__(self, "ended", ended)
        object.__setattr__(self, "blocked", blocked)


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment ("grads_ready", "step_end", ...) and the bytes held by kind then."""

    time: float
    name: str
    total: int
    by_kind: dict[str, int]
    peak: int  # the most held so far since the last reset of the peak


@dataclass(frozen=True, slots=True)
class RankRow:
    """What one rank was doing when the run stopped: one row of the table of a deadlock."""

    rank: int
    state: str  # "waiting", "computing", "returned", "raised", "died"
    op: str  # the collective it waits in or last called, "" for none
    seq: int  # number of that collective, -1 for none
    detail: str  # shapes and dtype, the exception, or the exit code
    seconds: float  # how long it has been in this state
    where: str  # "file:line" of the user's own source
    source: str = ""  # the text of that line


@dataclass(slots=True)
class Records:
    """All that one rank recorded, in order."""

    rank: int = 0
    world_size: int = 1
    memory: Sequence[MemoryEvent] = field(default_factory=list)  # a device.Timeline while it grows
    collectives: list[CollectiveEvent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    parts: list[CollectiveEvent] = field(default_factory=list)  # messages of composed collectives
    world: str = ""  # "lockstep", "gloo", "nccl", "solo"; "" where nobody said

    def to_json(self) -> str:
        """Write the records as one line of JSON."""
        facts = {
            "rank": self.rank,
            "world_size": self.world_size,
            "world": self.world,
            "memory": [asdict(event) for event in self.memory],
            "collectives": [asdict(event) for event in self.collectives],
            "marks": [asdict(mark) for mark in self.marks],
            "parts": [asdict(event) for event in self.parts],
        }
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Records":
        """Read what `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(
            rank=data["rank"],
            world_size=data["world_size"],
            memory=[MemoryEvent(**event) for event in data["memory"]],
            collectives=[CollectiveEvent(**event) for event in data["collectives"]],
            marks=[Mark(**mark) for mark in data["marks"]],
            parts=[CollectiveEvent(**event) for event in data.get("parts", [])],
            world=data.get("world", ""),
        )
