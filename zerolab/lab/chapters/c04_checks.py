"""Chapter 4: the checks of 04_optimizer_sharding: weights, bytes held, elements moved.

Owns nothing. References are torch in one process, positions that are counted one by one, and the
closed forms 12 Psi / N and 2 Psi as numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...bucket import Bucket, Segment, Slot
from .. import evidence
from ..outcome import Wrong
from . import stage_runs
from .stage_runs import NUMEL, Plan, Shown

Function = Callable[..., Any]
Range = tuple[int, int]
IDLE = 4  # elements of the layer that nothing uses: they stand at the end of the weights


# 4.2 pack


def check_pack(answer: Function) -> Iterator[str]:
    """Buffers full of NaN, packed; then stage 1 on it."""
    row = torch.arange(1.0, 7.0).view(2, 3)
    _check_packed(answer, [row, torch.tensor(50.0), torch.arange(7.0, 11.0)], 3)
    yield "a matrix, a scalar and a vector: end to end, zeros behind them"
    _check_packed(answer, [torch.arange(12.0).view(3, 4).t(), row], 1)
    yield "a transposed matrix: by rows, as its view will read them"
    weight = nn.Parameter(row.clone())
    _check_packed(answer, [weight], 0)
    yield "a parameter: its values, and no part of its graph"
    ranks = stage_runs.run(Plan(1, 3))
    yield stage_runs.same_weights(Plan(1, 3), ranks, "pack(flat, tensors, starts)")


def _check_packed(answer: Function, tensors: list[torch.Tensor], padding: int) -> None:
    starts = [sum(t.numel() for t in tensors[:i]) for i in range(len(tensors))]
    numel = sum(t.numel() for t in tensors)
    buffer = torch.full((numel + padding,), float("nan"))
    answer(buffer, tensors, starts)
    values = [float(x) for t in tensors for x in t.detach().reshape(-1)] + [0.0] * padding
    call = f"pack(flat, {len(tensors)} tensors, {starts}), {padding} of padding"
    if buffer.requires_grad:
        raise Wrong(
            "The buffer now belongs to the graph of a parameter; it needs values alone.",
            expected="detached values",
            observed="requires_grad",
            call=call,
        )
    if bool(buffer.isnan().all()):
        raise Wrong(
            "Nothing was written into the buffer: it still holds the NaN it was filled with.",
            expected=values,
            observed="NaN everywhere",
            call=call,
        )
    for position, expected in enumerate(values):
        if buffer[position].item() != expected:
            raise Wrong(
                f"Position {position} of the buffer holds {buffer[position].item():g}, not "
                f"{expected:g}{'; it is padding' if position >= numel else ''}.",
                expected=values,
                observed=buffer.tolist(),
                call=call,
            )


# 4.3 intersect

RANGES = ((0, 0), (0, 4), (2, 3), (2, 7), (4, 4), (4, 9), (7, 9))


def check_intersect(answer: Function) -> Iterator[str]:
    """All pairs of a few ranges, against sets of positions; then stage 1 on it."""
    for first, second in (((0, 4), (2, 7)), ((2, 7), (0, 4)), ((2, 3), (0, 4)), ((0, 4), (2, 3))):
        _check_shared(answer, first, second)
    yield "ranges that overlap, and one that lies in the other"
    for first in RANGES:
        for second in RANGES:
            _check_shared(answer, first, second)
    yield f"{len(RANGES) ** 2} pairs, those that share nothing among them"
    ranks = stage_runs.run(Plan(1, 3))
    yield stage_runs.same_weights(Plan(1, 3), ranks, "intersect(first, second)")


def _check_shared(answer: Function, first: Range, second: Range) -> None:
    shared = sorted(set(range(*first)) & set(range(*second)))
    value = answer(first, second)
    if not isinstance(value, tuple) or [type(part) for part in value] != [int, int]:
        raise Wrong("It must return two ints in a tuple.", expected="(start, stop)", observed=value)
    if value[0] > value[1]:
        raise Wrong(
            f"{first} and {second} share nothing; {value} stops before it starts. An empty "
            "range has start == stop.",
            expected="start == stop",
            observed=value,
        )
    if list(range(*value)) != shared:
        raise Wrong(
            f"{first} and {second} share {len(shared)} positions; {value} has "
            f"{len(range(*value))}.",
            expected=shared,
            observed=list(range(*value)),
        )


# 4.4 cut_segments

CUTS = (((4, 4), 2), ((6, 1, 9, 4), 4), ((3, 8), 3), ((1, 1, 1), 4), ((5,), 2), ((7, 2, 6), 1))


def check_cut_segments(answer: Function) -> Iterator[str]:
    """Segments of many buckets, position by position; views; then stages 1 and 0 on it."""
    for numels, world_size in CUTS:
        for rank in range(world_size):
            _check_cut(answer, make_bucket(numels, world_size, rank, [rank]), [rank])
    yield f"{len(CUTS)} buckets, every rank's shard: the right positions of every parameter"
    for numels, world_size in CUTS:
        shards = list(range(world_size))
        _check_cut(answer, make_bucket(numels, world_size, 0, shards), shards)
    yield "all shards, as stage 0 owns them: empty pieces left out"
    ranks = stage_runs.run(Plan(1, 3))
    call = "cut_segments(bucket, shards)"
    yield stage_runs.same_weights(Plan(1, 3), ranks, call)
    for shown in ranks:
        expected = 8 * own_numel(3, shown.rank) + 4 * 4  # four used tensors, a counter each
        if shown.ready["optimizer"] != expected:
            raise Wrong(
                f"Rank {shown.rank} of 3 holds {shown.ready['optimizer']} bytes of averages.",
                expected=expected,
                observed=shown.ready["optimizer"],
                rank=shown.rank,
                call=call,
            )
    stage_runs.same_bits(Plan(1, 3), ranks, stage_runs.run(Plan(0, 3)), call)
    yield "bytes held: 8 for each own element; and the bits of stage 0"


def make_bucket(numels: Sequence[int], world_size: int, rank: int, shards: Sequence[int]) -> Bucket:
    """Return a bucket whose elements are their own positions, as far as `shards` own them."""
    starts = [sum(numels[:i]) for i in range(len(numels))]
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    slots = [
        Slot(param, f"p{i}", start, param.shape, param.numel())
        for i, (param, start) in enumerate(zip(params, starts, strict=True))
    ]
    bucket = Bucket(
        index=0,
        name="check/0",
        slots=slots,
        dtype=torch.float32,
        device=torch.device("cpu"),
        world_size=world_size,
        rank=rank,
        trainable=True,
    )
    bucket.flat_param = torch.arange(float(bucket.padded_numel))
    shard_numel = bucket.padded_numel // world_size
    bucket.shard = bucket.flat_param[slice(*bucket.bounds)]
    bucket.target = bucket.flat_param[shards[0] * shard_numel : (shards[-1] + 1) * shard_numel]
    return bucket


def _check_cut(answer: Function, bucket: Bucket, shards: list[int]) -> None:
    found = answer(bucket, shards)
    numels = [slot.numel for slot in bucket.slots]
    call = f"cut_segments(bucket of {numels} on {bucket.world_size} ranks, {shards})"
    what = f"Parameters of {numels} elements on {bucket.world_size} ranks, shards {shards}"
    if not isinstance(found, list) or not all(isinstance(one, Segment) for one in found):
        raise Wrong("It must return a list of Segment.", expected="a list", observed=found)
    pieces = expected_pieces(bucket, shards)
    if [(one.slot, one.shard) for one in found] != [piece[:2] for piece in pieces]:
        count = f"{len(found)} segments, {len(pieces)} expected, as (parameter, shard)."
        others = "the segments are not of these parameters and shards, as (parameter, shard)."
        raise Wrong(
            f"{what}: {count if len(found) != len(pieces) else others}",
            expected=[piece[:2] for piece in pieces],
            observed=[(one.slot, one.shard) for one in found],
            call=call,
        )
    origin = int(bucket.target[0].item()) if bucket.target.numel() else 0
    for one, (slot, shard, positions) in zip(found, pieces, strict=True):
        values = [int(x) for x in one.param.detach().tolist()]
        if values != positions:
            raise Wrong(
                f"{what}: of parameter {slot} shard {shard} has the positions {positions}, "
                f"and the segment has {values}.",
                expected=positions,
                observed=values,
                call=call,
            )
        _check_place(one, bucket, origin, f"{what}: parameter {slot}", call)


def _check_place(one: Segment, bucket: Bucket, origin: int, what: str, call: str) -> None:
    """A segment is a view into the target, and says where it begins."""
    if not one.param.numel():
        return
    first = int(one.param[0].item())
    if one.start != first - origin:
        raise Wrong(
            f"{what}: start is {one.start}, but the piece begins {first - origin} elements after "
            "the start of what this rank owns.",
            expected=first - origin,
            observed=one.start,
            call=call,
        )
    if one.param.untyped_storage().data_ptr() != bucket.target.untyped_storage().data_ptr():
        raise Wrong(
            f"{what}: the segment is a copy. What the optimizer writes into it never reaches the "
            "parameters.",
            expected="a view into bucket.target",
            observed="memory of its own",
            call=call,
        )


def expected_pieces(bucket: Bucket, shards: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return (parameter, shard, positions) of each segment, counted position by position."""
    owner = [number for number, slot in enumerate(bucket.slots) for _ in range(slot.numel)]
    pieces = []
    for shard in shards:
        bounds = range(shard * bucket.shard_numel, (shard + 1) * bucket.shard_numel)
        for number in range(len(bucket.slots)):
            inside = [p for p in bounds if p < len(owner) and owner[p] == number]
            if inside or len(shards) == 1:
                pieces.append((number, shard, inside))
    return pieces


