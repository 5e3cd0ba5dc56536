"""Chapter 6: the life of each unit in a step of stage 3, read from the records of one rank.

Owns no state. Three kinds of fact tell it: an all-gather that carries the name of a bucket (when
it was called, and when its wait returned), the death of the memory of kind "gathered" that was
born for it, and the reduce-scatter of its gradients. From them follow the moments of a step, and
for each moment where every unit is:

    sharded     -> in flight (the rank waits) or prefetched (something else happens meanwhile)
                -> unsharded -> sharded

Phases: sort the facts of the step by time, play them, put each change into words.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zerolab.records import CollectiveEvent, MemoryEvent, Records

from .bars import mib

SHARDED, IN_FLIGHT, PREFETCHED, UNSHARDED = "sharded", "in flight", "prefetched", "unsharded"
MAX_MOMENTS = 240  # of a step: more are too narrow to be seen


@dataclass(frozen=True)
class Moment:
    """One change in the life of a unit, and how it was with all of them then."""

    phase: str
    unit: str
    what: str  # "gather", "whole", "free" or "reduce"
    states: tuple[str, ...]  # of each unit, in the order of `Step.units`
    gathered: int  # bytes of full parameters after it
    says: str


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    name: str
    rank: int
    units: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    ahead: int = 0  # gathers that something else happened beside
    all_bytes: int = 0  # of all units, were they whole at once
    peak: int = 0  # bytes of full parameters, the most at once
    counts: tuple[int, ...] = ()  # how often each unit was gathered
    left: tuple[str, ...] = ()  # units that were not sharded again

    @property
    def finding(self) -> str:
        """What the step shows, in words."""
        if not self.units:
            return (
                f"{self.name} of rank {self.rank}: no unit was gathered in forward or backward; "
                "stage 3 gathers each with an all-gather that carries its bucket's name as label."
            )
        often = _often(self.counts)
        ahead = f"{self.ahead} of {sum(self.counts)} gathers began ahead of their turn"
        peak = f"at most {mib(self.peak)} of {mib(self.all_bytes)} were whole or on their way"
        units = "1 unit" if len(self.units) == 1 else f"{len(self.units)} units"
        text = f"{self.name} of rank {self.rank}: {units}, {often}; {peak}; {ahead}."
        if self.left:
            text += f" Not freed: {', '.join(self.left)}."
        return text


def _often(counts: Sequence[int]) -> str:
    """Say how often units were gathered."""
    words = {1: "once", 2: "twice"}
    if len(set(counts)) == 1:
        return f"each gathered {words.get(counts[0], f'{counts[0]} times')}"
    return f"gathered {min(counts)} to {max(counts)} times"


def steps_of(records: Records) -> list[Step]:
    """Return the steps of one rank in order; the last one may have broken off."""
    ends = [mark.time for mark in records.marks if mark.name == "step_end"]
    begin = next((mark.time for mark in records.marks if mark.name == "init_done"), 0.0)
    bounds = [begin, *ends]
    spans = list(zip(bounds, ends, strict=False))
    names = [f"Step {number}" for number in range(1, len(spans) + 1)]
    if any(event.time > bounds[-1] for event in _gathers(records)):
        spans.append((bounds[-1], float("inf")))
        names.append(f"Step {len(spans)}, which broke off,")
    return [step_of(records, name, *span) for name, span in zip(names, spans, strict=True)]


def _gathers(records: Records) -> list[CollectiveEvent]:
    """Return the all-gathers of parameters, in order."""
    return [event for event in records.collectives if _names_unit(event, "all_gather")]


def _names_unit(event: CollectiveEvent, op: str) -> bool:
    """Tell whether this is the call for a unit's bucket, in forward or backward."""
    return event.op == op and "/" in event.label and event.phase in ("forward", "backward")


# Phase 1: the facts of a step.


@dataclass(frozen=True, order=True)
class _Fact:
    """Something that happened to a bucket."""

    time: float
    rank: int  # what comes first at the same time
    what: str = field(compare=False)
    bucket: str = field(compare=False)
    phase: str = field(compare=False)
    ahead: bool = field(default=False, compare=False)

    @property
    def unit(self) -> str:
        """The unit that the bucket belongs to."""
        return _unit(self.bucket)


def _unit(bucket: str) -> str:
    """Return the name of a bucket's unit."""
    return bucket.rpartition("/")[0]


