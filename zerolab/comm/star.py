"""Chapter 2: the star and the tree: an all-reduce as one would write it first.

Owns no data. In a star one rank does the work for all: a parameter server without the name. Its
line carries N-1 times the tensor in and as much out, and the others wait. A tree halves the ranks
that wait in each round: few rounds, whole tensors. Both are the second opinion on the ring, and
what it is compared with.
"""

import torch
from torch import Tensor

from .. import comm

ROOT = 0


def sum_everywhere(tensor: Tensor) -> None:
    """Replace `tensor` on every rank by the sum over all ranks.

    Only `comm.send` and `comm.recv`; on a rank at most two more tensors of this size, however
    many ranks there are.

    Args:
        tensor: any shape.
    """
    others = [rank for rank in range(comm.get_world_size()) if rank != ROOT]
    if comm.get_rank() != ROOT:
        comm.send(tensor, ROOT)
        comm.recv(tensor, ROOT)
        return
    arriving = torch.empty_like(tensor)
    for rank in others:
        comm.recv(arriving, rank)
        tensor.add_(arriving)
    for rank in others:
        comm.send(tensor, rank)


def tree_sum(tensor: Tensor) -> None:
    """Replace `tensor` on every rank by the sum, in 2 ceil(log2 N) rounds.

    Args:
        tensor: any shape.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    distances = [2**power for power in range((world_size - 1).bit_length())]
    arriving = torch.empty_like(tensor)
    for distance in distances:  # up: of each pair the higher rank hands its sum to the lower
        if rank % (2 * distance) == distance:
            comm.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            comm.recv(arriving, rank + distance)
            tensor.add_(arriving)
    for distance in reversed(distances):  # down: the same pairs, the other way
        if rank % (2 * distance) == distance:
            comm.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            comm.send(tensor, rank + distance)
