"""Chapter 2: wrong answers to the exercises of 02_collectives. The docstring is the misconception.

Owns no data. Each stands in the module of its exercise while it is checked, so `ring.exchange`
and `ring.sent_slice` are the package's own, or the learner's.
"""

import torch
from torch import Tensor

from ... import comm
from ...comm import ring

# 2.1 sum_everywhere


def everybody_sends_first(tensor: Tensor) -> None:
    """`comm.send` returns when the other has received. Who only sends, never receives."""
    others = [rank for rank in range(comm.get_world_size()) if rank != comm.get_rank()]
    arriving, own = torch.empty_like(tensor), tensor.clone()
    for rank in others:
        comm.send(own, rank)
    for rank in others:
        comm.recv(arriving, rank)
        tensor.add_(arriving)


def root_keeps_the_sum(tensor: Tensor) -> None:
    """One rank knows the sum now; the others still hold what they began with."""
    arriving = torch.empty_like(tensor)
    if comm.get_rank():
        comm.send(tensor, 0)
        return
    for rank in range(1, comm.get_world_size()):
        comm.recv(arriving, rank)
        tensor.add_(arriving)


def root_forgets_itself(tensor: Tensor) -> None:
    """The rank that adds has numbers of its own: an empty beginning leaves them out."""
    if comm.get_rank():
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    arriving = torch.empty_like(tensor)
    if comm.get_world_size() > 1:
        tensor.zero_()
    for rank in range(1, comm.get_world_size()):
        comm.recv(arriving, rank)
        tensor.add_(arriving)
    for rank in range(1, comm.get_world_size()):
        comm.send(tensor, rank)


def chain_without_a_way_back(tensor: Tensor) -> None:
    """Handed on from rank to rank the sum grows, and only the last one has all of it."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    if rank:
        arriving = torch.empty_like(tensor)
        comm.recv(arriving, rank - 1)
        tensor.add_(arriving)
    if rank < world_size - 1:
        comm.send(tensor, rank + 1)


def keeps_them_all(tensor: Tensor) -> None:
    """It first collects what all ranks have: memory for as many tensors as there are ranks."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    rows = [torch.empty_like(tensor) if other != rank else tensor for other in range(world_size)]
    others = [other for other in range(world_size) if other != rank]
    works = [comm.send(tensor, other, async_op=True) for other in others]
    works += [comm.recv(rows[other], other, async_op=True) for other in others]
    for work in works:
        work.wait()
    tensor.copy_(torch.stack(rows).sum(0))


def lets_comm_do_it(tensor: Tensor) -> None:
    """`comm.all_reduce` is what is to be built here; only messages are allowed."""
    comm.all_reduce(tensor)


# 2.2 exchange


def sends_before_it_receives(outgoing: Tensor, incoming: Tensor) -> None:
    """Everybody sends, so nobody is there to receive: all wait for each other in a circle."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    comm.send(outgoing, (rank + 1) % world_size)
    comm.recv(incoming, (rank - 1) % world_size)


def forgets_to_wait(outgoing: Tensor, incoming: Tensor) -> None:
    """An asynchronous call only begins: before `wait()` nothing has arrived."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    comm.send(outgoing, (rank + 1) % world_size, async_op=True)
    comm.recv(incoming, (rank - 1) % world_size, async_op=True)


def lets_the_send_go(outgoing: Tensor, incoming: Tensor) -> None:
    """Having received says nothing about the own message: until `wait()` it may be under way."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    comm.send(outgoing, (rank + 1) % world_size, async_op=True)
    comm.recv(incoming, (rank - 1) % world_size)


def turns_left(outgoing: Tensor, incoming: Tensor) -> None:
    """The ring turns the other way: it sends to the left and receives from the right."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    sending = comm.send(outgoing, (rank - 1) % world_size, async_op=True)
    comm.recv(incoming, (rank + 1) % world_size)
    sending.wait()


