"""Chapter 3: stage 0 on one page: hooks, one flat buffer, one all-reduce a step.

Owns nothing. Every gradient is a view of one buffer, so that autograd itself packs it. Phases of
a step: backward on the own batch, whose last hook starts the reduction; wait; the optimizer.

Source: Li et al., PyTorch Distributed (2020), section 3.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm


def train_data_parallel(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Train a model on all ranks, each on its own batches, as if one process had them all.

    The ranks may begin with different weights: rank 0's count. After every step all ranks hold
    the weights of one process that sees the batches of all. A parameter that a rank did not use
    in a step counts as zeros there.

    A step is one all-reduce of all gradients together. It is on its way before `backward()`
    returns, on a rank that used every parameter. A rank never holds its gradients twice. When
    the function returns, backward sends nothing any more.

    Args:
        model: fp32; trained in place.
        batches: this rank's (inputs, targets), one pair a step; the loss is `F.mse_loss`.
        make_optimizer: takes a list of tensors, returns a torch optimizer.
    """
    params = list(model.parameters())
    numels = [param.numel() for param in params]
    flat_grad = torch.zeros(sum(numels), device=params[0].device)  # [Psi]
    for param, piece in zip(params, flat_grad.split(numels), strict=True):
        comm.broadcast(param.data, src=0, purpose="control")
        param.grad = piece.view_as(param)
    missing: set[torch.Tensor] = set()
    works: list[comm.Work] = []

    def reduce() -> None:
        works.append(comm.all_reduce(flat_grad, "avg", async_op=True))

    def grad_ready(param: torch.Tensor) -> None:
        missing.discard(param)
        if not missing:
            reduce()

    hooks = [param.register_post_accumulate_grad_hook(grad_ready) for param in params]
    optimizer = make_optimizer(params)
    for inputs, targets in batches:
        flat_grad.zero_()
        missing.update(params)
        F.mse_loss(model(inputs), targets).backward()
        if missing:  # not every hook has come, so nothing has been sent
            reduce()
        works.pop().wait()
        optimizer.step()
    for hook in hooks:
        hook.remove()
