"""Chapter 3: what live_dashboard draws beside the bars: losses, and what collectives cost.

Owns a `Pulse`, which reads the records of a run that goes on and never reads the same event
twice. A step is what lies between two marks "step_end". The share of communication is the time
in which ranks were blocked in collectives, of all their time. Lockstep ranks run one at a time,
so all their time is that of the clock once, and blocked means copying between threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerolab.records import CollectiveEvent, Records

MOST_POINTS = 240


def mean_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over all ranks of every step that all of them have done."""
    steps = min((len(each) for each in losses), default=0)
    return [sum(each[step] for each in losses) / len(losses) for step in range(steps)]


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[list[float]]:
    """Return at most `most` points [place, value] in order, lowest and highest of each stretch."""
    if len(values) <= most:
        return [[i, value] for i, value in enumerate(values)]
    stretches, kept = most // 2, []
    for k in range(stretches):
        places = range(k * len(values) // stretches, (k + 1) * len(values) // stretches)
        extremes = {min(places, key=lambda i: values[i]), max(places, key=lambda i: values[i])}
        kept += [[i, values[i]] for i in sorted(extremes)]
    return kept


def step_ends(records: Records) -> list[float]:
    """Return when each step ended, in seconds."""
    return [mark.time for mark in records.marks if mark.name == "step_end"]


@dataclass
class Pulse:
    """What is known of the steps of a run so far.

    Attributes:
        shares: of each step, which part of the ranks' time went into collectives, 0 to 1.
        moved: op -> bytes of the full tensors that the last step carried, control left out.
        calls: how many data collectives the last step had.
    """

    shares: list[float] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    _read: list[int] = field(default_factory=list)  # collectives read so far, of each rank
    _until: list[float] = field(default_factory=list)  # when the last step ended, on each rank

    def read(self, ranks: Sequence[Records]) -> None:
        """Take in the steps that all ranks have done since the last time."""
        ends = [step_ends(records) for records in ranks]
        steps = min(map(len, ends), default=0)
        if steps and not self._read:
            self._read = [0] * len(ranks)
            self._until = [_beginning(records) for records in ranks]
        for step in range(len(self.shares), steps):
            self._step(ranks, [each[step] for each in ends])

    def _step(self, ranks: Sequence[Records], ends: Sequence[float]) -> None:
        blocked = 0.0
        for rank, records in enumerate(ranks):
            events = self._events_until(records, rank, ends[rank])
            blocked += sum(event.blocked for event in events)
            if rank == 0:
                self._note(events)
        windows = [end - start for start, end in zip(self._until, ends, strict=True)]
        whole = sum(windows)
        if ranks[0].world in ("lockstep", ""):
            whole /= len(windows)
        self.shares.append(min(blocked / whole, 1.0) if whole > 0 else 0.0)
        self._until = list(ends)

    def _events_until(self, records: Records, rank: int, end: float) -> list[CollectiveEvent]:
        """Return the collectives of one rank that are new and were called before `end`."""
        first = last = self._read[rank]
        while last < len(records.collectives) and records.collectives[last].time <= end:
            last += 1
        self._read[rank] = last
        events = records.collectives[first:last]
        return [event for event in events if event.time > self._until[rank]]

    def _note(self, events: Sequence[CollectiveEvent]) -> None:
        data = [event for event in events if event.purpose == "data"]
        self.calls, self.moved = len(data), {}
        for event in data:
            self.moved[event.op] = self.moved.get(event.op, 0) + event.nbytes


def _beginning(records: Records) -> float:
    """Return when training began: the engine was built, or 0."""
    return next((mark.time for mark in records.marks if mark.name == "init_done"), 0.0)


def finding(losses: Sequence[float], pulse: Pulse) -> str:
    """Return in a sentence how training goes; no times, so that it is the same every time."""
    if not losses:
        return ""
    words = f"Loss {losses[0]:.3f} in step 1"
    if len(losses) > 1:
        words += f", {losses[-1]:.3f} in step {len(losses):,}"
    moved = sum(pulse.moved.values())
    if moved:
        words += f"; {pulse.calls} collectives carry {moved / 2**20:.1f} MiB a step"
    return f"{words}."
