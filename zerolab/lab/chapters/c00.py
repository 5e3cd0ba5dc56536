"""Chapter 0: the exercises of 00_start_here: who owns which slice, and how long the buffer is.

Owns the checks, the wrong answers and the numbers to predict. References are numbers: positions
0, 1, 2, ... are laid out and cut by torch's `view`, and lengths are counted up one by one.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import evidence, training
from ..exercise import Exercise, Mutant
from ..outcome import Wrong
from ..prediction import Prediction

Function = Callable[..., Any]
LAYOUTS = ((12, 4), (10, 4), (7, 2), (1, 3), (5, 5), (9, 1), (0, 2), (23, 8))  # (numel, N)
PARAM_NUMEL, WORLD_SIZE = 26, 4  # of the tiny model of `evidence`, and its ranks
PADDED = 28
OPTIMIZER_BYTES = (72, 72, 72, 56)  # two fp32 moments for 7, 7, 7, 5 elements, 4 step counters


# 0.1 shard_bounds


def check_shard_bounds(answer: Function) -> Iterator[str]:
    """Values on many layouts, then stage 1 itself: weights, bytes held, elements moved."""
    for numel, world_size in LAYOUTS:
        _check_layout(answer, numel, world_size)
    yield f"{len(LAYOUTS)} layouts: equal slices, in rank order, nothing left out"
    ranks = evidence.train_tiny(1, WORLD_SIZE)
    yield _same_weights(ranks)
    held = tuple(rank.optimizer_bytes for rank in ranks)
    if held != OPTIMIZER_BYTES:
        raise Wrong(
            "Stage 1 on these slices holds the wrong number of bytes of optimizer state.",
            expected=OPTIMIZER_BYTES,
            observed=held,
        )
    yield f"bytes held: {', '.join(map(str, held))} of optimizer state on ranks 0 to 3"
    yield _moved(ranks)


@dataclass(frozen=True)
class Slices:
    """What an answer said about one layout: the range of every rank."""

    numel: int
    world_size: int
    ranges: list[tuple[int, int]]

    def wrong(self, rank: int, message: str, expected: Any) -> Wrong:
        """Return the verdict on the slice of one rank."""
        return Wrong(
            f"{self.numel} elements on {self.world_size} ranks: {message}",
            expected=expected,
            observed=f"all ranks: {', '.join(map(str, self.ranges))}",
            call=f"shard_bounds({self.numel}, {self.world_size}, {rank})",
            rank=rank,
        )


def _check_layout(answer: Function, numel: int, world_size: int) -> None:
    """Compare the slices of all ranks with positions that torch has cut."""
    padded = _count_up(numel, world_size)
    ranges = [_a_range(answer(numel, world_size, rank)) for rank in range(world_size)]
    slices = Slices(numel, world_size, ranges)
    _check_lengths(slices)
    _check_order(slices)
    _check_cover(slices, padded)
    rows = torch.arange(padded).view(world_size, padded // world_size).tolist()
    for rank, row in enumerate(rows):
        expected = (row[0], row[-1] + 1) if row else (0, 0)
        if ranges[rank] != expected:
            raise slices.wrong(rank, f"rank {rank} owns the wrong slice.", expected)


def _a_range(value: Any) -> tuple[int, int]:
    """Return the value if it is a pair of whole numbers."""
    pair = "a pair (start, stop)"
    if value is None:
        raise Wrong("It returned None: is the `return` missing?", expected=pair, observed="None")
    if not isinstance(value, tuple) or [type(part) for part in value] != [int, int]:
        raise Wrong("It must return two ints in a tuple.", expected=pair, observed=value)
    return value


def _check_lengths(slices: Slices) -> None:
    lengths = [stop - start for start, stop in slices.ranges]
    for rank, length in enumerate(lengths):
        if length < 0:
            start, stop = slices.ranges[rank]
            raise slices.wrong(
                rank, f"rank {rank} stops at {stop}, before it starts at {start}.", "start <= stop"
            )
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise slices.wrong(
                rank,
                f"the slices are {', '.join(map(str, lengths))} long, but a collective needs all "
                "ranks' slices equally long. Only padding at the end makes that possible.",
                "equal lengths",
            )


def _check_order(slices: Slices) -> None:
    before = 0
    for rank, (start, stop) in enumerate(slices.ranges):
        if start < 0:
            what = f"rank {rank} starts at {start}, but elements count from 0."
        elif start < before:
            what = f"ranks {rank - 1} and {rank} both own element {start}."
        else:
            what = f"nobody owns element {before}."
        if start != before:
            here = f"where rank {rank - 1} stops" if rank else "at 0"
            raise slices.wrong(rank, what, f"rank {rank} starts {here}")
        before = stop


def _check_cover(slices: Slices, padded: int) -> None:
    numel, last = slices.numel, slices.ranges[-1][1]
    if last < numel:
        what = f"elements {last} to {numel - 1} belong to nobody and would never be trained."
    else:
        what = f"{last - numel} elements of padding, where {padded - numel} are enough."
    if last != padded:
        raise slices.wrong(slices.world_size - 1, what, f"the last slice stops at {padded}")


# 0.2 padded_numel


def check_padded_numel(answer: Function) -> Iterator[str]:
    """Values, among them lengths beyond what a float can count; then what stage 1 sends."""
    cases = [(12, 4), (10, 4), *((numel, n) for n in (1, 2, 3, 4, 8) for numel in range(26))]
    for numel, world_size in cases:
        _check_padded(answer, numel, world_size, _count_up(numel, world_size))
    yield f"{len(cases)} lengths: a multiple of the world size, and the smallest one that holds all"
    _check_padded(answer, 2**60 + 1, 4, 2**60 + 4)
    yield "a length beyond 2**53: counted exactly"
    ranks = evidence.train_tiny(1, WORLD_SIZE)
    yield _same_weights(ranks)
    yield _moved(ranks)


def _count_up(numel: int, world_size: int) -> int:
    """Return the smallest multiple of `world_size` from `numel` on, by trying."""
    while numel % world_size:
        numel += 1
    return numel


def _check_padded(answer: Function, numel: int, world_size: int, expected: int) -> None:
    value = answer(numel, world_size)
    if type(value) is not int:
        hint = " Is the `return` missing?" if value is None else ""
        raise Wrong(f"A length is an int.{hint}", expected=expected, observed=value)
    if value == expected:
        return
    if value < numel:
        what = f"{value} elements cannot hold {numel}"
    elif value % world_size:
        what = f"{value} cannot be cut into {world_size} equal slices"
    else:
        what = f"{value} holds {numel} elements, but so does {expected}: padding costs memory"
    raise Wrong(f"{what}.", expected=expected, observed=value)


# What both look at in the engine.


def _same_weights(ranks: list[evidence.TinyRank]) -> str:
    alone = evidence.train_tiny_alone(WORLD_SIZE)
    for rank, shown in enumerate(ranks):
        apart = (shown.weights - alone).abs().max().item()
        if not apart <= evidence.TOLERANCE:
            raise Wrong(
                f"Stage 1 trains on it, but after {evidence.STEPS} steps the weights differ from "
                f"those of one process by {apart:.2g}.",
                expected=f"at most {evidence.TOLERANCE:g}",
                observed=f"{apart:.2g}",
                rank=rank,
            )
    return f"stage 1 runs on it: after {evidence.STEPS} steps the weights of plain torch"


def _moved(ranks: list[evidence.TinyRank]) -> str:
    expected = {"reduce_scatter": PADDED, "all_gather": PADDED}
    for rank, shown in enumerate(ranks):
        if shown.moved != expected:
            raise Wrong(
                f"Stage 1 moves other elements than {PADDED} twice, for {PARAM_NUMEL} parameters.",
                expected=expected,
                observed=shown.moved,
                rank=rank,
            )
    return f"elements moved: {PADDED} reduced and {PADDED} gathered, for {PARAM_NUMEL} parameters"


# Wrong answers. The docstring is the misconception.


def drops_the_rest(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Floor division forgets the remainder: 10 // 4 is 2, and 4 slices of 2 hold only 8."""
    shard_numel = numel // world_size
    return rank * shard_numel, (rank + 1) * shard_numel


