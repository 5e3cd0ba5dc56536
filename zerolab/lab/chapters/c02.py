"""Chapter 2: the exercises of 02_collectives: a ring out of messages, and what it costs.

Owns the exercises and the numbers to predict. The checks are in `c02_checks`, the wrong answers
in `c02_mutants`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import comm
from ...comm import star
from .. import training
from ..exercise import Exercise, Mutant
from ..prediction import Prediction
from . import c02_checks as checks
from . import c02_mutants as wrong
from .c02_ranks import Shown, watched

Function = Callable[..., Any]


# 2.8, 2.9: numbers to predict.


def sent_by_a_rank() -> float:
    """Return how often a rank sends the model's gradients in one step of stage 0 on the ring."""
    with comm.use_ring():
        rank = training.train(stage=0, steps=1, model="gpt-1m").ranks[0]
    sent = sum(e.elements for e in rank.records.parts if e.op == "send" and e.purpose == "data")
    return 2 * sent / rank.elements_moved  # an all-reduce counts its elements twice


def sent_by_the_root() -> float:
    """Return how many tensors the root of a star of eight sends."""
    shown = comm.run(_star_rank, 8, "lockstep", args=(8,))
    return max(rank.sent for rank in shown) / 8


def _star_rank(numel: int) -> Shown:
    tensor = torch.ones(numel)
    return watched(lambda: star.sum_everywhere(tensor), tensor, None)


PREDICTIONS = (
    Prediction(
        id="2.8",
        what="Eight ranks, one of them adds for all (`star.sum_everywhere`, yours if you wrote "
        "it). How many whole tensors does the busiest rank send?",
        unit="tensors",
        measure=sent_by_the_root,
        why="The one that adds sends the sum to each of the seven others, one after the other, "
        "and has received seven tensors before. Its line grows with N.",
    ),
    Prediction(
        id="2.9",
        what="Stage 0 trains on your ring, on as many ranks as this notebook has. How many times "
        "all its gradients does one rank send in a step?",
        unit="times",
        measure=sent_by_a_rank,
        why="(N-1)/N in the reduce-scatter and (N-1)/N in the all-gather: 2 (N-1)/N in all, "
        "below two for every N.",
    ),
)


def _mutants(*functions: Function) -> tuple[Mutant, ...]:
    return tuple(map(Mutant, functions))


