"""Chapter 7: mixed precision on one page: fp16 in front, fp32 behind, one loss scale for all ranks.

Owns nothing. Phases of a step: forward and backward in fp16 on the scaled loss; the ranks agree
whether anybody's gradients overflowed; if so the step is dropped by all; if not, each gradient is
averaged in fp32, unscaled, and the optimizer updates fp32 master weights, which are rounded into
the model. The scale changes last.

Source: Micikevicius et al., Mixed Precision Training (2018), sections 3.1 and 3.2.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm


def train_mixed_precision(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    scale: float,
    window: int,
) -> list[float]:
    """Train a model in fp16 on all ranks; return the loss scale that each step used.

    Forward and backward run in fp16, on the loss times the scale; the optimizer never sees fp16.
    Gradients are averaged over the ranks in fp32. A step in which any rank has an infinite or
    NaN gradient changes nothing on any rank, and halves the scale; every `window` good steps in a
    row double it. Between two steps a rank holds the fp16 parameters, their fp32 master copy and
    what the optimizer remembers: no gradients.

    Args:
        model: the same fp32 weights on every rank. Afterwards it is in fp16: the masters, rounded.
        batches: this rank's (inputs, targets) in fp32, one pair a step; the loss is the
            `F.mse_loss` of the outputs in fp32.
        make_optimizer: takes a list of tensors, returns a torch optimizer.
        scale: the loss scale of the first step.
        window: good steps in a row before the scale doubles.
    """
    params, scales, good_steps = list(model.parameters()), [], 0
    masters = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make_optimizer(masters)
    model.half()
    for inputs, targets in batches:
        scales.append(scale)
        loss = F.mse_loss(model(inputs.half()).float(), targets)
        (loss * scale).backward()
        grads = [param.grad for param in params if param.grad is not None]
        model.zero_grad()
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        overflow = torch.tensor([not finite], device=params[0].device)
        comm.all_reduce(overflow, "max", purpose="control")
        if overflow.item():
            grads.clear()
            scale, good_steps = scale / 2, 0
            continue
        for master in masters:
            master.grad = grads.pop(0).float()
            comm.all_reduce(master.grad, "avg")
            master.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master.data)
        good_steps += 1
        scale = scale * 2 if good_steps % window == 0 else scale
    return scales
