"""Chapter 5: the exercises of 05_gradient_reduce_scatter: reduced while backward runs, and freed.

Owns the exercises, their hints and the numbers to predict. What proves an answer is in
`c05_blank` and `c05_checks`, what is wrong on purpose in `c05_mutants`.
"""

from collections.abc import Sequence

from ...records import MemoryEvent
from .. import training
from ..exercise import Exercise, Mutant
from ..prediction import Prediction
from . import c05_blank, c05_checks, c05_mutants, stage_runs
from .stage_runs import Plan

EXERCISES = (
    Exercise(
        id="5.1",
        target="zerolab.two_layers.gradient_sharding:train_sharded_gradients",
        minutes=25,
        difficulty=3,
        seconds=60.0,
        check=c05_blank.check_train_sharded_gradients,
        hints=(
            "Pad and slice every parameter by itself. Then a hook on the parameter, "
            "`param.register_post_accumulate_grad_hook(function)`, can do all the work: it is "
            "called with the parameter when its gradient is complete.",
            "In the hook: pad the gradient, reduce-scatter it into a tensor of one slice, set "
            "`param.grad = None`. The slice is *added* to what earlier micro-batches left.",
            "The optimizer steps on slices, one `nn.Parameter` for each parameter, whose `.grad` "
            "the hooks have left. After the step gather every parameter, and divide the loss by "
            "the number of micro-batches before `backward()`.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c05_mutants.reduces_after_backward,
                    c05_mutants.sums_over_ranks,
                    c05_mutants.changes_something_else,
                    c05_mutants.counts_earlier_ones_twice,
                    c05_mutants.loses_earlier_ones,
                    c05_mutants.forgets_to_divide,
                    c05_mutants.sends_a_copy_to_each,
                ),
            )
        ),
        hunted=(
            "sums_over_ranks",
            "changes_something_else",
            "counts_earlier_ones_twice",
            "loses_earlier_ones",
            "sends_a_copy_to_each",
        ),
        evidence=c05_blank.left_behind,
        scene="Two layers of 740 parameters trained on it, two micro-batches a step",
    ),
    Exercise(
        id="5.2",
        target="zerolab.zero2:keep_own_slice",
        minutes=6,
        difficulty=1,
        seconds=60.0,
        check=c05_checks.check_keep_own_slice,
        hints=(
            "A slice has no memory of its own: it is a window on the whole buffer, and keeps the "
            "whole buffer alive. What makes memory of its own?",
            "`clone()` copies always; `contiguous()` copies only what is not contiguous yet, and "
            "a piece of a row is.",
            "`with device.tag(kind_of_mean(bucket)):` around it, so that the ledger counts it as "
            "what it is.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c05_mutants.asks_for_contiguous,
                    c05_mutants.makes_room_only,
                    c05_mutants.widens_it,
                    c05_mutants.always_calls_it_gradient,
                ),
            )
        ),
    ),
    Exercise(
        id="5.3",
        target="zerolab.zero2:Zero2",
        minutes=20,
        difficulty=3,
        seconds=60.0,
        check=c05_checks.check_zero2,
        hints=(
            "The full buffer must be held by nobody but the collective. So where does the mean of "
            "the own slice go?",
            "`with device.tag(kind_of_mean(bucket)): bucket.incoming = "
            "outgoing.new_empty(bucket.shard_numel)`, then a reduce-scatter into it with "
            "`async_op=True`, whose work is `bucket.work`.",
            "`receive` is stage 0's, `reducing.receive(bucket, self.grad_dtype(bucket))`; only "
            "after an all-reduce it first waits and keeps the own slice.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c05_mutants.ReducesInPlace,
                    c05_mutants.KeepsAList,
                    c05_mutants.LosesEarlierMicroSteps,
                    c05_mutants.ReducesTheSumAgain,
                    c05_mutants.NeverWaits,
                    c05_mutants.ReducesEverything,
                    c05_mutants.WaitsInBackward,
                    c05_mutants.CountsAllAsGradients,
                    c05_mutants.AlwaysAverages,
                    c05_mutants.ForgetsToWaitForAll,
                    c05_mutants.KeepsThemAsTheyCame,
                ),
            )
        ),
    ),
    Exercise(
        id="5.4",
        target="zerolab.sim.temporaries:bucket_peak_numel",
        minutes=20,
        difficulty=3,
        seconds=60.0,
        check=c05_checks.check_bucket_peak_numel,
        hints=(
            "Play it: go through the arrivals one by one, and keep a set of the buckets that "
            "exist. When does one come into it, when does it leave?",
            "A bucket comes with its first gradient. It is sent when its last one has come *and* "
            "all before it have been sent. Sent buckets stand in a queue; the oldest leaves the "
            "set when more than `in_flight` are in the queue.",
            "Take the maximum right after a gradient has come, before anything is sent. Count "
            "`padded_numel`.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c05_mutants.forgets_what_flies,
                    c05_mutants.never_frees,
                    c05_mutants.sends_what_is_full,
                    c05_mutants.leaves_out_padding,
                    c05_mutants.two_of_the_largest,
                    c05_mutants.sends_one_a_gradient,
                ),
            )
        ),
    ),
    Exercise(
        id="5.5",
        target="zerolab.sim.traffic:reduction_passes",
        minutes=8,
        difficulty=2,
        seconds=60.0,
        check=c05_checks.check_reduction_passes,
        hints=(
            "Two factors: how many reductions there are in a step, and whether one counts once "
            "(reduce-scatter) or twice (all-reduce).",
            "Which stages can wait for the last micro-batch? Those that have room for all "
            "gradients meanwhile. `every_micro_step` overrules that unless it is None.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    c05_mutants.once_a_step,
                    c05_mutants.every_time,
                    c05_mutants.counts_an_all_reduce_once,
                    c05_mutants.nobody_may_decide,
                    c05_mutants.stage_0_scatters,
                ),
            )
        ),
    ),
)