def _facts(records: Records, begin: float, end: float) -> list[_Fact]:
    """Return what happened to buckets in a stretch of time, in order."""
    gathers = [event for event in _gathers(records) if begin <= event.time < end]
    memory = [event for event in records.memory if begin <= event.time < end]
    others = [event.time for event in memory if event.kind != "gathered"]
    facts = [
        _Fact(event.time, 2, "reduce", event.label, event.phase)
        for event in records.collectives
        if begin <= event.time < end and _names_unit(event, "reduce_scatter")
    ]
    for event in gathers:
        ends = [other.ended for other in gathers if _unit(other.label) != _unit(event.label)]
        beside = (_happened(times, event.time, event.ended) for times in (others, sorted(ends)))
        ahead = not event.ended or any(beside)
        facts.append(_Fact(event.time, 1, "gather", event.label, event.phase, ahead))
        if event.ended:
            facts.append(_Fact(event.ended, 1, "whole", event.label, event.phase))
    return sorted([*facts, *_deaths(gathers, memory)])


def _happened(times: Sequence[float], first: float, last: float) -> bool:
    """Tell whether one of these times, which are in order, lies between two others."""
    after = bisect_right(times, first)
    return after < len(times) and times[after] < last


def _deaths(gathers: Sequence[CollectiveEvent], memory: Sequence[MemoryEvent]) -> Iterator[_Fact]:
    """Return when gathered memory went, by the bucket that it was born for just before a gather."""
    bucket_of: dict[int, str] = {}
    calls = iter(gathers)
    call = next(calls, None)
    born = -1
    for event in memory:
        while call is not None and call.time <= event.time:
            bucket_of.setdefault(born, call.label)
            call = next(calls, None)
        if event.kind != "gathered":
            continue
        if event.delta > 0:
            born = event.block
            bucket_of.pop(born, None)
        elif event.block in bucket_of:
            yield _Fact(event.time, 0, "free", bucket_of[event.block], event.phase)


# Phase 2: play them.


@dataclass
class _Life:
    """Where the buckets of one unit are."""

    flying: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    ahead: bool = False

    def take(self, fact: _Fact) -> None:
        """Take one more fact in."""
        self.flying.discard(fact.bucket)
        self.whole.discard(fact.bucket)
        if fact.what == "gather":
            self.ahead = fact.ahead
            self.flying.add(fact.bucket)
        elif fact.what == "whole":
            self.whole.add(fact.bucket)

    @property
    def state(self) -> str:
        """Where the unit is."""
        if self.flying:
            return PREFETCHED if self.ahead else IN_FLIGHT
        return UNSHARDED if self.whole else SHARDED


def step_of(records: Records, name: str, begin: float, end: float) -> Step:
    """Return one step, the stretch of time from `begin` to `end`."""
    facts = _facts(records, begin, end)
    units = tuple(dict.fromkeys(fact.unit for fact in facts if fact.what == "gather"))
    if not units:
        return Step(name, records.rank)
    lives = {unit: _Life() for unit in units}
    bytes_of = {event.label: event.nbytes for event in _gathers(records)}
    moments: list[Moment] = []
    started: list[tuple[str, bool]] = []
    for fact in facts:
        if fact.unit not in lives:
            continue
        before = lives[fact.unit].state
        if fact.what != "reduce":
            lives[fact.unit].take(fact)
            if lives[fact.unit].state == before:
                continue
        if fact.what == "gather":
            started.append((fact.unit, fact.ahead))
        moments.append(_moment(fact, lives, bytes_of))
    counts = tuple(sum(unit == own for own, _ in started) for unit in units)
    return Step(
        name=name,
        rank=records.rank,
        units=units,
        moments=tuple(moments[:MAX_MOMENTS]),
        ahead=sum(ahead for _, ahead in started),
        all_bytes=sum(bytes_of[label] for label in {f.bucket for f in facts if f.what == "gather"}),
        peak=max(moment.gathered for moment in moments),
        counts=counts,
        left=tuple(unit for unit in units if lives[unit].state != SHARDED),
    )


def _moment(fact: _Fact, lives: dict[str, _Life], bytes_of: dict[str, int]) -> Moment:
    """Return how it is with all units after a fact."""
    held = sum(bytes_of[b] for life in lives.values() for b in life.flying | life.whole)
    states = tuple(life.state for life in lives.values())
    computing = [unit for unit, life in lives.items() if life.whole and unit != fact.unit]
    says = f"{fact.phase.capitalize()}: {_says(fact, computing)} {mib(held)} gathered."
    return Moment(fact.phase, fact.unit, fact.what, states, held, says)


# Phase 3: words.


def _says(fact: _Fact, computing: Sequence[str]) -> str:
    """Say what happened."""
    unit = fact.unit
    if fact.what == "gather" and fact.ahead:
        beside = f" while {computing[-1]} computes" if computing else ""
        return f"the all-gather of {unit} starts ahead of its turn{beside}."
    return {
        "gather": f"{unit} is needed: its all-gather starts, and the rank waits.",
        "whole": f"{unit} is whole and may be used.",
        "free": f"{unit} is freed; the own slice is left.",
        "reduce": f"gradients of {unit} go out in a reduce-scatter.",
    }[fact.what]