def half_the_ring(outgoing: Tensor, incoming: Tensor) -> None:
    """Even ranks send, odd ones receive: no deadlock, and half of the messages are missing."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    if rank % 2:
        comm.recv(incoming, rank - 1)
    elif rank + 1 < world_size:
        comm.send(outgoing, rank + 1)


def copies_its_own(outgoing: Tensor, incoming: Tensor) -> None:
    """Each rank is a program of its own: a copy inside it tells the neighbour nothing."""
    incoming.copy_(outgoing)


# 2.3 sent_slice


def begins_with_its_own(rank: int, world_size: int, step: int) -> int:
    """Textbooks begin with the own slice; then rank r ends with slice r + 1, not with r."""
    return (rank - step) % world_size


def counts_up(rank: int, world_size: int, step: int) -> int:
    """Messages go to the right, so what arrives next is a slice further left, not right."""
    return (rank + 1 + step) % world_size


def does_not_wrap(rank: int, world_size: int, step: int) -> int:
    """A ring has no end: after slice 0 comes the last one, not slice -1."""
    return rank - 1 - step


def counts_rounds_from_one(rank: int, world_size: int, step: int) -> int:
    """The first round is number 0; counted from 1, all are a slice too far."""
    return (rank - 2 - step) % world_size


def always_the_same(rank: int, world_size: int, step: int) -> int:
    """A partial sum is passed on: what a rank sends next is what it has just received."""
    return (rank - 1) % world_size


# 2.4 reduce_scatter


def whole_tensors_go_round(output: Tensor, input: Tensor) -> None:
    """Right values, N times the traffic: a rank needs one slice of each peer, not all of it."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    passing, total = input.clone(), input.clone()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(passing)
        ring.exchange(passing, arriving)
        passing = arriving
        total.add_(arriving)
    output.copy_(total.view(world_size, output.numel())[rank])


def neighbours_slice(output: Tensor, input: Tensor) -> None:
    """It ends one slice too far: rank r holds the sum of slice r + 1."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    partial = slices[rank].clone()
    for step in range(world_size - 1):
        arriving = torch.empty_like(partial)
        ring.exchange(partial, arriving)
        partial = arriving.add_(slices[(rank - step - 1) % world_size])
    output.copy_(partial)


def adds_every_round_twice(output: Tensor, input: Tensor) -> None:
    """What arrives is a sum already; added to the own sum so far, ranks count several times."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    partial = slices[ring.sent_slice(rank, world_size, 0)].clone()
    for step in range(1, world_size):
        arriving = torch.empty_like(partial)
        ring.exchange(partial, arriving)
        partial = partial + arriving.add_(slices[ring.sent_slice(rank, world_size, step)])
    output.copy_(partial)


def stops_a_round_early(output: Tensor, input: Tensor) -> None:
    """N ranks need N - 1 rounds: after N - 2 the own slice has not been here."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    partial = slices[ring.sent_slice(rank, world_size, 0)].clone()
    for step in range(1, world_size - 1):
        arriving = torch.empty_like(partial)
        ring.exchange(partial, arriving)
        partial = arriving.add_(slices[ring.sent_slice(rank, world_size, step)])
    output.copy_(partial)


def adds_in_the_input(output: Tensor, input: Tensor) -> None:
    """Partial sums overwrite the input, which the caller still needs."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    for step in range(world_size - 1):
        arriving = torch.empty_like(output)
        ring.exchange(slices[ring.sent_slice(rank, world_size, step)], arriving)
        slices[ring.sent_slice(rank, world_size, step + 1)].add_(arriving)
    output.copy_(slices[rank])


def passes_on_without_adding(output: Tensor, input: Tensor) -> None:
    """This moves slices and adds nothing: the first half of the name is missing."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    passing = slices[ring.sent_slice(rank, world_size, 0)].clone()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(passing)
        ring.exchange(passing, arriving)
        passing = arriving
    output.copy_(passing)


def asks_the_package(output: Tensor, input: Tensor) -> None:
    """`comm.reduce_scatter` has the right result, and is what is to be built from messages."""
    comm.reduce_scatter(output, input)


def adds_in_fp32(output: Tensor, input: Tensor) -> None:
    """Partial sums in fp32 are finer, and cost twice the bytes on every link of a bf16 ring."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())
    partial = slices[(rank - 1) % world_size].float().clone()
    for step in range(1, world_size):
        arriving = torch.empty_like(partial)
        ring.exchange(partial, arriving)
        partial = arriving.add_(slices[(rank - 1 - step) % world_size])
    output.copy_(partial)


# 2.5 all_gather


def leaves_its_own_out(output: Tensor, input: Tensor) -> None:
    """The own slice does not come round by itself: it must be put in its place first."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())
    for step in range(world_size - 1):
        outgoing = input if step == 0 else slices[(rank - step) % world_size]
        ring.exchange(outgoing, slices[(rank - step - 1) % world_size])


def sends_its_own_again(output: Tensor, input: Tensor) -> None:
    """The left neighbour's slice comes every round, and all others never."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())
    slices[rank].copy_(input)
    for step in range(world_size - 1):
        ring.exchange(input, slices[(rank - step - 1) % world_size])


def files_it_upwards(output: Tensor, input: Tensor) -> None:
    """What arrives comes from ever further left; it is put ever further right."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())
    slices[rank].copy_(input)
    for step in range(world_size - 1):
        ring.exchange(slices[(rank + step) % world_size], slices[(rank + step + 1) % world_size])


def sends_all_it_has(output: Tensor, input: Tensor) -> None:
    """Right values, N times the traffic: the neighbour has all but one of these slices."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())
    slices[rank].copy_(input)
    for step in range(world_size - 1):
        arriving = torch.empty_like(slices)
        ring.exchange(slices, arriving)
        slices[(rank - step - 1) % world_size].copy_(arriving[(rank - step - 1) % world_size])


