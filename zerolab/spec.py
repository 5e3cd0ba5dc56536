"""Chapter 3: the specification. Everything the engine does, slowly, in one process.

Owns nothing and imports nothing of the engine. The collectives work on a list with one tensor
a rank. `train` runs N ranks one after the other on one model, averages their gradients and
steps: what every stage, at every world size and in every world, must equal to the last bit.

Three rules carry that equality:

    sums       in fp32 (fp64 stays), in rank order, divided in fp32, rounded once
    schedule   micro-steps are added up before ("boundary") or after ("micro_step") the mean
    cuts       the optimizer steps on the pieces of parameters that lie in one shard, since a
               vectorised optimizer treats the last elements of a tensor differently

Phases of `train`: backward of every rank, mean, norm, optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# -- collectives over a list with one tensor a rank ----------------------------------------


def reduce(tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Return the sum, average or maximum of one tensor a rank, added in rank order."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tensors[0].to(wide).clone()
    for tensor in tensors[1:]:
        total = torch.maximum(total, tensor.to(wide)) if op == "max" else total + tensor.to(wide)
    if op == "avg":
        total = total / len(tensors)
    return total.to(dtype)


def all_reduce(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Return what each rank holds after an all-reduce: all of it, everywhere."""
    return [reduce(tensors, op) for _ in tensors]


def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Return what each rank holds after a reduce-scatter: its own slice of the result."""
    return list(reduce(tensors, op).reshape(-1).chunk(len(tensors)))


def all_gather(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what each rank holds after an all-gather: all tensors end to end."""
    return [torch.cat([tensor.reshape(-1) for tensor in tensors]) for _ in tensors]


# -- training ------------------------------------------------------------------------------

Grads = dict[str, torch.Tensor]  # a parameter that backward did not reach is missing


@dataclass
class Recipe:
    """How to train.

    Attributes:
        layout: for every bucket the names of its parameters, in the order they lie in it.
        world_size: number of ranks.
        make_optimizer: from a list of tensors to a torch optimizer.
        dtype: dtype of the parameters in forward and backward.
        mixed: keep fp32 master weights beside them.
        schedule: "boundary" or "micro_step".
        max_norm: largest global norm of the gradients; 0 for no clipping.
    """

    layout: list[list[str]]
    world_size: int
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    schedule: str = "boundary"
    max_norm: float = 0.0


@dataclass
class Outcome:
    """What training gave: one loss and one norm a step, and the parameters at the end."""

    losses: list[float]
    norms: list[float]
    params: dict[str, torch.Tensor]


def train(model: nn.Module, data: list[list[list[tuple]]], recipe: Recipe) -> Outcome:
    """Train `model` in place.

    Args:
        model: its forward returns a loss; parameters in fp32, or in `recipe.dtype`.
        data: `data[step][micro_step][rank]` are the arguments of one forward.
        recipe: everything else.

    Returns:
        Losses (fp64 mean over ranks, of the last micro-step), norms, parameters.
    """
    params = dict(model.named_parameters())
    master = Master(params, recipe)
    losses, norms = [], []
    for micro_steps in data:
        loss, grads = _gradients(model, params, micro_steps, recipe)
        norms.append(float(_norm(grads)))
        if recipe.max_norm:
            factor = (
                recipe.max_norm / (torch.tensor(norms[-1], dtype=torch.float64) + 1e-6)
            ).clamp(max=1)
            grads = {name: grad.float() * factor.float() for name, grad in grads.items()}
        master.step(grads)
        losses.append(loss)
    return Outcome(losses, norms, {name: p.detach().clone() for name, p in params.items()})


def _gradients(
    model: nn.Module, params: dict[str, Any], micro_steps: list[list[tuple]], recipe: Recipe
) -> tuple[float, Grads]:
    """Return the loss of the last micro-step and the mean gradient of the whole step."""
    ranks = range(recipe.world_size)
    local: list[Grads] = [{} for _ in ranks]
    total: Grads = {}
    loss = 0.0
    for micro_step in micro_steps:
        found = [_backward(model, params, micro_step[r], len(micro_steps)) for r in ranks]
        loss = sum(float(value) for value, _ in found) / recipe.world_size
        if recipe.schedule == "micro_step":
            _add(total, _mean([grads for _, grads in found]))
        else:
            for mine, (_, grads) in zip(local, found, strict=True):
                _add(mine, grads)
    return loss, total if recipe.schedule == "micro_step" else _mean(local)


def _backward(
    model: nn.Module, params: dict[str, Any], args: tuple, accum_steps: int
) -> tuple[torch.Tensor, Grads]:
    """Return one rank's loss and gradients of one micro-step."""
    loss = model(*args)
    (loss * (1 / accum_steps)).backward()
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    for param in params.values():
        param.grad = None
    return loss.detach(), grads


def _add(total: Grads, grads: Grads) -> None:
    for name, grad in grads.items():
        total[name] = total[name] + grad if name in total else grad


def _mean(ranks: list[Grads]) -> Grads:
    """Average over ranks; who did not use a parameter that others used counts as zero."""
    names = [name for grads in ranks for name in grads]
    example = {name: grad for grads in ranks for name, grad in grads.items()}
    zero = {name: torch.zeros_like(grad) for name, grad in example.items()}
    return {
        name: reduce([grads.get(name, zero[name]) for grads in ranks], "avg")
        for name in dict.fromkeys(names)
    }


def _norm(grads: Grads) -> torch.Tensor:
    squares = [grad.double().square().sum() for grad in grads.values()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


class Master:
    """The values the optimizer updates, cut where shards are cut."""

    def __init__(self, params: dict[str, Any], recipe: Recipe) -> None:
        """Copy the parameters, round the model's own, cut the copy."""
        self.params, self.recipe = params, recipe
        wide = {
            name: p.detach().float() if recipe.mixed else p.detach() for name, p in params.items()
        }
        self.values = {name: value.clone().reshape(-1) for name, value in wide.items()}
        for param in params.values():
            param.data = param.data.to(recipe.dtype)
        self.pieces = [
            (name, start, nn.Parameter(self.values[name][start:stop]))
            for bucket in recipe.layout
            for name, start, stop in self._cuts(bucket)
        ]
        self.optimizer = recipe.make_optimizer([piece for _, _, piece in self.pieces])

    def _cuts(self, bucket: list[str]) -> list[tuple[str, int, int]]:
        """Return (name, start, stop) of every piece of a parameter that lies in one shard."""
        owner = []  # for every element of the bucket: which parameter, which element of it
        for name in bucket:
            owner += [(name, element) for element in range(self.values[name].numel())]
        shard_numel = (len(owner) + self.recipe.world_size - 1) // self.recipe.world_size
        pieces: list[tuple[str, int, int]] = []
        for position, (name, element) in enumerate(owner):
            if element == 0 or position % shard_numel == 0:
                pieces.append((name, element, element + 1))
            else:
                pieces[-1] = (name, pieces[-1][1], element + 1)
        return pieces

    @torch.no_grad()
    def step(self, grads: Grads) -> None:
        """Step on every piece that has a gradient and round the result into the model."""
        for name, start, piece in self.pieces:
            if name in grads:
                piece.grad = grads[name].to(piece.dtype).reshape(-1)[start : start + piece.numel()]
        self.optimizer.step()
        for _, _, piece in self.pieces:
            piece.grad = None
        for name, param in self.params.items():
            param.copy_(self.values[name].view(param.shape))