# 5.6, 5.7: numbers to predict.


def most_gradients() -> float:
    """Return the most MiB of gradients and buckets at stage 2, on the fullest rank."""
    run = training.train(stage=2, steps=2, model="gpt-1m")
    return max(gradient_bytes(rank.records.memory) for rank in run.ranks) / 2**20


def gradient_bytes(events: Sequence[MemoryEvent]) -> int:
    """Return the most bytes of gradients and buckets that were held at one moment."""
    now = most = 0
    for event in events:
        now += event.delta if event.kind in ("grad", "bucket") else 0
        most = max(most, now)
    return most


def passes_with_accumulation() -> float:
    """Return how often stage 2 moves the model in a step of four micro-steps."""
    shown = stage_runs.run(Plan(2, training.world_size(), accum_steps=4))[0]
    moved = sum(n * (2 if op == "all_reduce" else 1) for op, n in shown.moved().items())
    return moved / stage_runs.padded(training.world_size())


PREDICTIONS = (
    Prediction(
        id="5.6",
        what="gpt-1m in bf16: at stage 0 all gradients are about 2.0 MiB on each rank. How many "
        "MiB of gradients, slices and buckets together, does a rank hold at most at stage 2?",
        unit="MiB",
        measure=most_gradients,
        why="One slice of the gradients, a quarter on four ranks, and beside it two blocks' "
        "buckets (one on its way, one being filled) and the root's, which gets its first gradient "
        "before all others and is sent last.",
    ),
    Prediction(
        id="5.7",
        what="A step of four micro-steps at stage 2. How often does it move the model's elements?",
        unit="passes",
        measure=passes_with_accumulation,
        why="There is no room for local gradients, so each micro-step reduces: 4 passes, and one "
        "for the parameters. Stage 1 moved 2.",
    ),
)