def gathers_a_round_less(output: Tensor, input: Tensor) -> None:
    """Each round brings one slice, and N - 1 are missing: so it takes N - 1 rounds."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())
    slices[rank].copy_(input)
    for step in range(world_size - 2):
        ring.exchange(slices[(rank - step) % world_size], slices[(rank - step - 1) % world_size])


# 2.6 all_reduce


def drops_the_rest(tensor: Tensor) -> None:
    """Where N does not divide the length, rounding down leaves the last elements unsummed."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    shard_numel = tensor.numel() // world_size
    whole = tensor[: world_size * shard_numel]
    own = whole[rank * shard_numel : (rank + 1) * shard_numel]
    ring.reduce_scatter(own, whole)
    ring.all_gather(whole, own)


def passes_it_all_round(tensor: Tensor) -> None:
    """A ring that passes the whole tensor on: right values, N / 2 times the traffic."""
    passing = tensor.clone()
    for _ in range(comm.get_world_size() - 1):
        arriving = torch.empty_like(passing)
        ring.exchange(passing, arriving)
        passing = arriving
        tensor.add_(arriving)


def gathers_and_adds(tensor: Tensor) -> None:
    """Everybody collects everything and adds: N tensors in memory, and N / 2 times the traffic."""
    everything = tensor.new_empty(comm.get_world_size() * tensor.numel())
    ring.all_gather(everything, tensor)
    tensor.copy_(everything.view(comm.get_world_size(), -1).sum(0))


def sums_a_copy(tensor: Tensor) -> None:
    """The padded copy holds the sum; the tensor that the caller sees never changes."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    shard_numel = -(-tensor.numel() // world_size)
    padded = tensor.new_zeros(world_size * shard_numel)
    padded[: tensor.numel()] = tensor
    own = padded[rank * shard_numel : (rank + 1) * shard_numel]
    ring.reduce_scatter(own, padded)
    ring.all_gather(padded, own)


def scatters_without_gathering(tensor: Tensor) -> None:
    """After the reduce-scatter each rank has one slice of the sum, and old numbers elsewhere."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    shard_numel = -(-tensor.numel() // world_size)
    padded = tensor.new_zeros(world_size * shard_numel)
    padded[: tensor.numel()] = tensor
    ring.reduce_scatter(padded[rank * shard_numel : (rank + 1) * shard_numel], padded)
    tensor.copy_(padded[: tensor.numel()])


def one_rank_adds(tensor: Tensor) -> None:
    """Rank 0 adds for all: its line carries N - 1 whole tensors, each way, and the others wait."""
    others = range(1, comm.get_world_size())
    arriving = torch.empty_like(tensor)
    if comm.get_rank():
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for rank in others:
        comm.recv(arriving, rank)
        tensor.add_(arriving)
    for rank in others:
        comm.send(tensor, rank)


def pads_in_fp32(tensor: Tensor) -> None:
    """`torch.zeros` is fp32: padding with it makes sixteen bits thirty-two, and twice the bytes."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    shard_numel = -(-tensor.numel() // world_size)
    padding = torch.zeros(world_size * shard_numel - tensor.numel(), device=tensor.device)
    padded = torch.cat([tensor, padding])
    own = padded[rank * shard_numel : (rank + 1) * shard_numel]
    ring.reduce_scatter(own, padded)
    ring.all_gather(padded, own)
    tensor.copy_(padded[: tensor.numel()])


# 2.7 ring_seconds


def forgets_latency(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Bytes alone: then a thousand small messages would cost what one large one does."""
    return 2 * (world_size - 1) * nbytes / world_size / bandwidth


def latency_only_once(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Every round is a message of its own, and each of them pays for the latency."""
    return latency + 2 * (world_size - 1) * nbytes / world_size / bandwidth


def whole_tensor_each_round(
    nbytes: float, world_size: int, latency: float, bandwidth: float
) -> float:
    """A round carries one slice of N, not the whole tensor."""
    return 2 * (world_size - 1) * (latency + nbytes / bandwidth)


def half_the_rounds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """That is the reduce-scatter; the all-gather takes as many rounds once more."""
    return (world_size - 1) * (latency + nbytes / world_size / bandwidth)


def a_round_for_each_rank(
    nbytes: float, world_size: int, latency: float, bandwidth: float
) -> float:
    """N ranks have N - 1 neighbours to hear from, so N - 1 rounds each way and not N."""
    return 2 * world_size * (latency + nbytes / world_size / bandwidth)
