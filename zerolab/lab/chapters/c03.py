"""Chapter 3: the exercises of 03_ddp_baseline: a blank, buckets, four moments, the batch equation.

Owns the exercises and the numbers to predict. Beside it lie the runs that checks look at
(`c03_runs`), the checks (`c03_parts`, `c03_moments`) and the wrong answers (`c03_wrong_parts`,
`c03_wrong_moments`).
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import comm, data, engine, gpt
from .. import evidence, training
from ..exercise import Exercise, Mutant
from ..prediction import Prediction
from . import c03_moments, c03_parts
from . import c03_runs as runs
from . import c03_wrong_moments as moments
from . import c03_wrong_parts as parts
from .c03_wrong_collect import COLLECT


def _mutants(*functions: Callable[..., Any]) -> tuple[Mutant, ...]:
    return tuple(map(Mutant, functions))


EXERCISES = (
    Exercise(
        id="3.1",
        target="zerolab.two_layers.data_parallel:train_data_parallel",
        minutes=25,
        difficulty=3,
        check=c03_parts.check_train_data_parallel,
        hints=(
            "Three things before the loop: equal weights, one buffer, a hook on every parameter. "
            "When does the last hook of a backward fire, and what may it start?",
            "`param.grad` may be a view of the buffer: autograd adds into a `.grad` that is there. "
            "Then the buffer is full when backward is over, without a copy; clear it with `zero_`.",
            "Keep a set of the parameters whose hook is missing. The hook that empties it calls "
            "`comm.all_reduce(flat_grad, 'avg', async_op=True)`. If it is not empty after "
            "backward, call it then. Wait before the optimizer.",
        ),
        mutants=_mutants(
            parts.trusts_the_seed,
            parts.sums,
            parts.reduces_after_backward,
            parts.never_clears,
            parts.leaves_its_hooks,
            parts.one_call_a_parameter,
            parts.copies_into_a_buffer,
            parts.waits_for_a_hook,
            parts.tells_the_weights_every_step,
        ),
    ),
    Exercise(
        id="3.2",
        target="zerolab.flat:plan_buckets",
        minutes=8,
        difficulty=1,
        check=c03_parts.check_plan_buckets,
        hints=(
            "Walk through the positions from the last to the first. What do you have to know "
            "about the bucket that is open?",
            "Keep the room that is left in it. A tensor that is longer than that begins a new "
            "one, whose room is the limit again.",
            "The room may become negative: that is how a tensor longer than the limit sits alone.",
        ),
        mutants=_mutants(
            parts.packs_in_forward_order,
            parts.closes_when_exactly_full,
            parts.fills_holes,
            parts.drops_what_is_too_long,
            parts.forgets_to_refill,
            parts.one_tensor_a_bucket,
        ),
    ),
    Exercise(
        id="3.3",
        target="zerolab.bucket:collect",
        minutes=12,
        difficulty=2,
        check=c03_moments.check_collect,
        hints=(
            "Take the gradient out of the parameter first. Where in the buffer does it belong?",
            "`flat.view(bucket.fresh, slot.offset, slot.shape)` is its place, as a tensor of its "
            "shape. Copy into it the first time, add the second: `bucket.filled` says which.",
            "Make the buffer with `torch.empty(bucket.padded_numel, dtype=dtype, "
            "device=bucket.device)` inside `with device.tag(kind):`.",
        ),
        mutants=COLLECT,
        hunted=(
            "forgets_that_it_was_used",
            "leaves_the_gradient",
            "forgets_the_first",
            "forgets_the_place",
            "a_buffer_for_each",
        ),
        evidence=runs.hunted,
        scene="Stage 0 trained five layers of 20 parameters on it, in steps of two micro-steps",
    ),
    Exercise(
        id="3.4",
        target="zerolab.reducing:post_backward",
        minutes=12,
        difficulty=3,
        check=c03_moments.check_post_backward,
        hints=(
            "Rank 0 has completed bucket 2, rank 1 bucket 1. Which of them may be sent?",
            "Look only at the bucket whose turn it is. If it is incomplete, nothing may leave; "
            "if it is complete, the next one's turn has come, and that may be complete too.",
            "A `while` over `stage.next_launch`, with a `return` at the first incomplete bucket.",
        ),
        mutants=_mutants(
            moments.sends_whatever_is_complete,
            moments.waits_for_the_whole_model,
            moments.sends_one_at_most,
            moments.sends_again_and_again,
            moments.waits_at_once,
            moments.skips_the_incomplete,
            moments.leaves_the_last_for_the_end,
            moments.takes_filled_for_complete,
            moments.waits_for_the_one_before,
        ),
    ),
    Exercise(
        id="3.5",
        target="zerolab.reducing:finish_backward",
        minutes=15,
        difficulty=3,
        check=c03_moments.check_finish_backward,
        hints=(
            "Three things, in this order: send the rest, wait, empty what has arrived. Which of "
            "them also happen where nothing is reduced?",
            "The rest is `stage.trainable[stage.next_launch :]`, whatever it holds: a collective "
            "that one rank leaves out stops all others.",
            "An `if stage.reducing:` around a loop with `stage.launch(bucket)` and one "
            "`stage.receive_all()`; below it, for all buckets, `bucket.arrived.clear()`.",
        ),
        mutants=_mutants(
            moments.sends_only_what_it_used,
            moments.forgets_to_wait,
            moments.forgets_to_empty,
            moments.reduces_in_every_micro_step,
            moments.sends_everything_again,
            moments.sends_the_latecomers_alone,
            moments.drops_the_latecomers,
            moments.sends_the_rest_backwards,
            moments.waits_for_each,
        ),
    ),
    Exercise(
        id="3.6",
        target="zerolab.reducing:receive",
        minutes=8,
        difficulty=2,
        check=c03_moments.check_receive,
        hints=(
            "When may you look at `bucket.incoming`? And what is in `bucket.reduced` then?",
            "Wait. The first mean becomes `bucket.reduced`, in `dtype`; a later one is added.",
            "`device.set_kind(bucket.reduced, 'grad')` counts it. Then let go of `work` and "
            "`incoming`; the state depends on whether `bucket.fresh` is there.",
        ),
        mutants=_mutants(
            moments.keeps_the_last_only,
            moments.reads_before_it_arrives,
            moments.divides_once_more,
            moments.keeps_the_dtype_of_the_journey,
            moments.holds_on_to_the_message,
            moments.takes_it_for_done,
            moments.makes_a_new_sum,
            moments.keeps_where_it_came,
            moments.says_empty,
            moments.always_fills,
        ),
    ),
    Exercise(
        id="3.7",
        target="zerolab.config.triad:infer",
        minutes=8,
        difficulty=1,
        check=c03_parts.check_infer,
        hints=(
            "total = micro x accum x world size. Which one is missing, and which default holds if "
            "two are?",
            "Without a total it is a product. With a total and a micro-batch, accum is what is "
            "left; with the total alone, accum is 1.",
            "Divide with `//` and do not check: `solves` looks at the equation afterwards.",
        ),
        mutants=_mutants(
            parts.forgets_the_ranks,
            parts.forgets_the_accumulation,
            parts.rounds_up,
            parts.takes_micro_as_one,
            parts.repairs_the_total,
            parts.at_least_one,
        ),
    ),
)


# 3.8, 3.9: numbers to predict.


def gpt_step(config: dict[str, Any], model: str = "gpt-1m") -> tuple[int, int, int]:
    """Train one step of a GPT; return elements moved, reductions, and those sent in backward."""
    torch.manual_seed(0)
    shape = gpt.preset(model)
    net = gpt.GPT(shape).to(evidence.home())
    last: list[int] = []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda _: last.append(runs.num_reductions()))
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    trainer, *_ = engine.initialize(model=net, config={"optimizer": adamw, **config})
    rank, ranks, micro = comm.get_rank(), comm.get_world_size(), 1
    stream = data.batches(data.load_text(), rank, ranks, micro, shape.seq_len, seed=0)
    while trainer.global_steps == 0:
        trainer.backward(trainer(*(part.to(evidence.home()) for part in next(stream))))
        trainer.step()
    trainer.close()
    moved = training.elements_moved(comm.records())
    return moved, runs.num_reductions(), last[-1]


def millions_moved() -> float:
    """Return the millions of elements that 4 micro-steps move, each reduced by itself."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zerolab": {"reduce": "micro_step"},
    }
    return evidence.run(gpt_step, training.world_size(), config)[0][0] / 1e6


def sent_in_backward() -> float:
    """Return how many of gpt-1m's buckets leave before the last gradient is there."""
    config = {"train_micro_batch_size_per_gpu": 1}
    return float(evidence.run(gpt_step, training.world_size(), config)[0][2])


MILLIONS = gpt.num_params(gpt.preset("gpt-1m")) / 1e6
PREDICTIONS = (
    Prediction(
        id="3.8",
        what="gpt-1m has a bucket for each of its 5 blocks and one for the rest, embeddings "
        "included. How many of the 6 are on their way when the last gradient appears?",
        unit="buckets",
        measure=sent_in_backward,
        why="The last gradient is the embedding's, in the last bucket: that one alone has nothing "
        "to hide behind.",
    ),
    Prediction(
        id="3.9",
        what=f"gpt-1m has {MILLIONS:.3f} million parameters. With 4 micro-steps a step, each "
        "reduced by itself, how many million elements do the all-reduces of a step move?",
        unit="million elements",
        measure=millions_moved,
        why="An all-reduce moves every element twice, and there are four of each: 8 Psi. At the "
        "boundary alone it is 2 Psi.",
    ),
)
