"""Chapter 3: the checks of the blank and of the parts: buckets and the batch equation.

Owns layouts and batch sizes to try. References are layouts counted up tensor by tensor, numbers
that DeepSpeed was seen to infer, and plain torch in one process.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ... import engine
from ...config import triad
from .. import evidence
from ..outcome import Wrong
from . import c03_moments as moments
from . import c03_runs as runs

Function = Callable[..., Any]
PLANS = (  # lengths, limit
    ((3, 5, 2, 6), 8),
    ((4, 4, 9, 1, 2), 8),
    ((20, 20, 20), 20),
    ((7, 1, 30, 1, 7), 8),
    ((1, 6, 5, 2), 7),
    ((5,), 8),
    ((), 8),
)
TRIADS = {  # (total, micro, accum) on 8 ranks, and what DeepSpeed 0.19.8 makes of it
    (64, 4, 2): (64, 4, 2),
    (64, 4, None): (64, 4, 2),
    (64, None, 4): (64, 2, 4),
    (None, 4, 3): (96, 4, 3),
    (64, None, None): (64, 8, 1),
    (None, 4, None): (32, 4, 1),
    (33, None, None): (33, 4, 1),
    (16, None, 4): (16, 0, 4),
    (16, 4, None): (16, 4, 0),
    (60, 4, None): (60, 4, 1),
    (64, 4, 3): (64, 4, 3),
}
CALL = "train_data_parallel(model, batches, make_optimizer)"


# 3.1 train_data_parallel


def check_train_data_parallel(answer: Function) -> Iterator[str]:
    """Weights after every step, calls, order, bytes, and what is left behind."""
    ranks = runs.share()
    alone = runs.share_alone()
    for rank, shown in enumerate(ranks):
        _check_calls(shown, rank)
        _check_weights(shown, alone, rank)
    yield f"weights after each of {runs.STEPS} steps, on each rank: those of one process"
    _check_others(ranks)
    yield f"one all-reduce a step, {2 * runs.PSI} elements moved for {runs.PSI} parameters"
    for rank, shown in enumerate(ranks):
        for step, early in enumerate(shown.early):
            if runs.uses_everything(rank, step) and early != 1:
                raise Wrong(
                    "The reduction must be on its way before backward is over, and at the end of "
                    f"backward {early} had been started.",
                    expected="1 all-reduce started inside backward",
                    observed=early,
                    call=CALL,
                    rank=rank,
                )
    yield "it starts inside backward, and a rank that misses a gradient joins in afterwards"
    _check_leftovers(ranks)
    yield "gradients are held once, and no hook stays behind"


def _check_calls(shown: runs.Shared, rank: int) -> None:
    if len(shown.calls) != runs.STEPS:
        raise Wrong(
            f"{len(shown.calls)} of {runs.STEPS} batches were used: a step for each of them.",
            expected=f"{runs.STEPS} steps",
            observed=f"{len(shown.calls)} steps",
            call=CALL,
            rank=rank,
        )
    calls, moved = [1] * runs.STEPS, [2 * runs.PSI] * runs.STEPS
    if shown.calls != calls or shown.moved != moved:
        raise Wrong(
            f"A step is one all-reduce of {runs.PSI} elements, and here the steps made "
            f"{', '.join(map(str, shown.calls)) or 'no'} calls and moved "
            f"{', '.join(map(str, shown.moved)) or 'no'} elements.",
            expected=f"calls {calls}, elements moved {moved}",
            observed=f"calls {shown.calls}, elements moved {shown.moved}",
            call=CALL,
            rank=rank,
        )


def _check_others(ranks: list[runs.Shared]) -> None:
    """After the first step, nothing but the reduction is called."""
    for rank, shown in enumerate(ranks):
        if shown.others:
            raise Wrong(
                f"Beside its all-reduce a step calls {', '.join(shown.others)}: equal weights that "
                "get equal updates stay equal, so nobody has to be told again.",
                expected="one all-reduce",
                observed=f"also {', '.join(shown.others)}",
                call=CALL,
                rank=rank,
            )


def _check_weights(shown: runs.Shared, alone: list[torch.Tensor], rank: int) -> None:
    for step, (weights, expected) in enumerate(zip(shown.weights, alone, strict=True)):
        apart = (weights.cpu() - expected).abs().max().item()
        if math.isnan(apart):
            raise Wrong(
                f"After step {step} there are NaN among the weights. So are the numbers of a "
                "tensor from the moment it is sent until `wait()` returns.",
                expected="the weights of one process",
                observed="NaN",
                call=CALL,
                rank=rank,
            )
        if not apart <= runs.TOLERANCE:
            raise Wrong(
                f"After step {step} the weights differ from those of one process with the batches "
                f"of all ranks by {apart:.2g}.",
                expected=f"at most {runs.TOLERANCE:g}",
                observed=f"{apart:.2g}",
                call=CALL,
                rank=rank,
            )


def _check_leftovers(ranks: list[runs.Shared]) -> None:
    for rank, shown in enumerate(ranks):
        if shown.bytes_more > 0:
            raise Wrong(
                f"At the end of backward a rank holds {shown.bytes_more} bytes more than plain "
                f"backward does; {runs.PSI} gradients take {4 * runs.PSI}. What a variable of "
                "yours still names counts too: the buffer of the step before lives until `del`.",
                expected="no more bytes than plain backward",
                observed=f"{shown.bytes_more} bytes more",
                call=CALL,
                rank=rank,
            )
        if shown.after:
            raise Wrong(
                "Training is over, and a backward on the model still sends something: a hook "
                "was left behind.",
                expected="no collective",
                observed=f"{shown.after}",
                call=CALL,
                rank=rank,
            )


# 3.2 plan_buckets


def check_plan_buckets(answer: Function) -> Iterator[str]:
    """Layouts, then the engine: what is sent, how long it is, and while what still runs."""
    for numels, limit in PLANS:
        _check_plan(answer, numels, limit)
    yield f"{len(PLANS)} layouts: every tensor once, last first, no bucket above its limit"
    ranks = runs.watch(runs.Case())
    _check_sizes(ranks, runs.LAYER, (runs.PADDED,) * runs.NUM_LAYERS)
    moments.check_sent(ranks)
    yield "the engine packs by it: a bucket for each layer, and each leaves while backward runs on"
    wide = runs.Case(limit=2 * runs.LAYER)
    ranks = runs.watch(wide)
    _check_sizes(ranks, 2 * runs.LAYER, (42, 42, 21))
    yield "twice the limit, three buckets in place of five, as many elements"
    moments.check_grads(ranks, wide)
    yield f"gradients of {runs.STEPS} steps on {runs.WORLD_SIZE} ranks: those of plain torch"


def _check_plan(answer: Function, numels: Sequence[int], limit: int) -> None:
    value = answer(list(numels), limit)
    call = f"plan_buckets({list(numels)}, {limit})"
    shape = "a list of lists of positions"
    if not isinstance(value, list) or not all(isinstance(group, list) for group in value):
        raise Wrong(f"It must return {shape}.", expected=shape, observed=value, call=call)
    expected = _plan(numels, limit)
    if value != expected:
        raise Wrong(
            f"Lengths {tuple(numels)}, limit {limit}: {_what_is_wrong(value, numels, limit)}",
            expected=expected,
            observed=value,
            call=call,
        )


def _what_is_wrong(value: list[list[int]], numels: Sequence[int], limit: int) -> str:
    """Say which rule a layout breaks."""
    flat = [position for group in value for position in group]
    strange = [position for position in flat if position not in range(len(numels))]
    if strange:
        return f"{strange[0]} is no position among {len(numels)} tensors."
    twice_or_never = [i for i in range(len(numels)) if flat.count(i) != 1]
    if twice_or_never:
        return f"position {twice_or_never[0]} must stand in exactly one bucket."
    if flat == sorted(flat) and len(flat) > 1:
        return "they are packed from the first to the last, and backward comes from the last."
    if flat != sorted(flat, reverse=True):
        late = next(i for i in range(1, len(flat)) if flat[i] > flat[i - 1])
        return f"position {flat[late - 1]} has gone ahead of {flat[late]}, which is there earlier."
    for group in value:
        if len(group) > 1 and sum(numels[i] for i in group) > limit:
            return f"the bucket {group} holds more than {limit} elements."
    return f"{len(value)} buckets where {len(_plan(numels, limit))} are enough: {value}."


def _plan(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Return the layout by trying for every tensor whether it still fits."""
    groups: list[list[int]] = []
    for position in range(len(numels) - 1, -1, -1):
        grown = sum(numels[i] for i in (*groups[-1], position)) if groups else limit + 1
        if grown <= limit:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def _check_sizes(ranks: moments.Ranks, limit: int, expected: tuple[int, ...]) -> None:
    for rank, steps in enumerate(ranks):
        if steps[0].sizes != expected:
            raise Wrong(
                f"Five layers of {runs.LAYER} elements, buckets of at most {limit}: the engine "
                f"reduces {len(steps[0].sizes)} buckets, and {len(expected)} are right.",
                expected=expected,
                observed=steps[0].sizes,
                call=f"plan_buckets([16, 4] * 5, {limit})",
                rank=rank,
            )


