"""Chapter 3: the window of a step: from one mark "step_end" to the next, on one rank.

Owns no state. Processes have clocks, so their axis is time. Lockstep ranks run one at a time:
their axis is order, counted in events of the rank itself, and a collective is hidden when the rank
computed something between the call and its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from zerolab.records import CollectiveEvent, Records

from .runs import Run

COPY_OPS = ("aten._to_copy", "aten.clone", "aten.copy_")
# Beginnings of the names of what needs no arithmetic.
NO_COMPUTING = (
    *("free", "resize_", "aten.empty", "aten.new_empty", "aten.zeros", "aten.new_zeros"),
    *COPY_OPS,
)


@dataclass
class Window:
    """One step of one rank, and the times at which it recorded anything."""

    start: float
    end: float
    times: list[float]  # of its memory events, all of the run
    phases: list[str]
    ops: list[str]
    calls: list[CollectiveEvent]  # of this step
    in_order: bool

    def __post_init__(self) -> None:
        """Sort the moments at which calls began and ended."""
        ends = [call.ended for call in self.calls if call.ended]
        self._turns = sorted([*(call.time for call in self.calls), *ends])
        self._weight = max((self._memory_until(self.end) or 1) / 150, 1.0)

    def _memory_until(self, time: float) -> int:
        return bisect_left(self.times, time) - bisect_right(self.times, self.start)

    def place(self, time: float) -> float:
        """Return where a time lies on the axis: milliseconds, or events so far."""
        time = min(max(time, self.start), self.end)
        if not self.in_order:
            return 1000 * (time - self.start)
        return self._memory_until(time) + self._weight * bisect_right(self._turns, time)

    def computes_during(self, call: CollectiveEvent) -> bool:
        """Tell whether the rank computed anything between a call and its end.

        Letting go of memory, asking for some and copying is no computing: that is all there is to
        do when backward is over and the last bucket still on its way.
        """
        first = bisect_right(self.times, call.time)
        meanwhile = self.ops[first : bisect_left(self.times, self.end_of(call))]
        return not all(op.startswith(NO_COMPUTING) for op in meanwhile)

    def end_of(self, call: CollectiveEvent) -> float:
        """Return when a call ended; one that nobody waited for lasts to the end of the step."""
        return call.ended or self.end


def steps_of(records: Records) -> list[tuple[float, float]]:
    """Return when each step of a rank began and ended."""
    ends = [mark.time for mark in records.marks if mark.name == "step_end"]
    begin = next((mark.time for mark in records.marks if mark.name == "init_done"), 0.0)
    return list(zip([begin, *ends], ends, strict=False))


@dataclass(frozen=True)
class _Told:
    """The records of one rank, read once for all steps."""

    steps: list[tuple[float, float]]
    times: list[float]
    phases: list[str]
    ops: list[str]
    calls: Sequence[CollectiveEvent]

    def window(self, step: int, in_order: bool) -> Window:
        start, end = self.steps[step]
        calls = _within(self.calls, start, end)
        return Window(start, end, self.times, self.phases, self.ops, calls, in_order)


def windows_of(run: Run) -> list[list[Window]]:
    """Return step by step the window of every rank; only steps that all ranks have ended."""
    ranks = [_told(records) for records in run.ranks]
    count = min((len(rank.steps) for rank in ranks), default=0)
    return [[rank.window(step, run.in_order_only) for rank in ranks] for step in range(count)]


def _told(records: Records) -> _Told:
    events = list(records.memory)
    times = [event.time for event in events]
    phases, ops = [event.phase for event in events], [event.op for event in events]
    return _Told(steps_of(records), times, phases, ops, records.collectives)


def _within(calls: Sequence[CollectiveEvent], start: float, end: float) -> list[CollectiveEvent]:
    return [call for call in calls if start < call.time <= end]
