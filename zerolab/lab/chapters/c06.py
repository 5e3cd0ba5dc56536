"""Chapter 6: the exercises of 06_parameter_all_gather: a stage 3, from one page to five moments.

Owns the exercises with their hints, and the numbers to predict. Checks are in `c06_blank`,
`c06_parts`, `c06_turn` and `c06_stage`, wrong answers in `c06_mutants`, the runs that both look at
in `unit_runs`.
"""

from .. import training
from ..exercise import Exercise
from ..prediction import Prediction
from . import c06_blank, c06_mutants, c06_parts, c06_stage, c06_turn, unit_runs
from .unit_runs import Plan

EXERCISES = (
    Exercise(
        id="6.1",
        target=c06_mutants.BLANK,
        minutes=30,
        difficulty=3,
        check=c06_blank.check_train_sharded_params,
        hints=(
            "Forward without autograd, layer by layer: gather, run, free, and keep what went in. "
            "What do you need to get a layer's gradients later?",
            "In backward gather the layer once more and run it on the input that you kept, this "
            "time with autograd: `layer(leaf).backward(above)` leaves the parameters' gradients, "
            "and in `leaf.grad` what the layer below needs.",
            "`parameters_to_vector` and `vector_to_parameters` of `torch.nn.utils` lay a layer end "
            "to end and back. A freed parameter must keep its shape: one NaN, expanded. Pad before "
            'you cut, and reduce with "avg".',
        ),
        mutants=c06_mutants.TRAIN_SHARDED_PARAMS,
        seconds=30.0,
    ),
    Exercise(
        id="6.2",
        target=c06_mutants.UNSHARD,
        minutes=5,
        difficulty=1,
        check=c06_parts.check_unshard_bucket,
        hints=(
            "The tensor is still there and has a shape; its storage has no bytes. Which method "
            "gives a storage a size?",
            "`tensor.untyped_storage().resize_(nbytes)` counts bytes, not elements: "
            "`padded_numel * flat_param.element_size()`.",
            "Then `comm.all_gather(output, input, async_op=True, label=...)`, whose input is the "
            "own shard, and return what it gives.",
        ),
        mutants=c06_mutants.UNSHARD_BUCKET,
    ),
    Exercise(
        id="6.3",
        target=c06_mutants.RESHARD,
        minutes=6,
        difficulty=2,
        check=c06_parts.check_reshard_bucket,
        hints=(
            "Two things point at the buffer's memory: the buffer and the parameters. Give each "
            "what it needs to be harmless.",
            "`sharded_param.placeholder(param)` is a NaN in the shape of the parameter, which "
            "takes no memory of its own; `slot.param.data = ...` puts it there.",
            "Then the storage of `flat_param` gets 0 bytes. Do not replace `flat_param`.",
        ),
        mutants=c06_mutants.RESHARD_BUCKET,
    ),
    Exercise(
        id="6.4",
        target=c06_mutants.ASSIGN,
        minutes=12,
        difficulty=2,
        check=c06_parts.check_assign_params,
        hints=(
            "Ask each parameter in how many blocks it is. There are three answers that matter: "
            "none, one, several.",
            "`block.parameters()` gives the parameters of a block and of all inside it; collect "
            "for each parameter the numbers of the blocks that have it.",
            "`model.named_parameters()` lists a tied parameter once. One block: that block's unit. "
            "Otherwise the root's, which comes first.",
        ),
        mutants=c06_mutants.ASSIGN_PARAMS,
    ),
    Exercise(
        id="6.5",
        target=c06_mutants.TURN,
        minutes=20,
        difficulty=2,
        check=c06_turn.check_turn,
        hints=(
            "Write down for each method in which states it does something, and in which state it "
            "leaves the unit. `unshard` may meet all three.",
            "`fetch` does something in SHARDED only, and keeps every work that `unshard_bucket` "
            "returns. `unshard` begins with `fetch`; then, if IN_FLIGHT, it waits.",
            "After the wait `slot.param.data = view`, for slots and views of every bucket. "
            "`reshard` waits for the works that are left before it frees.",
        ),
        mutants=c06_mutants.MOMENT_TURN,
    ),
    Exercise(
        id="6.6",
        target=c06_mutants.AHEAD,
        minutes=10,
        difficulty=2,
        check=c06_parts.check_units_ahead,
        hints=(
            "Go from follower to follower. There are four reasons to stop: nobody follows, you "
            "have come round, the limit, and that there is no limit.",
            "Add a unit's `unit_numel` to a sum before you decide whether it still fits.",
            "`while following is not None and following is not unit and following not in ahead:`",
        ),
        mutants=c06_mutants.UNITS_AHEAD,
    ),
    Exercise(
        id="6.7",
        target=c06_mutants.ZERO3,
        minutes=25,
        difficulty=3,
        check=c06_stage.check_zero3,
        hints=(
            "Both ways are the same: a unit's turn begins before its forward and before its "
            "backward. What differs is the row of followers, and when a turn ends.",
            "`take_turn`: unshard, note the turn, then fetch each of `turns.units_ahead(unit, "
            "self.followers[in_backward], self.options.prefetch_numel)`, if prefetch is on.",
            "A turn ends in `post_forward` unless `needed_again`, and in `post_backward_of` once "
            "`done_with`; `grad_ready` lets stage 2 take the gradient first, then tells it. "
            "`publish` has nothing to send, except for what is whole between steps.",
        ),
        mutants=c06_mutants.MOMENT_ZERO3,
        hunted=("forgets_to_reshard", "frees_when_all_is_over", "always_the_way_forward_went"),
        seconds=30.0,
        evidence=unit_runs.left_behind,
        scene="Stage 3 trained a root of 24 parameters and five blocks of 20 on it",
    ),
)


# 6.8 to 6.10: numbers to predict.


def gathered_at_most() -> float:
    """Return the KiB of full parameters at stage 3, at most: gpt-1m in bf16."""
    ranks = training.train(stage=3, steps=2, model="gpt-1m").ranks
    return max(unit_runs.Story.of(rank.records).most for rank in ranks) / 2**10


def passes_with_accumulation() -> float:
    """Return how often the parameters' number of elements crosses in a step: 4 micro-steps."""
    plan = Plan(3, training.world_size(), accum_steps=4)
    moved = sum(unit_runs.run(plan)[0].moved.values())
    return moved / unit_runs.stack_numel(plan.world_size)


PREDICTIONS = (
    Prediction(
        id="6.8",
        what="gpt-1m in bf16 at stage 3: five blocks of 198,272 parameters, and a root of 49,408. "
        "How much memory do whole parameters take at most, at one time, on one GPU?",
        unit="KiB",
        measure=gathered_at_most,
        why="The root is whole all the time; beside it the block that computes and the one that is "
        "gathered ahead: (49,408 + 2 x 198,272) x 2 bytes. How many blocks there are does not "
        "matter.",
    ),
    Prediction(
        id="6.9",
        what="Stage 3 moves 3 Psi a step. How many Psi are it with gradient accumulation over 4 "
        "micro-steps?",
        unit="Psi",
        measure=passes_with_accumulation,
        why="Nothing may stay whole between two micro-steps, neither parameters nor gradients: "
        "each gathers twice and reduces once. 3 x 4.",
    ),
)