def own_numel(world_size: int, rank: int) -> int:
    """Return how many used elements of the small model lie in a rank's shards, counted."""
    found = 0
    for number, numel in enumerate(stage_runs.BUCKET_NUMELS):
        shard_numel = len(range(0, numel, world_size))
        owned = range(rank * shard_numel, (rank + 1) * shard_numel)
        idle = IDLE if number == 0 else 0  # the unused layer comes first in the first bucket
        found += sum(idle <= position < numel for position in owned)
    return found


# 4.5 step_bucket


def check_step_bucket(answer: Function) -> Iterator[str]:
    """Weights over several steps, what nobody used, clipping, and what is freed."""
    call = "step_bucket(bucket, groups, unused, factor)"
    plan = Plan(1, 3)
    ranks = stage_runs.run(plan)
    _check_idle(ranks, call)
    yield "the layer that nobody used has not moved: no decay, no averages"
    yield stage_runs.same_weights(plan, ranks, call)
    _check_states(ranks, call)
    yield "and every bucket is empty again, ready for the next backward"
    clipped = Plan(1, 3, optimizer="SGD", clipping=0.05)
    yield stage_runs.same_weights(clipped, stage_runs.run(clipped), call)
    _check_nothing_left("fp32", ranks, call)
    _check_nothing_left("bf16", stage_runs.run(Plan(1, 4, "bf16")), call)
    yield "after the step no byte of gradients is left, in fp32 and in bf16"
    _check_pieces(answer, call)
    yield "a parameter in two pieces, as at stage 0, beside one that nobody used"
    _check_wide(answer, call)
    yield "bf16 gradients are multiplied in fp32"


