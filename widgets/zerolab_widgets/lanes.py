"""Chapter 3: what step_timeline draws: one training step of every rank, in three lanes.

Owns no state. A step lies between two marks "step_end". The lanes of a rank:

    compute         the phases of the step, without the time in which the rank only waited
    communication   each collective from its call until `wait` returned; hidden while the rank
                    computed, exposed while it did nothing else
    copies          casts and clones

A `Window` says where on the axis, time or order, something lies, and whether a call of lockstep
ranks is hidden.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerolab.records import CollectiveEvent

from .bars import mib
from .windows import COPY_OPS, Window, windows_of

STATE_BYTES = 20_000  # of JSON
MOST_PIECES = 160  # of a lane
LANES = ("compute", "communication", "copies")

__all__ = ["LANES", "Piece", "RankStep", "as_state", "finding", "rank_step", "windows_of"]


@dataclass(frozen=True)
class Piece:
    """Something that a rank did, from `start` to `end` on the axis of its chart."""

    lane: str
    what: str  # a name in `theme.LANES`
    start: float
    end: float
    text: str
    nbytes: int = 0
    row: int = 0  # within the lane: what overlaps lies in different rows


def compute_pieces(window: Window) -> list[Piece]:
    """Return the phases of a step, one piece for each stretch of one phase."""
    first, last = bisect_right(window.times, window.start), bisect_right(window.times, window.end)
    told = [(window.times[i], window.phases[i]) for i in range(first, last)]
    told = sorted(told + [(call.time, call.phase) for call in window.calls])
    starts = [
        (time, phase) for i, (time, phase) in enumerate(told) if i == 0 or phase != told[i - 1][1]
    ]
    ends = [*(time for time, _ in starts[1:]), window.end]
    return [
        Piece("compute", phase, window.place(time), window.place(end), phase)
        for (time, phase), end in zip(starts, ends, strict=True)
        if phase != "idle"
    ]


def without_waiting(pieces: Sequence[Piece], waits: Sequence[Piece]) -> list[Piece]:
    """Return pieces of computing with the stretches cut out in which the rank only waited."""
    for wait in waits:
        parts = [
            replace(piece, start=start, end=end)
            for piece in pieces
            for start, end in (
                (piece.start, min(piece.end, wait.start)),
                (max(piece.start, wait.end), piece.end),
            )
            if end > start
        ]
        pieces = parts
    return list(pieces)


def communication_pieces(window: Window) -> list[Piece]:
    """Return the collectives of a step; a hidden one that ends exposed is two pieces."""
    pieces, busy = [], []
    for call in _largest(window.calls):
        start, end = window.place(call.time), window.place(window.end_of(call))
        row = next((i for i, until in enumerate(busy) if until <= start), len(busy))
        busy[row : row + 1] = [end]
        for what, begin, until in _parts(window, call, start, end):
            pieces.append(
                Piece("communication", what, begin, until, call_text(call), call.nbytes, row)
            )
    return pieces


def _parts(
    window: Window, call: CollectiveEvent, start: float, end: float
) -> list[tuple[str, float, float]]:
    """Return [what, from, to] of a call: its hidden part and its exposed part."""
    if call.purpose == "control":
        return [("control", start, end)]
    if window.in_order:
        return [("hidden" if window.computes_during(call) else "exposed", start, end)]
    exposed_from = max(start, end - 1000 * call.blocked)
    parts = [("hidden", start, exposed_from), ("exposed", exposed_from, end)]
    return [part for part in parts if part[2] > part[1]]


def _largest(calls: Sequence[CollectiveEvent]) -> list[CollectiveEvent]:
    """Return the calls to draw, in order: of very many those that carry most."""
    if len(calls) <= MOST_PIECES:
        return list(calls)
    floor = sorted((call.nbytes for call in calls), reverse=True)[MOST_PIECES - 1]
    return [call for call in calls if call.nbytes >= floor][:MOST_PIECES]


def call_text(call: CollectiveEvent) -> str:
    """Return in words what was called: "all_reduce of 1.2 MiB, bucket 3, backward, train.py:7"."""
    words = [f"{call.op} of {mib(call.nbytes)}" if call.nbytes else call.op]
    words += [word for word in (call.label, call.phase, call.where) if word]
    return ", ".join(words)


def copy_pieces(window: Window) -> list[Piece]:
    """Return the copies of a step; those without anything between them are one piece."""
    first, last = bisect_right(window.times, window.start), bisect_right(window.times, window.end)
    pieces: list[Piece] = []
    for i in range(first, last):
        if window.ops[i] not in COPY_OPS:
            continue
        start = window.place(window.times[i])
        end = window.place(window.times[i + 1]) if i + 1 < last else window.place(window.end)
        end = max(end, start + (1 if window.in_order else 0))
        if pieces and start <= pieces[-1].end:
            start, _ = pieces[-1].start, pieces.pop()
        pieces.append(Piece("copies", "copy", start, end, f"{window.ops[i]} in {window.phases[i]}"))
    return pieces[:MOST_PIECES]


@dataclass(frozen=True)
class RankStep:
    """One rank's step: its pieces, and what its communication cost.

    Attributes:
        label: "rank 0".
        length: of the step, on the axis.
        pieces: what it did.
        calls: how many data collectives.
        exposed_calls: how many of them were exposed, in order; with clocks: for most of their time.
        exposed: milliseconds of exposed communication; 0 where only the order is known.
        nbytes: bytes of the full tensors that its data collectives carried.
    """

    label: str
    length: float
    pieces: list[Piece]
    calls: int
    exposed_calls: int
    exposed: float
    nbytes: int


def rank_step(label: str, window: Window) -> RankStep:
    """Return what one rank did in a step."""
    data = [call for call in window.calls if call.purpose == "data"]
    travel = communication_pieces(window)
    waits = [piece for piece in travel if piece.what == "exposed"]
    compute = without_waiting(compute_pieces(window), waits)
    pieces = [*compute, *travel, *copy_pieces(window)]
    exposed = 0.0 if window.in_order else 1000 * sum(call.blocked for call in data)
    return RankStep(
        label,
        window.place(window.end),
        pieces,
        len(data),
        sum(_is_exposed(window, call) for call in data),
        exposed,
        sum(call.nbytes for call in data),
    )


def _is_exposed(window: Window, call: CollectiveEvent) -> bool:
    if window.in_order:
        return not window.computes_during(call)
    return call.blocked > 0.5 * (window.end_of(call) - call.time)


def as_state(ranks: Sequence[RankStep], in_order: bool) -> dict[str, Any]:
    """Return a step as the script wants it, in at most `STATE_BYTES`: the smallest pieces go."""
    floor = 0.0
    length = max((rank.length for rank in ranks), default=0.0)
    while True:
        state = _state(ranks, in_order, floor, length)
        if len(json.dumps(state)) <= STATE_BYTES:
            return state
        floor = 2 * floor or max(length / 2000, 1e-6)


def _state(
    ranks: Sequence[RankStep], in_order: bool, floor: float, length: float
) -> dict[str, Any]:
    texts: dict[str, int] = {}
    rows = [
        [
            [LANES.index(piece.lane), piece.what, round(piece.start, 3), round(piece.end, 3),
             piece.row, texts.setdefault(piece.text, len(texts))]
            for piece in rank.pieces
            if piece.end - piece.start >= floor
        ]
        for rank in ranks
    ]  # fmt: skip
    return {
        "axis": "order" if in_order else "time",
        "length": round(length, 3),
        "lanes": list(LANES),
        "ranks": [
            {"label": rank.label, "pieces": pieces}
            for rank, pieces in zip(ranks, rows, strict=True)
        ],
        "texts": list(texts),
    }


def finding(ranks: Sequence[RankStep], step: int, steps: int, in_order: bool) -> str:
    """Return in two sentences what the step shows."""
    if not ranks:
        return "No step has ended: there is nothing to draw."
    where = f"Step {step + 1} of {steps}"
    if in_order:
        worst = max(ranks, key=lambda rank: rank.exposed_calls)
        hidden = worst.calls - worst.exposed_calls
        return (
            f"{where}: of {worst.calls} data collectives of {worst.label}, {hidden} are on their "
            f"way while it computes, {worst.exposed_calls} are exposed. Lockstep ranks run one at "
            "a time: this is order, not time."
        )
    slowest = max(ranks, key=lambda rank: rank.exposed)
    share = 100 * slowest.exposed / slowest.length if slowest.length else 0.0
    return (
        f"{where}: {slowest.label} waits longest, {slowest.exposed:.1f} of {slowest.length:.1f} ms "
        f"({share:.0f} %) are exposed communication, {mib(slowest.nbytes)} in {slowest.calls} data "
        "collectives. Measured time; each rank's clock starts with its own step."
    )
