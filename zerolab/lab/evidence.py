"""Chapter 0: evidence, what a check can look at beside return values.

Owns one small model that every engine check trains: odd sizes, three steps, other data on
every rank. `train_tiny` runs the engine on it and hands back weights, bytes held and elements
moved; `train_tiny_alone` is plain torch in one process with the global batch, the reference.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm, engine
from ..records import CollectiveEvent

STEPS = 3
TOLERANCE = 1e-5
SIZES = (5, 3, 2)  # widths of the model: 5*3 + 3 + 3*2 + 2 = 26 parameters in 4 tensors
OPTIMIZER = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True, slots=True)
class TinyRank:
    """What one rank showed."""

    weights: torch.Tensor  # [26]
    optimizer_bytes: int
    moved: dict[str, int]  # elements by collective, in the last step
    losses: tuple[float, ...]  # of its own batches


def tiny_model() -> nn.Module:
    """Return the model, the same numbers each time."""
    torch.manual_seed(7)
    first, second = nn.Linear(SIZES[0], SIZES[1]), nn.Linear(SIZES[1], SIZES[2])
    return nn.Sequential(first, nn.Tanh(), second)


def tiny_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 5] and targets [4, 2] of one rank."""
    luck = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, SIZES[0], generator=luck), torch.randn(4, SIZES[2], generator=luck)


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return all parameters end to end."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).clone()


def train_tiny(stage: int, world_size: int) -> list[TinyRank]:
    """Train the tiny model with the engine, on lockstep ranks, at stage 0, 1 or 2."""
    return comm.run(_tiny_rank, world_size, "lockstep", args=(stage,))


def _tiny_rank(stage: int) -> TinyRank:
    model = tiny_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
    }
    trainer, *_ = engine.initialize(model=model, config=config)
    first_call, losses = 0, []
    for step in range(STEPS):
        first_call = len(comm.records().collectives)
        inputs, targets = tiny_batch(comm.get_rank(), step)
        loss = trainer.backward(F.mse_loss(trainer(inputs), targets))
        losses.append(float(loss.detach()))
        trainer.step()
    moved = _moved(comm.records().collectives[first_call:])
    held = trainer.state_bytes()["optimizer"]
    trainer.close()
    return TinyRank(weights_of(model), held, moved, tuple(losses))


def _moved(events: list[CollectiveEvent]) -> dict[str, int]:
    moved: dict[str, int] = {}
    for event in events:
        if event.purpose == "data":
            moved[event.op] = moved.get(event.op, 0) + event.elements
    return moved


def train_tiny_alone(world_size: int) -> torch.Tensor:
    """Train in one process on the global batch with torch alone; returns the weights [26]."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        batches = [tiny_batch(rank, step) for rank in range(world_size)]
        losses = [F.mse_loss(model(inputs), targets) for inputs, targets in batches]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return weights_of(model)
