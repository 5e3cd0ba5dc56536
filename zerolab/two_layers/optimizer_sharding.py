"""Chapter 4: stage 1 on one page: one flat buffer, one slice of it a rank, one optimizer on that.

Owns nothing. Phases of a step: backward on the own batch, the mean of the own slice of the
gradients (reduce-scatter), the optimizer on the own slice, everybody's slices (all-gather).

Source: ZeRO (Rajbhandari et al. 2020), section 5.1.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm


def train_sharded_optimizer(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Train a model on all ranks, each of which holds optimizer state for its own slice only.

    After every step the parameters are those of one process that sees the batches of all
    ranks, on every rank. A step moves 2 elements a parameter, padding aside; an all-reduce
    counts twice. Between two steps a rank holds the parameters, what the optimizer remembers
    of one slice, and no gradients.

    Args:
        model: the same weights on every rank, in fp32; trained in place.
        batches: this rank's (inputs, targets), one pair a step; the loss is `F.mse_loss`.
        make_optimizer: takes a list of tensors, returns an elementwise torch optimizer.
    """
    params, rank, world_size = list(model.parameters()), comm.get_rank(), comm.get_world_size()
    shard_numel = -(-sum(param.numel() for param in params) // world_size)
    whole = params[0].new_zeros(world_size * shard_numel)  # all parameters, then padding
    start = 0
    for param in params:
        view = whole[start : start + param.numel()].view_as(param)
        param.data = view.copy_(param.data)
        start += param.numel()
    own = nn.Parameter(whole[rank * shard_numel : (rank + 1) * shard_numel])
    optimizer = make_optimizer([own])
    for inputs, targets in batches:
        F.mse_loss(model(inputs), targets).backward()
        grads = torch.cat([param.grad.reshape(-1) for param in params if param.grad is not None])
        grads = F.pad(grads, (0, whole.numel() - grads.numel()))  # [world_size * shard_numel]
        own.grad = torch.empty_like(own)
        comm.reduce_scatter(own.grad, grads, "avg")
        optimizer.step()
        comm.all_gather(whole, own.detach())
        del grads
        own.grad = None
        model.zero_grad()