def last_takes_the_rest(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The last rank takes what is left. Fine for a for-loop; a collective needs equal slices."""
    shard_numel = numel // world_size
    stop = numel if rank == world_size - 1 else (rank + 1) * shard_numel
    return rank * shard_numel, stop


def stops_at_numel(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The slice is cut off where the real elements end. But the padding belongs to the slice."""
    shard_numel = -(-numel // world_size)
    return min(rank * shard_numel, numel), min((rank + 1) * shard_numel, numel)


def counts_ranks_from_one(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Ranks count from 0: this leaves the first slice to nobody."""
    shard_numel = -(-numel // world_size)
    return (rank + 1) * shard_numel, (rank + 2) * shard_numel


def stop_is_the_last(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """A range in Python stops before `stop`; this `stop` is the last element itself."""
    shard_numel = -(-numel // world_size)
    return rank * shard_numel, (rank + 1) * shard_numel - 1


def returns_the_length(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The second number is the length of the slice, where its end was asked for."""
    shard_numel = -(-numel // world_size)
    return rank * shard_numel, shard_numel


def pads_each_shard(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """One element more for everybody, always. It fits, and wastes memory when nothing is left."""
    shard_numel = numel // world_size + 1
    return rank * shard_numel, (rank + 1) * shard_numel


def spreads_the_rest(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The first ranks take one more each, as `torch.tensor_split` does: not equally long."""
    short, rest = divmod(numel, world_size)
    start = rank * short + min(rank, rest)
    return start, start + short + (rank < rest)


def always_adds(numel: int, world_size: int) -> int:
    """One more slice than needed when the length is a multiple already."""
    return (numel // world_size + 1) * world_size


def rounds_down(numel: int, world_size: int) -> int:
    """Rounding down makes equal slices by dropping parameters."""
    return numel // world_size * world_size


def adds_the_remainder(numel: int, world_size: int) -> int:
    """The remainder is what is left over, not what is missing to the next multiple."""
    return numel + numel % world_size


def adds_the_most(numel: int, world_size: int) -> int:
    """Adding world_size - 1 is half of the idiom; the division that rounds down is missing."""
    return numel + world_size - 1


def divides_floats(numel: int, world_size: int) -> int:
    """`/` makes a float, which counts exactly only up to 2**53; `//` stays with whole numbers."""
    return math.ceil(numel / world_size) * world_size


EXERCISES = (
    Exercise(
        id="0.1",
        target="zerolab.flat:shard_bounds",
        minutes=4,
        difficulty=1,
        check=check_shard_bounds,
        hints=(
            "All slices are equally long. How long must they be so that 10 elements fit into 4?",
            "`padded_numel(10, 4)` is 12, so each slice has 12 // 4 = 3 elements. "
            "Where does the slice of rank 2 start?",
            "`shard_numel = padded_numel(numel, world_size) // world_size`; a rank starts at "
            "`rank * shard_numel` and stops `shard_numel` later.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    drops_the_rest,
                    last_takes_the_rest,
                    stops_at_numel,
                    counts_ranks_from_one,
                    stop_is_the_last,
                    returns_the_length,
                    pads_each_shard,
                    spreads_the_rest,
                ),
            )
        ),
        hunted=(
            "stops_at_numel",
            "counts_ranks_from_one",
            "stop_is_the_last",
            "returns_the_length",
            "pads_each_shard",
        ),
    ),
    Exercise(
        id="0.2",
        target="zerolab.flat:padded_numel",
        minutes=5,
        difficulty=1,
        check=check_padded_numel,
        hints=(
            "12 elements on 4 ranks need no padding, 13 need 3 more. What separates the two?",
            "Divide so that the result is rounded up, then multiply. "
            "`//` rounds down; `-(-a // b)` rounds up.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (always_adds, rounds_down, adds_the_remainder, adds_the_most, divides_floats),
            )
        ),
        hunted=("always_adds", "rounds_down", "adds_the_remainder", "adds_the_most"),
    ),
)


# 0.3, 0.4: numbers to predict.


def states_at_stage_1() -> float:
    """Return the MiB of states on one GPU: gpt-10m, bf16, stage 1."""
    # Two steps: Adam's averages do not exist before the end of the first.
    held = training.train(stage=1, steps=2).fullest.state_bytes
    return sum(held.values()) / 2**20


def passes_at_stage_3() -> float:
    """Return how often the model's parameters cross the network in one step of stage 3."""
    runs = [training.train(stage=stage, steps=1, model="gpt-1m") for stage in (1, 3)]
    moved = [run.fullest.elements_moved for run in runs]
    return 2 * moved[1] / moved[0]


PREDICTIONS = (
    Prediction(
        id="0.3",
        what="At stage 0 each GPU holds 16 bytes for each of 10,795,008 parameters: 164.7 MiB. "
        "How much of that is left on one GPU at stage 1?",
        unit="MiB",
        measure=states_at_stage_1,
        why="Parameters and gradients stay whole, 2 + 2 bytes each; master weights and both "
        "averages, 4 + 8 bytes, are divided by the number of ranks.",
    ),
    Prediction(
        id="0.4",
        what="Stages 0, 1 and 2 move the model twice a step: as gradients and as parameters. "
        "How often does stage 3 move it?",
        unit="passes",
        measure=passes_at_stage_3,
        why="Parameters are gathered for forward, freed, and gathered again for backward; "
        "gradients are reduced once.",
    ),
)
