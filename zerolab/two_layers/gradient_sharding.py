"""Chapter 5: stage 2 on one page: a gradient is reduced as soon as it appears, and freed.

Owns nothing. Every parameter is padded and sharded by itself here, so that its hook knows all
there is to know. Phases: forward and backward of a micro-batch, in which each gradient becomes
this rank's slice of the mean; after the last micro-batch the optimizer, and everybody's slices.

Source: ZeRO (Rajbhandari et al. 2020), section 5.2.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm


def train_sharded_gradients(
    model: nn.Module,
    steps: Iterable[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Train a model on all ranks, of which none ever holds the gradients of the whole model.

    After every step the parameters are those of one process that sees the micro-batches of all
    ranks. A parameter's whole gradient is gone before the next parameter's is reduced; a rank
    keeps its own slice of the mean. With G micro-batches a step moves G + 1 elements a
    parameter, padding aside. Between two steps there are no gradients.

    Args:
        model: the same weights on every rank, in fp32; trained in place.
        steps: for each step this rank's micro-batches, pairs (inputs, targets) of one size. The
            loss is the mean of their `F.mse_loss`.
        make_optimizer: takes a list of tensors, returns an elementwise torch optimizer.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    whole: dict[torch.Tensor, torch.Tensor] = {}  # of every parameter: itself, padded
    own: dict[torch.Tensor, nn.Parameter] = {}  # and this rank's slice of that

    def reduce(param: torch.Tensor) -> None:
        assert param.grad is not None
        grad = F.pad(param.grad.reshape(-1), (0, whole[param].numel() - param.numel()))
        param.grad = None
        mean = torch.empty_like(own[param])
        comm.reduce_scatter(mean, grad, "avg")
        earlier = own[param].grad
        own[param].grad = mean if earlier is None else earlier + mean

    hooks = []
    for param in model.parameters():
        whole[param] = F.pad(param.data.reshape(-1), (0, -param.numel() % world_size))
        param.data = whole[param][: param.numel()].view_as(param)
        own[param] = nn.Parameter(whole[param].chunk(world_size)[rank])
        hooks.append(param.register_post_accumulate_grad_hook(reduce))
    optimizer = make_optimizer(list(own.values()))
    for micro_batches in steps:
        for inputs, targets in micro_batches:
            (F.mse_loss(model(inputs), targets) / len(micro_batches)).backward()
        optimizer.step()
        for param, piece in own.items():
            comm.all_gather(whole[param], piece.detach())
            piece.grad = None
    for hook in hooks:
        hook.remove()