def _check_nothing_left(dtype: str, ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        left = shown.ended.get("grad", 0) + shown.ended.get("bucket", 0)
        if left:
            raise Wrong(
                f"{dtype}: after the step a rank still holds {left} bytes of gradients.",
                expected=0,
                observed=left,
                rank=shown.rank,
                call=call,
            )


class _Caught:
    """In the place of the optimizer's groups: keeps the gradients that the segments had."""

    def __init__(self) -> None:
        self.grads: list[torch.Tensor | None] = []

    def step(self, bucket: Bucket) -> None:
        """Take no step."""
        self.grads = [segment.param.grad for segment in bucket.segments]


def _check_pieces(answer: Function, call: str) -> None:
    """Where a rank owns several shards, a parameter may have several segments."""
    bucket, caught = make_bucket((6, 4), 2, 0, [0, 1]), _Caught()
    cut = ((0, 0, 0, 5), (0, 1, 5, 6), (1, 1, 6, 10))  # parameter, shard, start, stop
    bucket.segments = [
        Segment(slot, shard, start, nn.Parameter(bucket.target[start:stop]))
        for slot, shard, start, stop in cut
    ]
    bucket.reduced = torch.arange(1.0, 11.0)
    answer(bucket, caught, {1}, None)
    found = [None if grad is None else grad.tolist() for grad in caught.grads]
    expected = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0], None]
    if found != expected:
        raise Wrong(
            "Parameter 0 in two segments, parameter 1 unused in one: the optimizer gets the "
            f"gradients {found}. `unused` holds parameters, `segment.slot`.",
            expected=expected,
            observed=found,
            call=call,
        )


def _check_wide(answer: Function, call: str) -> None:
    """A factor is applied to the gradients in the dtype of what is updated."""
    bucket, caught = make_bucket((6,), 1, 0, [0]), _Caught()
    bucket.segments = [Segment(0, 0, 0, nn.Parameter(bucket.target))]
    bucket.reduced = torch.arange(1.0, 7.0).to(torch.bfloat16)
    answer(bucket, caught, set(), torch.tensor(1 / 3))
    grad = caught.grads[0] if caught.grads else None
    found = [] if grad is None else [round(float(x), 6) for x in grad]
    expected = [round(number / 3, 6) for number in range(1, 7)]
    if found != expected:
        raise Wrong(
            "bf16 gradients of 1 to 6 and a factor of 1/3: the optimizer gets "
            f"{', '.join(f'{x:g}' for x in found) or 'none'}. It updates fp32, so convert first, "
            "and multiply then: bf16 has three digits.",
            expected=expected,
            observed=found,
            call=call,
        )


