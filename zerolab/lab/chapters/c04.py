"""Chapter 4: the exercises of 04_optimizer_sharding: flatten, pad, shard, step, gather.

Owns the exercises, their hints and the numbers to predict. What proves an answer is in
`c04_blank` and `c04_checks`, what is wrong on purpose in `c04_mutants`.
"""

from .. import training
from ..exercise import Exercise, Mutant
from ..prediction import Prediction
from . import c04_blank, c04_checks, c04_mutants, stage_runs
from .stage_runs import Plan

EXERCISES = (
    Exercise(
        id="4.1",
        target="zerolab.two_layers.optimizer_sharding:train_sharded_optimizer",
        minutes=25,
        difficulty=3,
        seconds=60.0,
        check=c04_blank.check_train_sharded_optimizer,
        hints=(
            "One flat buffer for all parameters, as long as a multiple of the ranks. If the "
            "parameters are views of it (`param.data = buffer[...].view_as(param)`), then whoever "
            "fills the buffer has updated the model.",
            "The optimizer gets a single tensor: `nn.Parameter` over your slice of the buffer. Its "
            "`.grad` is what `comm.reduce_scatter(out, all_gradients, 'avg')` leaves in `out`.",
            "After `optimizer.step()` only your slice is new; `comm.all_gather(buffer, "
            "own.detach())` brings the others. Then set every `.grad` to None, yours and the "
            "parameters'.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.shards_nothing,
                    c04_mutants.one_owner_a_parameter,
                    c04_mutants.keeps_old_gradients,
                    c04_mutants.zeroes_without_freeing,
                    c04_mutants.forgets_to_gather,
                    c04_mutants.reduces_everything,
                    c04_mutants.sums_over_ranks,
                ),
            )
        ),
    ),
    Exercise(
        id="4.2",
        target="zerolab.flat:pack",
        minutes=6,
        difficulty=1,
        check=c04_checks.check_pack,
        hints=(
            "Each tensor becomes a row of numbers, `reshape(-1)`, and has a place that begins at "
            "its start. What stands behind the last one?",
            "Write into the buffer that you were given: `flat[start:stop].copy_(...)`. Assigning "
            "to the name `flat` would only make another tensor.",
            "`flat[stop:].zero_()` after the loop, where `stop` is where the last tensor ended.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.leaves_the_padding,
                    c04_mutants.replaces_the_buffer,
                    c04_mutants.always_at_the_front,
                    c04_mutants.walks_down_the_columns,
                ),
            )
        ),
    ),
    Exercise(
        id="4.3",
        target="zerolab.flat:intersect",
        minutes=5,
        difficulty=1,
        check=c04_checks.check_intersect,
        hints=(
            "What both share begins where the later one begins, and stops where the earlier one "
            "stops.",
            "If they share nothing the stop comes out before the start: then the range is empty, "
            "and its stop is its start.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.crosses_when_apart,
                    c04_mutants.takes_both,
                    c04_mutants.counts_the_stop,
                    c04_mutants.all_or_nothing,
                ),
            )
        ),
    ),
    Exercise(
        id="4.4",
        target="zerolab.optim:cut_segments",
        minutes=15,
        difficulty=3,
        seconds=60.0,
        check=c04_checks.check_cut_segments,
        hints=(
            "For each shard go through all parameters: which positions does the parameter take "
            "(`slot.span`), which does the shard (`flat.shard_bounds`), which do both "
            "(`flat.intersect`)?",
            "`bucket.target` holds only what this rank owns. Its element 0 is the first position "
            "of the first shard, so subtract that from a position in the bucket.",
            "A segment is `Segment(position, shard, start - origin, nn.Parameter(piece))`, and "
            "`piece` is a slice of `bucket.target`. Leave out an empty one unless there is only "
            "one shard.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.whole_parameters_only,
                    c04_mutants.skips_empty_pieces,
                    c04_mutants.copies_the_piece,
                    c04_mutants.counts_from_the_bucket,
                    c04_mutants.steps_on_the_padding,
                ),
            )
        ),
    ),
    Exercise(
        id="4.5",
        target="zerolab.optim:step_bucket",
        minutes=20,
        difficulty=3,
        seconds=60.0,
        check=c04_checks.check_step_bucket,
        hints=(
            "Four things in this order: gradients in the right dtype, each segment its part of "
            "them, one `groups.step(bucket)`, and everything forgotten.",
            "Fused AdamW refuses a 16-bit gradient for an fp32 segment: convert all of "
            "`bucket.reduced` to the dtype of `bucket.target` once. `factor`, if there is one, "
            "multiplies it.",
            "A parameter in `unused` gets no gradient. At the end: every segment's `.grad` and "
            "`bucket.reduced` are None, `bucket.state` is GradState.EMPTY.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.never_forgets,
                    c04_mutants.steps_once_a_parameter,
                    c04_mutants.always_the_first_gradients,
                    c04_mutants.steps_what_nobody_used,
                    c04_mutants.forgets_the_factor,
                    c04_mutants.holds_on_to_the_views,
                    c04_mutants.forgets_the_state,
                    c04_mutants.takes_numbers_for_slots,
                    c04_mutants.multiplies_in_16_bits,
                ),
            )
        ),
        hunted=("never_forgets", "steps_once_a_parameter", "always_the_first_gradients"),
    ),
    Exercise(
        id="4.6",
        target="zerolab.zero1:Zero1",
        minutes=20,
        difficulty=3,
        seconds=60.0,
        check=c04_checks.check_zero1,
        hints=(
            "Which shards does this rank update? That list alone decides how much the optimizer "
            "and the master weights take.",
            "`reduce` sends the whole buffer of `self.outgoing(bucket)` and receives into the own "
            "slice of it, `outgoing[slice(*bucket.bounds)]`: no memory beside it. Start it with "
            "`async_op=True` and keep the work in `bucket.work`.",
            "`publish` gathers `bucket.shard` of all ranks into `bucket.flat_param`, and returns "
            "the work: the engine waits when all buckets are on their way.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c04_mutants.ShardsNothing,
                    c04_mutants.NeverPublishes,
                    c04_mutants.UpdatesTheNextSlice,
                    c04_mutants.Sums,
                    c04_mutants.ReducesEverything,
                    c04_mutants.WaitsInBackward,
                    c04_mutants.PublishesOneByOne,
                    c04_mutants.TakesTheWholeMean,
                    c04_mutants.AlwaysAverages,
                ),
            )
        ),
    ),
)