EXERCISES = (
    Exercise(
        id="2.1",
        target="zerolab.comm.star:sum_everywhere",
        minutes=12,
        difficulty=2,
        check=checks.check_sum_everywhere,
        hints=(
            "Let one rank do the work first. What do the others send it, and what does it send "
            "them when it has added everything?",
            "`comm.send(tensor, dst)` returns when rank dst has received. So for every send there "
            "must be a rank that receives at that moment: the others send first, rank 0 receives.",
            "Rank 0: for each other rank `comm.recv(arriving, rank)` and `tensor.add_(arriving)`, "
            "then `comm.send(tensor, rank)` to each. The others: one send, one recv.",
        ),
        mutants=_mutants(
            wrong.everybody_sends_first,
            wrong.root_keeps_the_sum,
            wrong.root_forgets_itself,
            wrong.chain_without_a_way_back,
            wrong.keeps_them_all,
            wrong.lets_comm_do_it,
        ),
    ),
    Exercise(
        id="2.2",
        target="zerolab.comm.ring:exchange",
        minutes=8,
        difficulty=2,
        check=checks.check_exchange,
        hints=(
            "If all ranks send first, who receives? One of the two calls must not wait.",
            "`work = comm.send(..., async_op=True)` begins and goes on; `work.wait()` ends it. "
            "Or: even ranks send first, odd ranks receive first.",
            "`sending = comm.send(outgoing, (rank + 1) % world_size, async_op=True)`, then "
            "receive from `(rank - 1) % world_size`, then `sending.wait()`.",
        ),
        mutants=_mutants(
            wrong.sends_before_it_receives,
            wrong.forgets_to_wait,
            wrong.lets_the_send_go,
            wrong.turns_left,
            wrong.half_the_ring,
            wrong.copies_its_own,
        ),
    ),
    Exercise(
        id="2.3",
        target="zerolab.comm.ring:sent_slice",
        minutes=8,
        difficulty=2,
        check=checks.check_sent_slice,
        hints=(
            "Go backwards: in the last round rank r must receive slice r. Who sent it, in which "
            "round, and where had that rank got it from?",
            "Rank 0 of 4 sends 3, 2, 1. Rank 1 sends 0, 3, 2: each number is what rank 0 sent a "
            "round earlier.",
            "One lower for each round, one higher for each rank, modulo world_size.",
        ),
        mutants=_mutants(
            wrong.begins_with_its_own,
            wrong.counts_up,
            wrong.does_not_wrap,
            wrong.counts_rounds_from_one,
            wrong.always_the_same,
        ),
    ),
    Exercise(
        id="2.4",
        target="zerolab.comm.ring:reduce_scatter",
        minutes=15,
        difficulty=3,
        check=checks.check_reduce_scatter,
        hints=(
            "Cut `input` into slices with `view`. A partial sum begins as a copy of one slice; "
            "what happens to it in a round?",
            "`exchange(partial, arriving)`; then `arriving` plus the own slice of the same number "
            "is the new partial sum. Which number? `sent_slice(rank, world_size, step)`.",
            "Begin with `slices[sent_slice(rank, world_size, 0)].clone()`; for step 1 to "
            "world_size - 1 exchange and add `slices[sent_slice(rank, world_size, step)]`; "
            "after the last round the number is `rank`: copy into `output`.",
        ),
        mutants=_mutants(
            wrong.whole_tensors_go_round,
            wrong.neighbours_slice,
            wrong.adds_every_round_twice,
            wrong.stops_a_round_early,
            wrong.adds_in_the_input,
            wrong.passes_on_without_adding,
            wrong.asks_the_package,
            wrong.adds_in_fp32,
        ),
    ),
    Exercise(
        id="2.5",
        target="zerolab.comm.ring:all_gather",
        minutes=10,
        difficulty=2,
        check=checks.check_all_gather,
        hints=(
            "Nothing is added: in each round a rank passes on the slice that it received last. "
            "With which one does it begin?",
            "Put the own slice in its place in `output`. In round `step` rank r sends slice "
            "r - step and receives the one before it.",
            "`exchange(slices[(rank - step) % world_size], slices[(rank - step - 1) % "
            "world_size])`, straight from and into `output`.",
        ),
        mutants=_mutants(
            wrong.leaves_its_own_out,
            wrong.sends_its_own_again,
            wrong.files_it_upwards,
            wrong.sends_all_it_has,
            wrong.gathers_a_round_less,
        ),
    ),
    Exercise(
        id="2.6",
        target="zerolab.comm.ring:all_reduce",
        minutes=10,
        difficulty=2,
        check=checks.check_all_reduce,
        hints=(
            "You have written both halves. What does the reduce-scatter leave on rank r, and "
            "what does the all-gather want there?",
            "N need not divide the length: pad with zeros to N equal slices, as in chapter 00, "
            "and copy the front part back.",
            "`own = padded[rank * n : (rank + 1) * n]` serves as output of the reduce-scatter "
            "and as input of the all-gather.",
        ),
        mutants=_mutants(
            wrong.drops_the_rest,
            wrong.passes_it_all_round,
            wrong.gathers_and_adds,
            wrong.sums_a_copy,
            wrong.scatters_without_gathering,
            wrong.one_rank_adds,
            wrong.pads_in_fp32,
        ),
        hunted=(
            "passes_it_all_round",
            "gathers_and_adds",
            "scatters_without_gathering",
            "one_rank_adds",
        ),
        evidence=checks.ring_evidence,
        scene="An all-reduce of 12 elements ran on it, where rank r holds 10**r",
    ),
    Exercise(
        id="2.7",
        target="zerolab.sim.links:ring_seconds",
        minutes=6,
        difficulty=1,
        check=checks.check_ring_seconds,
        hints=(
            "How many rounds are there, and how many bytes travel in one of them?",
            "2 (N-1) rounds; in each a rank sends one slice of nbytes / N, which takes "
            "latency + bytes / bandwidth.",
        ),
        mutants=_mutants(
            wrong.forgets_latency,
            wrong.latency_only_once,
            wrong.whole_tensor_each_round,
            wrong.half_the_rounds,
            wrong.a_round_for_each_rank,
        ),
    ),
)
