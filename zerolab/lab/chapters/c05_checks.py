"""Chapter 5: the checks of 05_gradient_reduce_scatter: bytes at rest, at the peak, and moved.

Owns nothing. References are torch in one process, the ledger of real runs, and numbers that were
worked out by hand.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from ... import device
from ...sim import layouts
from ..outcome import Wrong
from . import c04_checks, stage_runs
from .stage_runs import DEEP_LAYERS, DEEP_NUMEL, Plan, Shown

Function = Callable[..., Any]


# 5.2 keep_own_slice


def check_keep_own_slice(answer: Function) -> Iterator[str]:
    """Values, bytes and kinds on the ledger; then stage 2 as DeepSpeed does it."""
    for dtype in (torch.float32, torch.bfloat16):
        for again in (False, True):
            _check_kept(answer, dtype, again=again)
        yield f"{str(dtype).removeprefix('torch.')}: the values, and nothing but the slice is held"
    plan = Plan(2, 4, reduce_scatter=False, accum_steps=2)
    ranks = stage_runs.run(plan)
    yield stage_runs.same_weights(plan, ranks, "keep_own_slice(bucket)")
    numel = stage_runs.padded(4)
    for shown in ranks:
        _check_grad(shown, 4 * numel // 4, plan, "keep_own_slice(bucket)")
    yield "with `reduce_scatter: false` a rank keeps a quarter of the gradients"


def _check_kept(answer: Function, dtype: torch.dtype, *, again: bool) -> None:
    bucket = c04_checks.make_bucket((16, 20, 12), 4, 1, [1])
    wanted = "bucket" if again else "grad"
    gpu = device.VirtualGPU()
    with gpu:
        with gpu.tag("bucket"):
            full = torch.arange(48.0).to(dtype)
        if again:
            with gpu.tag("grad"):
                bucket.reduced = torch.zeros(12, dtype=dtype)
        before = gpu.by_kind()
        bucket.incoming = full[12:24]
        kept = answer(bucket)
        _check_tensor(kept, dtype)
        bucket.incoming = None
        size = full.nbytes
        del full
        after = gpu.by_kind()
    grew = {
        kind: after.get(kind, 0) - before.get(kind, 0) + (size if kind == "bucket" else 0)
        for kind in {*after, *before}
    }
    expected = {wanted: 12 * dtype.itemsize}
    observed = {kind: nbytes for kind, nbytes in grew.items() if nbytes}
    if observed != expected:
        raise Wrong(
            f"A slice of 12 {dtype} elements of 48, {'beside' if again else 'without'} an earlier "
            f"mean: when the full gradients are let go, {observed} bytes more are held.",
            expected=expected,
            observed=observed,
            call="keep_own_slice(bucket)",
        )


def _check_tensor(kept: Any, dtype: torch.dtype) -> None:
    if not isinstance(kept, torch.Tensor) or kept.shape != (12,):
        raise Wrong(
            "It must return a tensor of the slice's shape.",
            expected="tensor of shape (12,)",
            observed=getattr(kept, "shape", kept),
            call="keep_own_slice(bucket)",
        )
    if kept.dtype != dtype or kept.tolist() != [float(n) for n in range(12, 24)]:
        raise Wrong(
            f"The slice holds {kept.dtype} {kept.tolist()[:3]} and so on; it was {dtype} "
            "[12.0, 13.0, 14.0] and so on.",
            expected=f"12 to 23 in {dtype}",
            observed=f"{kept.tolist()} in {kept.dtype}",
            call="keep_own_slice(bucket)",
        )


def _check_grad(shown: Shown, expected: int, plan: Plan, call: str) -> None:
    held = shown.ready.get("grad", 0)
    if held != expected:
        raise Wrong(
            f"{stage_runs.describe(plan)}: when its gradients are ready a rank holds {held} bytes "
            f"of them; its slice is {expected}.",
            expected=expected,
            observed=held,
            rank=shown.rank,
            call=call,
        )


# 5.5 reduction_passes

PASSES = {  # (stage, micro-steps, chosen, all_reduce): passes over the model
    (1, 4, None, True): 2,
    (0, 1, None, False): 2,
    (0, 4, None, False): 2,
    (0, 4, None, True): 2,
    (1, 1, None, False): 1,
    (1, 4, None, False): 1,
    (2, 1, None, False): 1,
    (2, 4, None, False): 4,
    (3, 4, None, False): 4,
    (2, 4, None, True): 8,
    (0, 4, True, False): 8,
    (1, 4, True, False): 4,
    (2, 4, False, False): 1,
    (2, 4, False, True): 2,
}


def check_reduction_passes(answer: Function) -> Iterator[str]:
    """Numbers, then what the engine moves at every stage with three micro-steps."""
    for arguments, expected in PASSES.items():
        _check_passes(answer, arguments, expected)
    yield f"{len(PASSES)} combinations of stage, micro-steps and options"
    for stage in (0, 1, 2, 3):
        measured = measured_passes(Plan(stage, 2, accum_steps=3))
        _check_passes(answer, (stage, 3, None, False), measured)
    yield "stages 0 to 3 with three micro-steps: what the engine's ledger counts"
    for stage in (0, 1):
        plan = Plan(stage, 2, accum_steps=3, reduce="micro_step")
        _check_passes(answer, (stage, 3, True, False), measured_passes(plan))
    yield "stages 0 and 1, told to reduce after each micro-step"


def _check_passes(answer: Function, arguments: tuple[Any, ...], expected: int) -> None:
    value = answer(*arguments)
    if type(value) is not int or value != expected:
        stage, accum_steps, every, all_reduce = arguments
        how = {None: "its own schedule", True: "reduced every time", False: "reduced once"}[every]
        also = ", all-reduced" if all_reduce else ""
        raise Wrong(
            f"Stage {stage}, {accum_steps} micro-steps, {how}{also}: its reductions move the model "
            f"{expected} times, not {value}.",
            expected=expected,
            observed=value,
            call=f"reduction_passes{arguments}",
        )


@cache
def measured_passes(plan: Plan) -> int:
    """Return what the reductions of a step moved in a run of the engine, in passes."""
    moved = stage_runs.run(plan)[0].moved()
    total = 2 * moved.get("all_reduce", 0) + moved.get("reduce_scatter", 0)
    return total // stage_runs.padded(plan.world_size)


# 5.4 bucket_peak_numel

PEAKS = (  # units of parameter lengths, bucket limit, ranks, arrivals, in flight, elements
    (((10, 10, 10),), 10, 1, None, 1, 20),
    (((20, 5, 20),), 20, 1, None, 1, 25),
    (((10, 10, 10),), 10, 1, None, 0, 10),
    (((10, 10, 10),), 10, 4, None, 1, 24),
    (((10, 10, 10),), 10, 1, (1, 2, 0), 1, 30),
    (((10, 10, 10),), 10, 1, (2, 0, 1), 1, 30),
    (((5, 5, 4, 6),), 10, 1, None, 1, 20),
    (((30, 2, 2, 8),), 12, 1, None, 1, 42),
    (((9, 30, 1, 2),), 12, 4, (0, 2, 0, 1), 1, 48),
    (((10, 10, 10, 10),), 10, 1, (1, 0, 2, 3), 1, 20),
    (((8, 8, 8, 8, 8, 8),), 8, 3, (0, 1, 2, 5, 3, 4), 0, 18),
)


def check_bucket_peak_numel(answer: Function) -> Iterator[str]:
    """Small cases by hand, then the ledger of stage 2."""
    for units, limit, world_size, arrivals, in_flight, expected in PEAKS:
        sizes = layouts.layout_of(units, limit, world_size)
        value = answer(sizes, arrivals, in_flight)
        buckets = [each.numel for each in sizes.trained]
        if value != expected:
            order = "in order" if arrivals is None else f"in the order {arrivals}"
            raise Wrong(
                f"Buckets of {buckets} elements on {world_size} ranks, gradients {order}, "
                f"{in_flight} on its way: at most {expected} elements at once, not {value}.",
                expected=expected,
                observed=value,
                call=f"bucket_peak_numel(sizes, {arrivals}, {in_flight})",
            )
    yield f"{len(PEAKS)} cases worked out by hand"
    for world_size in (2, 4):
        _compare_with_ledger(answer, world_size)
        yield f"stage 2 on {world_size} ranks: the most that the ledger saw, to the byte"


def _compare_with_ledger(answer: Function, world_size: int) -> None:
    measured = measured_peak(world_size) // 4
    sizes = layouts.layout(Plan(2, world_size, deep=True).model(), DEEP_NUMEL, world_size)
    value = answer(sizes)
    if value != measured:
        raise Wrong(
            f"Six layers of {DEEP_NUMEL} elements on {world_size} ranks: on the ledger at most "
            f"{measured} elements of buckets, not {value}.",
            expected=measured,
            observed=value,
            call="bucket_peak_numel(sizes)",
        )


@cache
def measured_peak(world_size: int) -> int:
    """Return the most bytes of buckets in the last step of a run at stage 2, in fp32."""
    return max(shown.most["bucket"] for shown in stage_runs.run(Plan(2, world_size, deep=True)))


# 5.3 Zero2


def check_zero2(answer: Function) -> Iterator[str]:
    """Weights, bytes at rest and at the peak, elements moved, order."""
    call = "Zero2(root, units, options)"
    for op in ("mean", "sum"):
        plan = Plan(2, 2, optimizer="SGD", op=op)
        yield stage_runs.same_weights(plan, stage_runs.run(plan), call)
    accumulated = Plan(2, 3, accum_steps=3)
    ranks = stage_runs.run(accumulated)
    yield stage_runs.same_weights(accumulated, ranks, call)
    numel = stage_runs.padded(3)
    expected = {"reduce_scatter": 3 * numel, "all_gather": numel}
    stage_runs.same_traffic(accumulated, ranks, expected, call)
    _check_kinds(accumulated, ranks, 4 * numel // 3, call)
    yield f"3 micro-steps reduce 3 times: {3 * numel} elements, and {numel} gathered"
    plan = Plan(2, 4, "bf16")
    ranks = stage_runs.run(plan)
    stage_runs.same_bits(plan, ranks, stage_runs.stage_0(4, "bf16"), call)
    yield "bf16 on 4 ranks: the bits of stage 0"
    numel = stage_runs.padded(4)
    for shown in ranks:
        _check_grad(shown, 2 * numel // 4, plan, call)
    yield f"bytes held: {2 * numel // 4} of gradients, a quarter of {2 * numel}"
    stage_runs.same_traffic(plan, ranks, {"reduce_scatter": numel, "all_gather": numel}, call)
    yield f"elements moved: {numel} reduced and {numel} gathered"
    deep = Plan(2, 2, deep=True)
    ranks = stage_runs.run(deep)
    _check_peak(deep, ranks, call)
    yield f"at the peak two buckets of {DEEP_LAYERS}, besides the own slices"
    _check_order(ranks, call)
    yield "every bucket left while backward was running, and nobody waited for it there"
    other = Plan(2, 4, reduce_scatter=False)
    ranks = stage_runs.run(other)
    stage_runs.same_traffic(other, ranks, {"all_reduce": numel, "all_gather": numel}, call)
    for shown in ranks:
        _check_grad(shown, 4 * numel // 4, other, call)
    yield stage_runs.same_weights(other, ranks, call)
    yield "with `reduce_scatter: false` it all-reduces, and still keeps a quarter"
    wide = Plan(2, 2, "bf16", wide=True)
    for shown in stage_runs.run(wide):
        _check_grad(shown, 4 * stage_runs.padded(2) // 2, wide, call)
    yield "means that travel in bf16 are kept in the dtype that `grad_dtype` says"


def _check_kinds(plan: Plan, ranks: list[Shown], own: int, call: str) -> None:
    """What is only added to the slices that are there is no gradient that stays."""
    for shown in ranks:
        most = shown.most.get("grad", 0)
        if most > own:
            raise Wrong(
                f"{stage_runs.describe(plan)}: the slices of all gradients are {own} bytes, and at "
                f'one moment {most} count as "grad". A mean that is added to an earlier one is '
                "on its way, as `kind_of_mean` says.",
                expected=own,
                observed=most,
                rank=shown.rank,
                call=call,
            )


def _check_peak(plan: Plan, ranks: list[Shown], call: str) -> None:
    layer = 4 * len(range(0, DEEP_NUMEL, plan.world_size)) * plan.world_size  # bytes, padded
    allowed = {"bucket": 2 * layer, "grad": DEEP_LAYERS * layer // plan.world_size}
    for shown in ranks:
        for kind, most in allowed.items():
            if shown.most.get(kind, 0) > most:
                raise Wrong(
                    f"{stage_runs.describe(plan)}, {DEEP_LAYERS} layers of {layer} bytes: at one "
                    f"moment a rank holds {shown.most[kind]} bytes of {kind}, where {most} are "
                    "enough.",
                    expected=allowed,
                    observed={one: shown.most.get(one, 0) for one in allowed},
                    rank=shown.rank,
                    call=call,
                )


def _check_order(ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        reductions = [event for event in shown.events if event.op != "all_gather"]
        waited = [event for event in reductions if not event.asynchronous]
        waited += [one for one, two in pairwise(reductions) if one.ended < two.time]
        late = [event for event in reductions if event.phase != "backward"]
        if waited or late:
            what = "waited for where they were started" if waited else "started after backward"
            raise Wrong(
                f"{len(waited or late)} of {len(reductions)} reductions were {what}: nothing of "
                "them is hidden behind the computation.",
                expected="async_op=True, in backward",
                observed=f"{len(waited)} waited for, {len(late)} late",
                rank=shown.rank,
                call=call,
            )
