"""Chapter 1: what memory_timeline draws: the bytes of every rank by kind, event by event, thinned.

Owns no state. The axis is order, not time: moment m of a picture stands for the same stretch of
events on every rank, so ranks that do the same lie under each other whoever ran first. Of each
stretch the fullest moment is kept: however long a run, no peak is lost. Phases: choose the
events to keep, replay the ledger up to each, note who allocated last, shrink until it is small.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from zerolab.records import MemoryEvent, Records

from .bars import Bar, Replay, in_order, mib, peak_index
from .runs import Run
from .theme import KINDS as KIND_STYLES

MOMENTS = 200
STATE_BYTES = 25_000  # of JSON; the scripts and the theme take the rest of 50 KB
MANY_MARKS = 24


@dataclass
class Curve:
    """One rank of the picture; lists have one entry a moment.

    Attributes:
        label: "rank 0".
        events: how many memory events it recorded.
        at: the number of the event that stands for the moment.
        sizes: kind -> KiB held.
        births: who allocated last, as a number of `Births`.
        phases: runs of one phase, as [phase, first moment, last moment].
        marks: named moments, as [moment, name].
        peak: bytes at the fullest.
        peak_moment: where that is.
    """

    label: str
    events: int = 0
    at: list[int] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    births: list[int] = field(default_factory=list)
    phases: list[list[Any]] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    peak: int = 0
    peak_moment: int = -1


class Births:
    """Who allocated: every distinct (bytes, kind, op, phase, where) once, by number."""

    def __init__(self) -> None:
        """Start with nobody."""
        self.table: list[list[Any]] = []
        self._number: dict[tuple, int] = {}

    def number(self, event: MemoryEvent | None, kind: str) -> int:
        """Return the number of an allocation, -1 for none."""
        if event is None:
            return -1
        key = (event.delta, kind, event.op, event.phase, event.where)
        if key not in self._number:
            self._number[key] = len(self.table)
            self.table.append(list(key))
        return self._number[key]


def kept_events(totals: Sequence[int], longest: int, count: int) -> list[int]:
    """Return the numbers of the events to keep: of each stretch the fullest, first of equals.

    Args:
        totals: bytes held after each event of this rank.
        longest: events of the rank that has most; the stretches are cut by it.
        count: stretches in all.
    """
    kept = []
    for stretch in range(min(count, longest)):
        first = stretch * longest // min(count, longest)
        last = (stretch + 1) * longest // min(count, longest)
        if first < len(totals):
            kept.append(max(range(first, min(last, len(totals))), key=lambda i: totals[i]))
    return kept


def curve_of(records: Records, longest: int, count: int, births: Births) -> Curve:
    """Return one rank's curve."""
    events = list(records.memory)
    curve = Curve(f"rank {records.rank}", len(events))
    curve.at = kept_events([event.total for event in events], longest, count)
    snapshots, phases = _snapshots(events, curve, births)
    kinds = in_order({kind: 1 for held in snapshots for kind, size in held.items() if size})
    curve.sizes = {kind: [held.get(kind, 0) // 1024 for held in snapshots] for kind in kinds}
    curve.phases = runs_of(phases)
    curve.marks = _marks(records, [event.time for event in events], curve.at)
    curve.peak = max((event.total for event in events), default=0)
    curve.peak_moment = _moment_of(peak_index(events), curve.at)
    return curve


def _snapshots(
    events: Sequence[MemoryEvent], curve: Curve, births: Births
) -> tuple[list[dict[str, int]], list[str]]:
    """Replay the events; return the bytes by kind and the phase at each that is kept."""
    replay, wanted, last = Replay(events), set(curve.at), None
    snapshots, phases = [], []
    for number, event in enumerate(events):
        replay.play(event)
        last = event if event.delta > 0 else last
        if number in wanted:
            snapshots.append(dict(replay.held))
            phases.append(event.phase)
            curve.births.append(births.number(last, replay.kinds[last.block] if last else ""))
    return snapshots, phases


def _moment_of(event: int, kept: Sequence[int]) -> int:
    """Return the moment that an event belongs to: the one before the next kept event."""
    return max(bisect_right(kept, event) - 1, 0) if kept else -1


def runs_of(words: Sequence[str]) -> list[list[Any]]:
    """Return the runs of equal words, as [word, first place, last place]."""
    runs: list[list[Any]] = []
    for place, word in enumerate(words):
        if runs and runs[-1][0] == word:
            runs[-1][2] = place
        else:
            runs.append([word, place, place])
    return runs


def _marks(records: Records, times: Sequence[float], kept: Sequence[int]) -> list[list[Any]]:
    """Return the marks by moment; of very many only the ends of steps, of still more none."""
    for chosen in (lambda name: True, lambda name: name == "step_end", lambda name: False):
        marks = [mark for mark in records.marks if chosen(mark.name)]
        if len(marks) <= MANY_MARKS:
            break
    return [[_moment_of(bisect_right(times, mark.time) - 1, kept), mark.name] for mark in marks]


@dataclass
class Chart:
    """All that is drawn of a run."""

    curves: list[Curve]
    births: list[list[Any]]
    moments: int

    def as_state(self) -> dict[str, Any]:
        """Return the chart as the script wants it: event numbers as steps, rows made short."""
        return {
            "moments": self.moments,
            "births": self.births,
            "ranks": [
                vars(curve)
                | {"at": [b - a for a, b in pairwise([0, *curve.at])]}
                | {"sizes": {kind: shortest(row) for kind, row in curve.sizes.items()}}
                for curve in self.curves
            ],
        }

    def bars_at(self, moment: int) -> list[Bar]:
        """Return what every rank holds at a moment, to the KiB; what has ended stays as it was."""
        return [_bar(curve, moment) for curve in self.curves]


def _bar(curve: Curve, moment: int) -> Bar:
    if not curve.at:
        return Bar(curve.label)
    place = min(moment, len(curve.at) - 1)
    sizes = {kind: row[place] * 1024 for kind, row in curve.sizes.items() if row[place]}
    phase = next(phase for phase, first, last in curve.phases if first <= place <= last)
    return Bar(curve.label, sizes, curve.peak, phase)


def changes(row: Sequence[int]) -> list[list[int]]:
    """Return [place, value] wherever a value differs from the one before."""
    return [[i, size] for i, size in enumerate(row) if i == 0 or size != row[i - 1]]


def shortest(row: list[int]) -> list[Any]:
    """Return a row as its changes, or as it is where it changes more often than not."""
    changed = changes(row)
    return changed if 2 * len(changed) < len(row) else row


def chart_of(run: Run, count: int = MOMENTS, state_bytes: int = STATE_BYTES) -> Chart:
    """Return the chart of a run, with as many moments as fit into the bytes of its state."""
    longest = max((len(records.memory) for records in run.ranks), default=0)
    while True:
        births = Births()
        curves = [curve_of(records, longest, count, births) for records in run.ranks]
        chart = Chart(curves, births.table, min(count, longest))
        size = len(json.dumps(chart.as_state()))
        if size <= state_bytes or count <= 2:
            return chart
        count = max(2, int(count * 0.9 * state_bytes / size))


def birth_text(birth: Sequence[Any]) -> str:
    """Return in words who allocated: "2.0 MiB of activations: aten.mm, forward, gpt.py:57"."""
    size, kind, op, phase, where = birth
    label = KIND_STYLES[kind].label
    return f"{mib(size)} of {label}: {', '.join(word for word in (op, phase, where) if word)}"


def finding(run: Run, chart: Chart) -> str:
    """Return in one or two sentences what the picture shows."""
    filled = [curve for curve in chart.curves if curve.at]
    if not filled:
        return "No memory was recorded."
    if run.failed is not None:
        return _failure(run, chart.curves[run.failed])
    fullest = max(filled, key=lambda curve: curve.peak)
    limit = ""
    if run.capacity:
        limit = f", {100 * fullest.peak / run.capacity:.0f} % of {mib(run.capacity)}"
    bar = _bar(fullest, fullest.peak_moment)
    largest = max(bar.segments, key=lambda kind: bar.segments[kind], default="")
    tail = f"; most of it: {KIND_STYLES[largest].label}" if largest else ""
    gpus = "1 GPU" if len(chart.curves) == 1 else f"{len(chart.curves)} GPUs"
    return f"{gpus}; {fullest.label} peaks at {mib(fullest.peak)}{limit}, in {bar.phase}{tail}."


def failure_moment(run: Run, curve: Curve) -> int:
    """Return the moment at which the failed rank asked for too much, -1 for none.

    What it frees while the error travels comes after that.
    """
    if run.failed is None or not curve.at:
        return -1
    events = run.ranks[run.failed].memory
    last = max((i for i, each in enumerate(events) if each.total == run.held), default=-1)
    return _moment_of(last, curve.at) if last >= 0 else len(curve.at) - 1


def _failure(run: Run, curve: Curve) -> str:
    place = f" at {run.where}" if run.where else ""
    op = f" in {run.op}" if run.op else ""
    return (
        f"{curve.label} ran out of memory: it held {mib(run.held)} of {mib(run.capacity)} and "
        f"asked for {mib(run.requested)} more{op}{place}."
    )