# 3.7 infer


def check_infer(answer: Function) -> Iterator[str]:
    """What DeepSpeed infers, every pair of numbers, then steps of the engine, counted."""
    for given, expected in TRIADS.items():
        _check_triad(answer, given, 8, expected)
    yield f"{len(TRIADS)} files on 8 ranks: what DeepSpeed infers, contradictions included"
    for world_size in (1, 2, 3, 5):
        for micro in (1, 2, 7):
            for accum in (1, 3):
                total = sum(micro for _ in range(accum) for _ in range(world_size))
                for given in ((None, micro, accum), (total, micro, None), (total, None, accum)):
                    _check_triad(answer, given, world_size, (total, micro, accum))
    yield "any two of three numbers give the third, on 1, 2, 3 and 5 ranks"
    counted = runs.on_ranks(
        _steps_of, {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    )
    for rank, seen in enumerate(counted):
        if seen != (4, 2):
            raise Wrong(
                f"24 samples a step, 2 a forward, {runs.WORLD_SIZE} ranks: the engine updates "
                f"after {seen[0]} micro-steps, and 4 are right.",
                expected="an update after 4 micro-steps, 2 samples in each",
                observed=f"an update after {seen[0]} micro-steps, {seen[1]} samples in each",
                call=f"infer(24, 2, None, {runs.WORLD_SIZE})",
                rank=rank,
            )
    yield f"the engine on {runs.WORLD_SIZE} ranks: 24 samples a step, 2 a forward, update after 4"


def _check_triad(
    answer: Function,
    given: tuple[int | None, int | None, int | None],
    world_size: int,
    expected: tuple[int, int, int],
) -> None:
    value = answer(*given, world_size)
    numbers = tuple(getattr(value, name, None) for name in ("total", "micro", "accum"))
    call = f"infer({', '.join(map(str, given))}, {world_size})"
    if not isinstance(value, triad.Triad):
        raise Wrong(
            "It must return a Triad, such as Triad(total=12, micro=2, accum=3).",
            expected=f"Triad(total={expected[0]}, micro={expected[1]}, accum={expected[2]})",
            observed=value,
            call=call,
        )
    if numbers != expected:
        names = ("train_batch_size", "micro-batch", "accumulation steps")
        wrong = next(i for i in range(3) if numbers[i] != expected[i])
        raise Wrong(
            f"{call}: {names[wrong]} is {expected[wrong]}, not {numbers[wrong]}.",
            expected=f"Triad(total={expected[0]}, micro={expected[1]}, accum={expected[2]})",
            observed=value,
            call=call,
        )


def _steps_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return after how many micro-steps the engine updates, and the samples of a micro-step."""
    model = runs.Crossing(reuse=False).to(evidence.home())
    adamw = {"type": "AdamW", "params": runs.OPTIMIZER}
    trainer, *_ = engine.initialize(model=model, config={**config, "optimizer": adamw})
    micro_steps = 0
    while trainer.global_steps == 0 and micro_steps < 100:
        inputs, targets = (part.to(evidence.home()) for part in runs.batch(0, micro_steps))
        trainer.backward(F.mse_loss(trainer(inputs, 0), targets))
        trainer.step()
        micro_steps += 1
    trainer.close()
    return micro_steps, trainer.train_micro_batch_size_per_gpu()
