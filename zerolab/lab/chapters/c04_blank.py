"""Chapter 4: the check of the empty page: two layers trained with a sharded optimizer.

Owns a model of 740 parameters and what its ranks show: weights, the bytes between two steps, what
the optimizer was given, elements moved. The batches are a generator that looks at the ledger
each time it is asked for the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device
from ...two_layers import optimizer_sharding
from .. import evidence
from ..outcome import Wrong
from .stage_runs import STEPS, TOLERANCE

Function = Callable[..., Any]
WIDE = (33, 17, 9)
LAYERS_NUMEL = 33 * 17 + 17 + 17 * 9 + 9
SLACK = 512  # bytes: counters, the loss and what it came from
CALL = "train_sharded_optimizer(model, batches, make_optimizer)"


@dataclass(slots=True)
class Blank:
    """What one rank showed when it trained two layers on the learner's page."""

    rank: int
    weights: torch.Tensor
    held: list[int]  # bytes before every step and after the last
    given: int  # elements handed to the optimizer
    moved: dict[str, int]  # elements of a step


def two_layers() -> nn.Module:
    """Return the model, the same numbers each time."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(*WIDE[:2]), nn.Tanh(), nn.Linear(*WIDE[1:]))


def layers_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 33] and targets [4, 9] of one rank."""
    luck = torch.Generator().manual_seed(500 + 50 * step + rank)
    return torch.randn(4, WIDE[0], generator=luck), torch.randn(4, WIDE[2], generator=luck)


def make_optimizer(name: str, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer. With this eps Adam tells a sum of gradients from their mean."""
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=0.05, eps=0.1, weight_decay=0.1)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _train_blank(name: str) -> Blank:
    model, gpu = two_layers().to(evidence.home()), device.current()
    assert gpu is not None
    held: list[int] = []
    given: list[int] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(STEPS):
            held.append(gpu.allocated_bytes)
            with device.paused():
                inputs, targets = layers_batch(comm.get_rank(), step)
                inputs, targets = inputs.to(evidence.home()), targets.to(evidence.home())
            yield inputs, targets
            del inputs, targets
        held.append(gpu.allocated_bytes)

    def make(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        given.extend(param.numel() for param in params)
        return make_optimizer(name, params)

    optimizer_sharding.train_sharded_optimizer(model, batches(), make)
    total: dict[str, int] = {}
    for event in comm.records().collectives:
        total[event.op] = total.get(event.op, 0) + event.elements
    moved = {op: round(elements / STEPS) for op, elements in total.items()}
    return Blank(comm.get_rank(), evidence.weights_of(model), held, sum(given), moved)


def check_train_sharded_optimizer(answer: Function) -> Iterator[str]:
    """Weights, bytes between two steps, elements moved, on two layers of 740 parameters."""
    for world_size, name in ((3, "AdamW"), (4, "SGD")):
        ranks = evidence.run(_train_blank, world_size, name)
        _check_blank_weights(ranks, name)
        yield f"{name} on {world_size} ranks: after {STEPS} steps the weights of one process"
    ranks = evidence.run(_train_blank, 4, "AdamW")
    for shown in ranks:
        _check_blank_bytes(shown, len(ranks))
    yield f"bytes: the optimizer of every rank has {ranks[0].given} of {LAYERS_NUMEL} parameters"
    _check_blank_traffic(ranks[0], len(ranks))
    said = ", ".join(f"{op} {elements}" for op, elements in ranks[0].moved.items())
    yield f"elements moved in a step: {said}"


def _check_blank_weights(ranks: list[Blank], name: str) -> None:
    model = two_layers()
    optimizer = make_optimizer(name, list(model.parameters()))
    for step in range(STEPS):
        pairs = [layers_batch(rank, step) for rank in range(len(ranks))]
        losses = [F.mse_loss(model(inputs), targets) for inputs, targets in pairs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    reference = evidence.weights_of(model)
    for shown in ranks:
        apart = (shown.weights - reference).abs().max().item()
        if not apart <= TOLERANCE:
            raise Wrong(
                f"{name} on {len(ranks)} ranks: after {STEPS} steps the weights are {apart:.2g} "
                "off those of one process that saw the batches of all ranks.",
                expected=f"at most {TOLERANCE:g}",
                observed=f"{apart:.3g}",
                rank=shown.rank,
                call=CALL,
            )


def _check_blank_bytes(shown: Blank, world_size: int) -> None:
    """What the optimizer was given, then what is held between two steps."""
    shard = len(range(0, LAYERS_NUMEL, world_size))
    if not 0 < shown.given <= shard:
        raise Wrong(
            f"The optimizer of rank {shown.rank} was given {shown.given} elements; a slice of "
            f"{LAYERS_NUMEL} on {world_size} ranks has {shard}.",
            expected=shard,
            observed=shown.given,
            rank=shown.rank,
            call=CALL,
        )
    allowed = 4 * shard * world_size + 12 * shard + SLACK
    if max(shown.held[1:]) > allowed:
        raise Wrong(
            f"Between two steps a rank holds {max(shown.held[1:])} bytes. Parameters, a slice of "
            f"{shard} elements with two averages and a little more are {allowed}. A variable that "
            "still names a full buffer keeps it.",
            expected=f"at most {allowed}",
            observed=max(shown.held[1:]),
            rank=shown.rank,
            call=CALL,
        )


def _check_blank_traffic(shown: Blank, world_size: int) -> None:
    passes = sum(n * (2 if op == "all_reduce" else 1) for op, n in shown.moved.items())
    if passes > 2 * (LAYERS_NUMEL + 4 * world_size):
        said = ", ".join(f"{op} {elements}" for op, elements in shown.moved.items())
        raise Wrong(
            f"A step moves {said}: with an all-reduce counted twice {passes} elements, "
            f"{passes / LAYERS_NUMEL:.1f} for each of {LAYERS_NUMEL} parameters.",
            expected="2 for each parameter, padding aside",
            observed=f"{passes / LAYERS_NUMEL:.1f}",
            rank=shown.rank,
            call=CALL,
        )
