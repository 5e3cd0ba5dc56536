"""Chapter 2: the checks of 02_collectives: a ring out of messages, and what it costs.

Owns no data. References are whole numbers that a rank can add in its head, messages as the ranks
recorded them, bytes on the ledger, and plain torch in one process for the training that runs on
the answer.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ... import comm
from ...comm import ring, star
from ...sim import links
from .. import evidence
from ..outcome import Wrong
from .c02_ranks import Look, Shown, numbers, on_ranks, small_numbers, total, watched

Function = Callable[..., Any]
SIZES = (3, 1, 2, 4, 5)  # numbers of ranks: on three most mistakes differ, on one few
SHARD = 3  # elements of a slice
ITEMSIZE = 4


# 2.1 sum_everywhere


def check_sum_everywhere(answer: Function) -> Iterator[str]:
    """Values on 1 to 5 ranks, messages only, memory; then three steps of data parallelism."""
    numel = 35
    for world_size in SIZES:
        call = f"sum_everywhere(tensor of {numel} elements)"
        look = Look(call, on_ranks(_sum_rank, world_size, numel, call=call))
        look.only_messages()
        look.values([total(world_size, numel)] * world_size, "does not hold the sum")
        look.budget(2 * numel * ITEMSIZE, "two tensors more, however many ranks there are")
    yield "1 to 5 ranks: each holds the sum, from messages alone"
    yield "memory: never more than two tensors on top"
    for world_size in (2, 3):
        call = "sum_everywhere(param.grad)"
        weights = on_ranks(_two_layers_rank, world_size, call=call)
        _same_as_alone(weights, world_size, call)
    yield "a two-layer model on 2 and 3 ranks: after three steps the weights of one process"


def _sum_rank(numel: int) -> Shown:
    tensor = numbers(comm.get_rank(), numel).view(5, -1)
    shown = watched(lambda: star.sum_everywhere(tensor), tensor, None)
    return replace(shown, values=tensor.view(-1).tolist())


def _two_layers_rank() -> torch.Tensor:
    """Train data parallel with nothing but the answer: sum the gradients, divide, step."""
    model = evidence.tiny_model().to(evidence.home())
    optimizer = torch.optim.AdamW(model.parameters(), **evidence.OPTIMIZER)
    for step in range(evidence.STEPS):
        inputs, targets = evidence.tiny_batch(comm.get_rank(), step)
        optimizer.zero_grad()
        F.mse_loss(model(inputs.to(evidence.home())), targets.to(evidence.home())).backward()
        for param in model.parameters():
            assert param.grad is not None
            star.sum_everywhere(param.grad)
            param.grad.div_(comm.get_world_size())
        optimizer.step()
    return evidence.weights_of(model)


def _same_as_alone(weights: Sequence[torch.Tensor], world_size: int, call: str) -> None:
    alone = evidence.train_tiny_alone(world_size)
    for rank, mine in enumerate(weights):
        apart = (mine - alone).abs().max().item()
        if not apart <= evidence.TOLERANCE:
            raise Wrong(
                f"{world_size} ranks train on it, but after {evidence.STEPS} steps the weights "
                f"differ from those of one process by {apart:.2g}.",
                expected=f"at most {evidence.TOLERANCE:g}",
                observed=f"{apart:.2g}",
                call=call,
                rank=rank,
            )


# 2.2 exchange


def check_exchange(answer: Function) -> Iterator[str]:
    """Each rank gets what its left neighbour had, on 2 to 5 ranks, three rounds in a row."""
    call = f"exchange(outgoing [{SHARD}], incoming [{SHARD}])"
    for world_size in (4, 2, 3, 5):  # on three, three rounds come home in either direction
        look = Look(call, on_ranks(_exchange_rank, world_size, call=call))
        ranks = range(world_size)
        left = [numbers((rank - 3) % world_size, SHARD).tolist() for rank in ranks]
        look.only_messages()
        look.values(left, "has not what three rounds brought from its left")
        look.kept("outgoing tensor")
        look.sent(3 * SHARD, "one message a round")
        look.waited()
    yield "2 to 5 ranks: nobody waits for ever, and what is sent arrives"
    yield "it comes from the left neighbour, and the last rank's right neighbour is rank 0"
    yield "one message a rank and round; `outgoing` stays as it is, and nothing is under way"


def _exchange_rank() -> Shown:
    first = numbers(comm.get_rank(), SHARD)
    buffers = [first, *(torch.zeros_like(first) for _ in range(3))]

    def three_rounds() -> None:
        for outgoing, incoming in itertools.pairwise(buffers):
            ring.exchange(outgoing, incoming)

    return watched(three_rounds, buffers[-1], first)


# 2.3 sent_slice


def check_sent_slice(answer: Function) -> Iterator[str]:
    """Follow every partial sum round the ring; then let the reduce-scatter use it."""
    for world_size in (4, 5, 2, 3, 6):
        _check_slices(answer, world_size)
        _check_passing(answer, world_size)
    yield "2 to 6 ranks: a slice that exists, in every round"
    yield "each rank sends on the partial sum that it has just received"
    yield "after the last round rank r has received slice r"
    _check_reduce_scatter(f"reduce_scatter(output [{SHARD}], input), on your sent_slice")
    yield "ring.reduce_scatter runs on it"


def _check_slices(answer: Function, world_size: int) -> None:
    for step in range(world_size - 1):
        for rank in range(world_size):
            value = answer(rank, world_size, step)
            if type(value) is not int or not 0 <= value < world_size:
                raise Wrong(
                    f"On {world_size} ranks rank {rank} sends slice {value!r} in round {step}; "
                    f"there are slices 0 to {world_size - 1}.",
                    expected=f"one of 0 to {world_size - 1}",
                    observed=value,
                    rank=rank,
                )


def _check_passing(answer: Function, world_size: int) -> None:
    for rank in range(world_size):
        left = (rank - 1) % world_size
        for step in range(1, world_size - 1):
            received, sent = answer(left, world_size, step - 1), answer(rank, world_size, step)
            if sent != received:
                raise Wrong(
                    f"On {world_size} ranks rank {rank} has received slice {received} in round "
                    f"{step - 1} and sends slice {sent} in round {step}: the partial sum stops.",
                    expected=received,
                    observed=sent,
                    rank=rank,
                )
        last = answer(left, world_size, world_size - 2)
        if last != rank:
            raise Wrong(
                f"On {world_size} ranks the last slice that rank {rank} receives is {last}; it "
                f"is to end with slice {rank}.",
                expected=rank,
                observed=last,
                rank=rank,
            )


# 2.4 reduce_scatter


def check_reduce_scatter(answer: Function) -> Iterator[str]:
    """Values, input, traffic and memory on 1 to 5 ranks; then stage 2 trains on it."""
    _check_reduce_scatter(f"reduce_scatter(output [{SHARD}], input)")
    yield "1 to 5 ranks: rank r has slice r of the sum, and the input is as before"
    yield "elements sent: N-1 slices a rank, which no way of adding undercuts"
    yield "memory: three slices on top at most"
    for world_size in (2, 3):
        call = f"reduce_scatter(output [{SHARD}] of bfloat16, input)"
        look = Look(call, on_ranks(_scatter_16_bits_rank, world_size, call=call))
        look.travels_in("bfloat16")
    yield "bfloat16 is sent as bfloat16"
    _check_training(2, "reduce_scatter")
    yield "stage 2 trains on it: after three steps the weights of plain torch"


def _check_reduce_scatter(call: str) -> None:
    for world_size in SIZES:
        numel = SHARD * world_size
        for in_place in (False, True):
            look = Look(call, on_ranks(_scatter_rank, world_size, numel, in_place, call=call))
            look.only_messages()
            sums = total(world_size, numel)
            slices = [sums[rank * SHARD : (rank + 1) * SHARD] for rank in range(world_size)]
            look.values(slices, "does not hold its slice of the sum")
            if not in_place:
                look.kept("input")
            look.sent((world_size - 1) * SHARD, "one slice in each of N-1 rounds")
            look.budget(3 * SHARD * ITEMSIZE, "three slices")


def _scatter_rank(numel: int, in_place: bool) -> Shown:
    rank, tensor = comm.get_rank(), numbers(comm.get_rank(), numel)
    shard = numel // comm.get_world_size()
    own = tensor[rank * shard : (rank + 1) * shard]
    output = own if in_place else torch.zeros_like(own)
    return watched(lambda: ring.reduce_scatter(output, tensor), output, tensor)


def _scatter_16_bits_rank() -> Shown:
    tensor = small_numbers(comm.get_rank(), SHARD * comm.get_world_size())
    output = tensor.new_zeros(SHARD)
    return watched(lambda: ring.reduce_scatter(output, tensor), output, tensor)


def _check_training(stage: int, name: str) -> None:
    for world_size in (2, 3):
        with comm.use_ring():
            ranks = evidence.train_tiny(stage, world_size)
        call = f"{name}(...), as stage {stage} calls it"
        _same_as_alone([rank.weights for rank in ranks], world_size, call)


# 2.5 all_gather


def check_all_gather(answer: Function) -> Iterator[str]:
    """Values, traffic and memory on 1 to 5 ranks; then stage 1 trains on it."""
    call = f"all_gather(output, input [{SHARD}])"
    for world_size in SIZES:
        for in_place in (False, True):
            look = Look(call, on_ranks(_gather_rank, world_size, in_place, call=call))
            look.only_messages()
            every = torch.cat([numbers(rank, SHARD) for rank in range(world_size)]).tolist()
            look.values([every] * world_size, "does not hold everybody's slice in place")
            look.sent((world_size - 1) * SHARD, "one slice in each of N-1 rounds")
            look.budget(SHARD * ITEMSIZE, "one slice")
    yield "1 to 5 ranks: all slices in rank order, on every rank"
    yield "elements sent: N-1 slices a rank"
    yield "memory: one slice on top at most"
    _check_training(1, "all_gather")
    yield "stage 1 trains on it: after three steps the weights of plain torch"


def _gather_rank(in_place: bool) -> Shown:
    rank, shard = comm.get_rank(), numbers(comm.get_rank(), SHARD)
    output = shard.new_full((SHARD * comm.get_world_size(),), -1.0)
    if in_place:
        shard = output[rank * SHARD : (rank + 1) * SHARD].copy_(shard)
    return watched(lambda: ring.all_gather(output, shard), output, shard)


# 2.6 all_reduce


def check_all_reduce(answer: Function) -> Iterator[str]:
    """Values, memory and traffic for lengths that divide and others; then stage 0 trains on it."""
    for world_size in SIZES:
        for numel in (20, 21, 3):
            call = f"all_reduce(tensor [{numel}])"
            look = Look(call, on_ranks(_reduce_rank, world_size, numel, call=call))
            look.only_messages()
            look.values([total(world_size, numel)] * world_size, "does not hold the sum")
            shard = -(-numel // world_size)
            tensors = (2 * numel + 3 * shard) * ITEMSIZE
            look.budget(tensors, "two tensors and three slices")
            look.sent(links.ring_sent_elements(numel, world_size), "2 (N-1) slices")
    yield "1 to 5 ranks, 3 to 21 elements: each holds the sum, where N divides and where not"
    yield "memory: two tensors and three slices at most"
    yield "elements sent: 2 (N-1) slices a rank"
    for world_size in (2, 3):
        call = "all_reduce(tensor [21] of bfloat16)"
        look = Look(call, on_ranks(_reduce_16_bits_rank, world_size, 21, call=call))
        look.travels_in("bfloat16")
        whole = [small_numbers(rank, 21).float() for rank in range(world_size)]
        look.values([torch.stack(whole).sum(0).tolist()] * world_size, "does not hold the sum")
    yield "bfloat16 is sent as bfloat16, the padding too"
    _check_training(0, "all_reduce")
    yield "stage 0 trains on it: after three steps the weights of plain torch"


def _reduce_rank(numel: int) -> Shown:
    tensor = numbers(comm.get_rank(), numel)
    return watched(lambda: ring.all_reduce(tensor), tensor, None)


def _reduce_16_bits_rank(numel: int) -> Shown:
    tensor = small_numbers(comm.get_rank(), numel)
    return watched(lambda: ring.all_reduce(tensor), tensor, None)


def ring_evidence(world_size: int) -> str:
    """Say what an all-reduce of 12 elements leaves on so many lockstep ranks."""
    shown = comm.run(_hunted_rank, world_size, "lockstep", args=(12,))
    sums = [f"{rank.values[0]:g}..{rank.values[-1]:g}" for rank in shown]
    sent = [str(rank.sent) for rank in shown]
    held = max(rank.held for rank in shown)
    return (
        f"first and last element by rank: {', '.join(sums)}; elements sent: {', '.join(sent)}; "
        f"bytes held on top: {held}"
    )


def _hunted_rank(numel: int) -> Shown:
    tensor = 10.0 ** comm.get_rank() * torch.ones(numel)  # the digits of a sum say who is in it
    return watched(lambda: ring.all_reduce(tensor), tensor, None)


# 2.7 ring_seconds


def check_ring_seconds(answer: Function) -> Iterator[str]:
    """Seconds added up over the messages that ranks have really sent."""
    for world_size in (4, 2, 8, 1, 3):
        numel = 4 * world_size
        messages = comm.run(_messages_rank, world_size, "lockstep", args=(numel,))[0]
        for latency, bandwidth in ((1.0, 1.0), (5e-6, 25e9), (0.0, 2.0), (2.0, 1e12)):
            expected = sum(latency + each.nbytes / bandwidth for each in messages)
            arguments = (ITEMSIZE * numel, world_size, latency, bandwidth)
            _check_seconds(answer, arguments, expected)
    yield "1 to 8 ranks: the seconds of the messages that a ring has really sent"
    yield "latency alone, bandwidth alone, and both"
    _check_seconds(answer, (2 * 10_795_008, 4, 0.0, 25e9), 1.5 * 2 * 10_795_008 / 25e9)
    yield "gpt-10m's gradients on 4 ranks: one and a half times their bytes"


def _messages_rank(numel: int) -> list[Any]:
    ring.all_reduce(torch.zeros(numel))
    return [event for event in comm.records().collectives if event.op == "send"]


def _check_seconds(answer: Function, arguments: tuple[Any, ...], expected: float) -> None:
    value = answer(*arguments)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong("It must return a number of seconds.", expected=expected, observed=value)
    if abs(value - expected) > 1e-9 * max(expected, 1e-12):
        nbytes, world_size, latency, bandwidth = arguments
        raise Wrong(
            f"{nbytes} bytes on {world_size} ranks, {latency:g} s a message and {bandwidth:g} "
            f"bytes a second: the messages take {expected:.6g} s, not {value:.6g} s.",
            expected=f"{expected:.9g}",
            observed=f"{value:.9g}",
        )
