"""Chapter 7: the exercises of 07_mixed_precision: the step on which all ranks must agree.

Owns the list of exercises and the numbers to predict. Checks are in `c07_blank`, `c07_parts` and
`c07_moments`, the runs they look at in `c07_runs`, wrong answers in `c07_mutants` and
`c07_wrong_steps`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import comm, engine
from .. import plug
from ..exercise import Exercise, Mutant
from ..prediction import Prediction
from . import c07_moments as moments
from . import c07_mutants as wrong
from . import c07_runs as runs
from . import c07_wrong_steps as steps
from .c07_blank import check_train_mixed_precision
from .c07_parts import check_any_rank, check_square_sum, check_step_factor

# 7.8, 7.9: numbers to predict.


def growth_in_a_thousand_steps() -> float:
    """Return by how many percent an fp16 weight of 1 grows in 1,000 steps of 0.0004."""
    weight = torch.tensor(1.0, dtype=torch.float16)
    for _ in range(1000):
        weight += 0.0004
    return 100 * (weight.item() - 1)


def length_after_local_clipping() -> float:
    """Return the norm of what four ranks subtract when each clips its own shard to norm 1."""
    return comm.run(_clip_locally, 4, "lockstep")[0]


def _clip_locally() -> float:
    """Train one step of SGD at lr 1 with clipping at 0.01, the norm of the shard taken for all."""
    plan, model = runs.Plan(dtype="fp32", max_norm=0.01), runs.Pair()
    before = runs.weights_of(model)
    trainer, *_ = engine.initialize(model=model, config=plan.config(2))
    trainer.set_lr(1.0)
    trainer.backward(trainer(*plan.batch(comm.get_rank(), comm.get_world_size(), 0)))
    with plug.plugged("zerolab.precision:global_norm", wrong.own_shard_only):
        trainer.step()
    trainer.close()
    return (runs.weights_of(model) - before).norm().item() / plan.max_norm


PREDICTIONS = (
    Prediction(
        id="7.8",
        what="A weight of 1 in fp16 gets 1,000 updates of 0.0004 each, one after the other. "
        "By how many percent has it grown?",
        unit="percent",
        measure=growth_in_a_thousand_steps,
        why="From 1 the next fp16 number is 1.00098. Each sum is rounded to the nearest: back to "
        "where it was, a thousand times. An fp32 master weight would have grown by 40 percent.",
    ),
    Prediction(
        id="7.9",
        what="Four ranks each clip their own shard of the gradients to norm 1, by the norm of "
        "that shard. Every shard is longer than 1. What is the norm of the whole afterwards?",
        unit="times max_norm",
        measure=length_after_local_clipping,
        why="Four perpendicular pieces of length 1 make a vector of length 2, the root of N. And "
        "it points elsewhere: each piece was shortened by another factor.",
    ),
)


def _mutants(*functions: Callable[..., Any]) -> tuple[Mutant, ...]:
    return tuple(map(Mutant, functions))


EXERCISES = (
    Exercise(
        id="7.1",
        target="zerolab.two_layers.mixed_precision:train_mixed_precision",
        minutes=25,
        difficulty=3,
        check=check_train_mixed_precision,
        hints=(
            "Two sets of weights: the model's in fp16 and the optimizer's in fp32. Which way does "
            "something flow between them, and when?",
            "Per step: scaled loss, backward, take the gradients out of the model, agree with a "
            '`comm.all_reduce(flag, "max", purpose="control")`; skip, or average in fp32, divide '
            "by the scale, step, copy masters into parameters.",
            "Change the scale last: halve it when anybody overflowed and begin to count anew, "
            "double it when `good_steps % window == 0`.",
        ),
        mutants=_mutants(
            wrong.skips_alone,
            wrong.never_skips,
            wrong.trains_without_masters,
            wrong.never_scales,
            wrong.unscales_by_the_next_scale,
            wrong.sums_over_ranks,
            wrong.halves_where_it_hurt,
            wrong.keeps_fp32_gradients,
        ),
    ),
    Exercise(
        id="7.2",
        target="zerolab.precision:square_sum",
        minutes=8,
        difficulty=1,
        check=check_square_sum,
        hints=(
            "What is 300 times 300 in fp16? Which comes first, the square or the wider type?",
            "The whole tensor in fp64 would be four times the bucket. `values.split(CHUNK)` gives "
            "it in pieces.",
            "Begin with an fp64 zero; for each chunk add `torch.dot(exact, exact)`, where `exact` "
            "is the chunk in fp64.",
        ),
        mutants=_mutants(
            wrong.squares_in_16_bits,
            wrong.adds_in_fp32,
            wrong.widens_it_whole,
            wrong.adds_without_squaring,
            wrong.drops_the_tail,
        ),
    ),
    Exercise(
        id="7.3",
        target="zerolab.precision:any_rank",
        minutes=6,
        difficulty=1,
        check=check_any_rank,
        hints=(
            "One collective gives every rank the same answer. Which reduction of zeros and ones "
            "means `or`?",
            "A uint8 tensor of all flags on `target`, then an all-reduce with `max` and "
            '`purpose="control"`.',
            "`read(mine)` turns the tensor to Python numbers, and each of them to a bool.",
        ),
        mutants=_mutants(
            wrong.asks_nobody,
            wrong.rank_0_decides,
            wrong.only_if_all,
            wrong.flag_by_flag,
            wrong.counts_as_data,
        ),
    ),
    Exercise(
        id="7.4",
        target="zerolab.precision:global_norm",
        minutes=20,
        difficulty=3,
        check=moments.check_global_norm,
        hints=(
            "Norms do not add up, but squares do. What must the ranks send each other: gradients, "
            "or one number for each piece?",
            "`square_table(bucket, unused[bucket])` is [world_size, parameters]; a rank that owns "
            "one shard has one row that is not zero, `table[bucket.rank]`. Gather the rows of all "
            "buckets in one `comm.all_gather`, and cut the answer by bucket.",
            "Who owns all shards needs no collective. `everyone.view(world_size, -1).split(widths, "
            "dim=1)` gives the tables; lay them end to end, add, take the root.",
        ),
        mutants=_mutants(
            wrong.own_shard_only,
            wrong.adds_norms,
            wrong.counts_every_copy,
            wrong.gathers_in_fp32,
            wrong.bucket_by_bucket,
            wrong.counts_norm_as_data,
            wrong.returns_the_square,
            wrong.squares_in_place,
            wrong.takes_unused_out,
        ),
    ),
    Exercise(
        id="7.5",
        target="zerolab.precision:step_factor",
        minutes=8,
        difficulty=2,
        check=check_step_factor,
        hints=(
            "The gradients are `scale` times too long, and so is their norm. Which norm may be "
            "compared with `max_norm`?",
            "`clip_factor(norm / scale, max_norm)` is what clipping asks for; unscaling asks for "
            "`1 / scale`.",
            "Multiply the two and round once, to fp32. Without a norm only `1 / scale` is left, "
            "and with scale 1 nothing.",
        ),
        mutants=_mutants(
            wrong.clips_scaled_gradients,
            wrong.clips_and_forgets_to_unscale,
            wrong.unscales_only_when_clipping,
            wrong.stretches_short_gradients,
            wrong.multiplies_by_the_scale,
            wrong.always_a_number,
        ),
    ),
    Exercise(
        id="7.6",
        target="zerolab.precision:LossScaler",
        minutes=20,
        difficulty=2,
        check=moments.check_loss_scaler,
        hints=(
            "Two counters beside the scale: good steps since the last overflow, and how many "
            "overflows may still be borne. What moves each of them?",
            "Overflow: the count of good steps begins anew; with a budget above 1 one is spent, "
            "else the scale is halved, down to `min_scale`.",
            "Good step: count it; at a multiple of `window` double the scale. Refill the budget "
            "then, or at every good step with `consecutive_hysteresis`.",
        ),
        mutants=_mutants(
            steps.HalvesAtOnce,
            steps.CountsAllGoodSteps,
            steps.HasNoFloor,
            steps.NeverRefills,
            steps.RefillsAtEveryGoodStep,
            steps.MovesWhenStatic,
            steps.DoublesEverAfter,
        ),
    ),
    Exercise(
        id="7.7",
        target="zerolab.precision:run_step",
        minutes=15,
        difficulty=3,
        check=moments.check_run_step,
        hints=(
            "Five things happen in a step. Which of them must see the scale that multiplied the "
            "loss, and which one changes it?",
            "`agree(...)` first. Overflow: `sharding.drop_grads()`. Else the norm if `max_norm > "
            "0`, the factor, `sharding.step(groups, agreed.unused, factor)`.",
            "Note `agreed.norm = norm / scaler.scale`, then `scaler.update(agreed.overflow)`, "
            "whatever happened, as the last thing.",
        ),
        mutants=_mutants(
            steps.scale_changes_first,
            steps.steps_whatever_comes,
            steps.forgets_to_drop,
            steps.tells_only_good_news,
            steps.decides_alone,
            steps.never_clips,
        ),
        hunted=("scale_changes_first", "forgets_to_drop", "tells_only_good_news"),
        evidence=moments.hunt_run_step,
        scene="Stage 1 trained 23 parameters in fp16 on it; one batch overflows on one rank",
    ),
)
