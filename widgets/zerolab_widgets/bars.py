"""Chapter 0: what memory_bars draws, computed from records as plain data.

Owns no state. A `Bar` is what one GPU holds at one moment, by kind. `bar_of_records` draws a
finished run at its peak, `frames_of_records` the way there, as at most `count` moments in the
order in which the events of all ranks happened. A storage that turns out to be an activation
only when backward starts is drawn as one from its birth: the last kind a block had is its kind.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolab.records import KINDS, MemoryEvent, Records

from .theme import KINDS as KIND_STYLES

MIB, GIB = 2**20, 2**30
FRAMES_BYTES = 32_000  # of JSON; bars, theme and scripts take the rest of 50 KB
TIE = 1e-9  # 0.25 is rounded up, as the scripts of the pictures do


@dataclass(frozen=True)
class Bar:
    """The bytes one GPU holds at one moment."""

    label: str
    segments: dict[str, int] = field(default_factory=dict)  # kind -> bytes, in the order of KINDS
    peak: int = 0
    phase: str = ""
    failed: bool = False

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(self.segments.values())

    def as_state(self) -> dict[str, Any]:
        """Return the bar as the script wants it."""
        return {
            "label": self.label,
            "segments": [[kind, size] for kind, size in self.segments.items()],
            "peak": self.peak,
            "phase": self.phase,
            "failed": self.failed,
        }


def in_order(by_kind: dict[str, int]) -> dict[str, int]:
    """Return the kinds that hold anything, in the order of KINDS: the same stacking everywhere."""
    return {kind: by_kind[kind] for kind in KINDS if by_kind.get(kind, 0) > 0}


def mib(size: int) -> str:
    """Return a size as text: "61.8 MiB", "281 KiB" below one, "80.0 GiB"."""
    if size >= GIB:
        return f"{size / GIB + TIE:.1f} GiB"
    if size >= MIB:
        return f"{size / MIB + TIE:.1f} MiB"
    return f"{size / 1024:.0f} KiB" if size >= 1024 else f"{size} B"


def block_kinds(events: Sequence[MemoryEvent]) -> dict[int, str]:
    """Return for each storage the last kind that it was known as."""
    return {event.block: event.kind for event in events}


class Replay:
    """The bytes by kind of one rank, event by event."""

    def __init__(self, events: Sequence[MemoryEvent], label: str = "") -> None:
        """Start before the first event."""
        self.label = label
        self.kinds = block_kinds(events)
        self.held: Counter[str] = Counter()
        self.phase = ""

    def play(self, event: MemoryEvent) -> None:
        """Take one more event in."""
        self.held[self.kinds[event.block]] += event.delta
        self.phase = event.phase

    def bar(self, *, failed: bool = False, peak: int = 0) -> Bar:
        """Return the bar of this moment."""
        return Bar(self.label, in_order(dict(self.held)), peak, self.phase, failed)


def peak_index(events: Sequence[MemoryEvent]) -> int:
    """Return the number of the event after which most was held (the first such), -1 for none."""
    return max(range(len(events)), key=lambda i: events[i].total, default=-1)


def bar_of_records(records: Records, *, failed: bool = False) -> Bar:
    """Return what one rank held at its peak, by kind."""
    replay, last = Replay(records.memory, f"rank {records.rank}"), peak_index(records.memory)
    for event in records.memory[: last + 1]:
        replay.play(event)
    return replay.bar(failed=failed, peak=records.memory[last].total if records.memory else 0)


def frames_of_records(ranks: Sequence[Records], count: int = 48) -> list[dict[str, Any]]:
    """Return at most about `count` moments of a run, each rank's peak among them.

    Returns:
        One entry a moment: ``time`` in seconds, and ``bars``, one ``[phase, sizes]`` a rank with
        ``sizes`` in bytes, one for each of KINDS (compact: the whole state is sent to the page).
    """
    merged = sorted(
        ((event.time, position, i) for position, records in enumerate(ranks)
         for i, event in enumerate(records.memory)),
    )  # fmt: skip
    wanted = {round(k * (len(merged) - 1) / max(count - 1, 1)) for k in range(count)}
    peaks = {(position, peak_index(records.memory)) for position, records in enumerate(ranks)}
    replays = [Replay(records.memory) for records in ranks]
    frames = []
    for number, (time, position, i) in enumerate(merged):
        replays[position].play(ranks[position].memory[i])
        if number in wanted or (position, i) in peaks:
            frames.append({"time": round(time, 4), "bars": [_frame_bar(r) for r in replays]})
    while len(frames) > 2 and len(json.dumps(frames)) > FRAMES_BYTES:
        frames = [*frames[:-1:2], frames[-1]]  # of many ranks fewer moments fit into a page
    return frames


def _frame_bar(replay: Replay) -> list[Any]:
    return [replay.phase, [replay.held[kind] for kind in KINDS]]


def finding_under(bars: Sequence[Bar], ceiling: int) -> str:
    """Return in one sentence which bars stay under a ceiling."""
    fitting = [bar.label for bar in bars if bar.total <= ceiling]
    others = [bar.label for bar in bars if bar.total > ceiling]
    parts = [f"{', '.join(fitting)} fit" if len(fitting) > 1 else "".join(fitting) + " fits"]
    if others:
        verb = "do" if len(others) > 1 else "does"
        parts.append(f"{', '.join(others)} {verb} not")
    if not fitting:
        parts = ["nothing fits"]
    return f"Under {mib(ceiling)}: {'; '.join(parts)}."


def finding(bars: Sequence[Bar], capacity: int | None) -> str:
    """Return in one sentence what the picture shows, for readers who cannot see it."""
    if not bars:
        return "Nothing has run yet."
    fullest = max(bars, key=lambda bar: (bar.failed, max(bar.peak, bar.total)))
    size = max(fullest.peak, fullest.total)
    limit = f" of {mib(capacity)}" if capacity else ""
    state = "ran out of memory with" if fullest.failed else "held at most"
    largest = max(fullest.segments, key=lambda kind: fullest.segments[kind], default="")
    tail = ""
    if largest:
        tail = f"; most of it: {KIND_STYLES[largest].label} ({mib(fullest.segments[largest])})"
    gpus = "1 GPU" if len(bars) == 1 else f"{len(bars)} GPUs"
    return f"{gpus}; {fullest.label} {state} {mib(size)}{limit}{tail}."
