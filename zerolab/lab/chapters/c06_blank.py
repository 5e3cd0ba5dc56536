"""Chapter 6: the check of the empty page: a model of layers whose parameters are sharded.

Owns two models, one of odd sizes and one of sixteen equal layers, and what their ranks show:
weights, bytes at rest and while they train, elements moved. The reference is torch alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device
from ...two_layers import parameter_sharding
from .. import evidence
from ..outcome import Wrong
from . import c06_judging as judging
from . import unit_runs

# 6.1 train_sharded_params

WIDTH, DEPTH, WIDE_RANKS, STEPS = 24, 16, 4, 2
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer
SLICES = DEPTH * LAYER // WIDE_RANKS  # bytes of this rank's slices
DATA = 4096  # bytes for batches, activations and what Python holds on to


@dataclass(frozen=True)
class Blank:
    """What one rank showed."""

    weights: torch.Tensor
    at_rest: int  # bytes held when the optimizer was made, -1 if it never was
    busy: int  # the most bytes held from then until the last optimizer step
    moved: dict[str, int]


def check_train_sharded_params(answer: judging.Answer) -> Iterator[str]:
    """Weights of odd layers, then bytes and traffic of sixteen equal ones."""
    for world_size in (judging.RANKS, 1):
        _check_blank_weights(world_size)
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        yield f"{ranks}: after 3 steps the weights of plain torch"
    shown = evidence.run(_on_rank_blank, WIDE_RANKS, WIDTH, DEPTH, STEPS)
    for rank, one in enumerate(shown):
        _check_blank_bytes(rank, one)
    yield f"at rest {SLICES:,} bytes of slices, and never two layers whole"
    numel = DEPTH * LAYER // 4
    expected = {"all_gather": (2 * STEPS + 1) * numel, "reduce_scatter": STEPS * numel}
    for rank, one in enumerate(shown):
        if one.moved != expected:
            raise Wrong(
                f"{STEPS} steps of {numel:,} parameters move {unit_runs.words(one.moved)}: each "
                "layer is gathered for forward and for backward and reduced once, and gathered "
                "once more at the end.",
                expected=unit_runs.words(expected),
                observed=unit_runs.words(one.moved),
                rank=rank,
                call="train_sharded_params(...)",
            )
    yield "elements moved: 3 a parameter and step, and 1 for the whole model at the end"


def _layers(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(3)
    if depth == 2:  # of odd sizes
        return nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 5))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def _data(rank: int, step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    luck = torch.Generator().manual_seed(77 * step + rank)
    return torch.randn(2, width, generator=luck), torch.randn(2, width, generator=luck)


def _check_blank_weights(world_size: int) -> None:
    model = _layers(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        pairs = [_data(rank, step, 5) for rank in range(world_size)]
        optimizer.zero_grad()
        torch.stack([F.mse_loss(model(x), y) for x, y in pairs]).mean().backward()
        optimizer.step()
    reference = evidence.weights_of(model)
    for rank, one in enumerate(evidence.run(_on_rank_blank, world_size, 5, 2, 3)):
        if one.at_rest < 0:
            raise Wrong(
                "`make_optimizer` was never called: nobody updates the parameters.",
                expected="an optimizer of this rank's slices",
                observed="none",
                rank=rank,
                call="train_sharded_params(...)",
            )
        apart = (one.weights - reference).abs().max().item()
        if not apart <= unit_runs.TOLERANCE:
            raise Wrong(
                f"Two layers on {world_size} ranks: after 3 steps the weights are {apart:.2g} off "
                "those of one process that saw the batches of all ranks.",
                expected=f"at most {unit_runs.TOLERANCE:g}",
                observed=f"{apart:.3g}",
                rank=rank,
                call="train_sharded_params(...)",
            )


def _check_blank_bytes(rank: int, shown: Blank) -> None:
    at_rest = SLICES + LAYER + LAYER // 2
    if shown.at_rest > at_rest:
        raise Wrong(
            f"When the optimizer is made a rank holds {shown.at_rest:,} bytes, where its slices "
            f"of {DEPTH} layers are {SLICES:,} and one layer is {LAYER:,}: somebody still holds "
            "whole layers. A slice that is a view holds all that it was cut from.",
            expected=f"at most {at_rest:,}",
            observed=f"{shown.at_rest:,}",
            rank=rank,
            call="train_sharded_params(...)",
        )
    allowed = 2 * SLICES + 5 * LAYER + DATA
    if shown.busy > allowed:
        raise Wrong(
            f"While it trains a rank holds up to {shown.busy:,} bytes. Its slices with their "
            f"gradients are {2 * SLICES:,}, and one layer with its gradients, laid out and "
            f"padded, a few times {LAYER:,}: so more than one layer was whole.",
            expected=f"at most {allowed:,}",
            observed=f"{shown.busy:,}",
            rank=rank,
            call="train_sharded_params(...)",
        )


def _on_rank_blank(width: int, depth: int, steps: int) -> Blank:
    gpu, model = device.current(), _layers(width, depth).to(evidence.home())
    assert gpu is not None
    whole = sum(param.numel() * 4 for param in model.parameters())
    pairs = [_data(comm.get_rank(), step, width) for step in range(steps)]
    batches = [(x.to(evidence.home()), y.to(evidence.home())) for x, y in pairs]
    before = gpu.allocated_bytes - whole
    held: list[int] = []

    class Watched(torch.optim.SGD):
        """An optimizer that looks at the memory when it steps."""

        def step(self, closure: Any = None) -> Any:
            held.append(gpu.peak_bytes - before)
            return super().step(closure)

    def make_optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        held.append(gpu.allocated_bytes - before)
        gpu.reset_peak()
        return Watched(params, lr=0.1, momentum=0.9 if depth == 2 else 0.0)

    parameter_sharding.train_sharded_params(model, batches, make_optimizer)
    moved = unit_runs.moved(comm.records(), 0)
    return Blank(evidence.weights_of(model), held[0] if held else -1, max(held, default=0), moved)