# 4.7, 4.8: numbers to predict.


def bytes_saved() -> float:
    """Return how many bytes a parameter stage 1 holds less than stage 0, in bf16."""
    runs = [training.train(stage=stage, steps=2, model="gpt-1m") for stage in (0, 1)]
    held = [sum(run.ranks[0].state_bytes.values()) for run in runs]
    return (held[0] - held[1]) / (runs[0].ranks[0].state_bytes["param"] / 2)


def passes_with_accumulation() -> float:
    """Return how often stage 1 moves the model in a step of four micro-steps."""
    shown = stage_runs.run(Plan(1, training.world_size(), accum_steps=4))[0]
    moved = sum(n * (2 if op == "all_reduce" else 1) for op, n in shown.moved().items())
    return moved / stage_runs.padded(training.world_size())


PREDICTIONS = (
    Prediction(
        id="4.7",
        what="gpt-1m in bf16 on four ranks. How many bytes a parameter does stage 1 hold less "
        "than stage 0 on each of them?",
        unit="bytes a parameter",
        measure=bytes_saved,
        why="12 of the 16 bytes (master 4, averages 8) are divided by N, so 12 (1 - 1/N) are "
        "saved: 9 on four ranks. The odd fraction is Adam's step counters, one a segment, of which "
        "stage 0 has more.",
    ),
    Prediction(
        id="4.8",
        what="A step of four micro-steps (gradient accumulation) at stage 1. How often does it "
        "move the model's elements, an all-reduce counted twice?",
        unit="passes",
        measure=passes_with_accumulation,
        why="Stage 1 has room for all gradients, so it adds them up where they are and reduces "
        "once, before the step; then one gather. Two passes, whatever the number of micro-steps.",
    ),
)
