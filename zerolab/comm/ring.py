"""Chapter 2: the ring: collectives out of messages between neighbours, and nothing else.

Owns no data. Every rank sends to its right and receives from its left, so all links are busy all
the time, and nobody passes on more than what the next one is missing. A tensor of N slices goes
round twice:

    reduce_scatter  N-1 rounds: a partial sum of one slice moves on, and grows at every rank
    all_gather      N-1 rounds: the finished slices move on
    all_reduce      the two after each other; each rank sends 2(N-1)/N of the tensor

The sum of slice c begins at rank c+1 and ends at rank c, where it stays. That is another order
than rank 0, 1, 2, ..., so in floating point the last bits may differ from the other collectives
of this package, except for two ranks, for the last slice and for whole numbers. Sixteen bits are
rounded at every rank they pass, not once at the end.
"""

import torch
from torch import Tensor

from .. import comm


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send `outgoing` to the right neighbour, fill `incoming` with what the left one sends.

    All ranks call this at the same time. The last rank's right neighbour is rank 0. It must end
    although `comm.send` returns only when the receiver has received. When it returns, nothing is
    under way any more.

    Args:
        outgoing: any shape; unchanged.
        incoming: as many elements as what the left neighbour sends, of the same dtype.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    sending = comm.send(outgoing, (rank + 1) % world_size, async_op=True)
    comm.recv(incoming, (rank - 1) % world_size)
    sending.wait()


def sent_slice(rank: int, world_size: int, step: int) -> int:
    """Return the number of the slice whose partial sum a rank sends on in a round.

    After the last round, `step` = world_size - 2, every rank has received slice number `rank`,
    which all the others have been added to. Example: of 4 ranks, rank 0 sends 3, 2 and 1.

    Args:
        rank: who sends, to the rank on its right.
        world_size: how many ranks, and slices.
        step: the round, from 0.
    """
    return (rank - 1 - step) % world_size


def reduce_scatter(output: Tensor, input: Tensor) -> None:
    """Add `input` over all ranks; rank r keeps slice r of the sum.

    In world_size - 1 rounds of `exchange`, each of one slice. `input` stays as it is, unless
    `output` is a part of it; three slices of memory are enough on top.

    Args:
        output: [shard_numel]; may be the own slice of `input`.
        input: [world_size * shard_numel].
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = input.view(world_size, output.numel())  # [world_size, shard_numel]
    partial = slices[sent_slice(rank, world_size, 0)].clone()
    for step in range(1, world_size):
        arriving = torch.empty_like(partial)
        exchange(partial, arriving)
        partial = arriving.add_(slices[sent_slice(rank, world_size, step)])
    output.copy_(partial)


def all_gather(output: Tensor, input: Tensor) -> None:
    """Lay the `input` of all ranks end to end in the `output` of every rank.

    In world_size - 1 rounds of `exchange`, each of one slice, and without memory on top.

    Args:
        output: [world_size * shard_numel].
        input: [shard_numel]; may be the own slice of `output`.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    slices = output.view(world_size, input.numel())  # [world_size, shard_numel]
    slices[rank].copy_(input)
    for step in range(world_size - 1):
        exchange(slices[(rank - step) % world_size], slices[(rank - step - 1) % world_size])


def all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` on every rank by the sum over all ranks.

    A reduce-scatter and an all-gather; `world_size` need not divide the length.

    Args:
        tensor: [numel], any length.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    shard_numel = -(-tensor.numel() // world_size)
    padded = tensor.new_zeros(world_size * shard_numel)
    padded[: tensor.numel()] = tensor
    own = padded[rank * shard_numel : (rank + 1) * shard_numel]
    reduce_scatter(own, padded)
    all_gather(padded, own)
    tensor.copy_(padded[: tensor.numel()])