def _check_idle(ranks: list[Shown], call: str) -> None:
    before = evidence.weights_of(Plan(1, 1).model())[-IDLE:]
    for shown in ranks:
        moved = (shown.weights[-IDLE:] - before).abs().max().item()
        if moved:
            raise Wrong(
                f"The layer that no rank used has moved by {moved:.2g}: its positions are in "
                "`unused`.",
                expected="the same values",
                observed=f"{moved:.2g} off",
                rank=shown.rank,
                call=call,
            )


def _check_states(ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        others = {name: state for name, state in shown.states.items() if state != "empty"}
        if others:
            said = ", ".join(f"{name} is {state}" for name, state in others.items())
            raise Wrong(
                f"After the step of rank {shown.rank} bucket {said}: its gradients are used up, "
                "so it is GradState.EMPTY, and the next backward may fill it.",
                expected="empty",
                observed=said,
                rank=shown.rank,
                call=call,
            )


# 4.6 Zero1


def check_zero1(answer: Function) -> Iterator[str]:
    """Weights, bits, bytes held, elements moved, and that backward need not wait."""
    call = "Zero1(root, units, options)"
    plans = [Plan(1, 3), Plan(1, 2, optimizer="SGD"), Plan(1, 2, optimizer="SGD", op="sum")]
    for plan in plans:
        ranks = stage_runs.run(plan)
        stage_runs.same_on_all_ranks(plan, ranks, call)
        yield stage_runs.same_weights(plan, ranks, call)
    plan = Plan(1, 4, "bf16")
    ranks = stage_runs.run(plan)
    stage_runs.same_bits(plan, ranks, stage_runs.stage_0(4, "bf16"), call)
    yield "bf16 on 4 ranks: the bits of stage 0"
    for shown in ranks:
        _check_held(shown, 4, call)
    yield f"bytes held: master weights and averages divided by 4, {NUMEL} elements in bf16"
    numel = stage_runs.padded(4)
    stage_runs.same_traffic(plan, ranks, {"reduce_scatter": numel, "all_gather": numel}, call)
    yield f"elements moved: {numel} reduced and {numel} gathered, as many as stage 0 moves"
    _check_asynchronous(ranks, call)
    _check_published(ranks, call)
    other = Plan(1, 4, reduce_scatter=False)
    ranks = stage_runs.run(other)
    stage_runs.same_traffic(other, ranks, {"all_reduce": numel, "all_gather": numel}, call)
    yield stage_runs.same_weights(other, ranks, call)
    yield "backward never waits; and with `reduce_scatter: false` it all-reduces, as asked"


def _check_held(shown: Shown, world_size: int, call: str) -> None:
    padded = stage_runs.padded(world_size)
    expected = {
        "param": 2 * padded,
        "grad": 2 * padded,
        "master": 4 * padded // world_size,
        "optimizer": 8 * own_numel(world_size, shown.rank) + 4 * 4,
    }
    held = {kind: shown.ready.get(kind, 0) for kind in expected}
    for kind, wanted in expected.items():
        if held[kind] != wanted:
            raise Wrong(
                f"Rank {shown.rank} of {world_size} holds {held[kind]} bytes of {kind}, where "
                f"stage 1 needs {wanted}.",
                expected=expected,
                observed=held,
                rank=shown.rank,
                call=call,
            )


def _check_published(ranks: list[Shown], call: str) -> None:
    """One bucket is gathered while the next is updated: the step waits when all are started."""
    for shown in ranks:
        waited = [e for e in shown.events if e.op == "all_gather" and not e.asynchronous]
        if waited:
            raise Wrong(
                f"{len(waited)} gathers were waited for where they were started, one bucket after "
                "the other: `publish` starts a gather and returns its work, and the step waits "
                "for all of them at its end.",
                expected="async_op=True",
                observed=f"{len(waited)} gathers waited for",
                rank=shown.rank,
                call=call,
            )


def _check_asynchronous(ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        reductions = [e for e in shown.events if e.op != "all_gather"]
        waited = [e for e in reductions if not e.asynchronous]
        waited += [one for one, two in pairwise(reductions) if one.ended < two.time]
        if waited:
            raise Wrong(
                f"{len(waited)} reductions were waited for where they were started, in backward: "
                "nothing of them overlaps with it.",
                expected="async_op=True",
                observed=f"{waited[0].op} in the phase {waited[0].phase}",
                rank=shown.rank,
                call=call,
            )
