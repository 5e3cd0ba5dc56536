"""Chapter 6: stage 3 on one page: a layer is whole while it computes, and at no other time.

Owns nothing. Each layer's parameters are one flat, padded vector, of which a rank keeps a slice.
Forward keeps the inputs of the layers and nothing else; backward runs each layer once more, to
have a graph for that layer alone. Phases of a step: forward layer by layer (gather, run, free),
backward in the opposite order (gather, run, gradients, free, reduce-scatter), the optimizer.

Source: ZeRO (Rajbhandari et al. 2020), section 5.3.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .. import comm


def train_sharded_params(
    model: nn.Sequential,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Train a model on all ranks, of which none ever has more than one layer whole.

    After every step the weights are those of one process that sees the batches of all ranks.
    From the call of `make_optimizer` on a rank holds its own slice of every layer; beside that,
    one layer's parameters and gradients at a time. A step moves 3 elements a parameter, padding
    aside. At the end the model is whole again on every rank, which moves 1 more.

    Args:
        model: the same weights on every rank, in fp32. Its children are the layers: each has
            parameters, and takes what the one before gives.
        batches: this rank's (inputs, targets), one pair a step; the loss is `F.mse_loss`.
        make_optimizer: takes a list of tensors, returns an elementwise torch optimizer.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    own: dict[nn.Module, nn.Parameter] = {}  # this rank's slice of every layer

    def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        vector = parameters_to_vector(tensors).detach()
        return F.pad(vector, (0, -vector.numel() % world_size))

    def gather(layer: nn.Module) -> None:
        whole = own[layer].new_empty(world_size * own[layer].numel())
        comm.all_gather(whole, own[layer].detach())
        vector_to_parameters(whole, layer.parameters())

    def free(layer: nn.Module) -> None:
        for param in layer.parameters():
            param.data, param.grad = param.new_tensor(torch.nan).expand(param.shape), None

    for layer in model:
        own[layer] = nn.Parameter(flatten(layer.parameters()).chunk(world_size)[rank].clone())
        free(layer)
    optimizer = make_optimizer(list(own.values()))
    for inputs, targets in batches:
        kept = [inputs]  # what goes into each layer, and what comes out of the last
        for layer in model:
            gather(layer)
            with torch.no_grad():
                kept.append(layer(kept[-1]))
            free(layer)
        leaf = kept.pop().requires_grad_()
        F.mse_loss(leaf, targets).backward()
        for layer in reversed(list(model)):
            gather(layer)
            above, leaf = leaf.grad, kept.pop().detach().requires_grad_()
            layer(leaf).backward(above)
            grads = flatten([param.grad for param in layer.parameters() if param.grad is not None])
            free(layer)
            mean = torch.empty_like(own[layer])
            comm.reduce_scatter(mean, grads, "avg")
            own[layer].grad = mean
        optimizer.step()
        optimizer.zero_grad()
    for layer in model:
        gather(layer)
