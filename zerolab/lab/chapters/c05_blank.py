"""Chapter 5: the check of the empty page: layers trained with sharded gradients.

Owns two models, two layers of 740 parameters and twelve of 600 each, and what their ranks show:
weights, the bytes between two steps and at the peak of a step, elements moved. The steps are a
generator that looks at the ledger each time it is asked for the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device
from ...two_layers import gradient_sharding
from .. import evidence
from ..outcome import Wrong
from .stage_runs import STEPS, TOLERANCE

Function = Callable[..., Any]
Pair = tuple[torch.Tensor, torch.Tensor]
CALL = "train_sharded_gradients(model, steps, make_optimizer)"
LAYERS, WIDTH = 12, 24
LARGEST = WIDTH * WIDTH  # elements of the largest parameter of the deep model
SLACK = 6000  # bytes: activations of one sample, the loss, counters


@dataclass(frozen=True, slots=True)
class Page:
    """What a rank is told: which model, which optimizer, how many micro-batches a step."""

    world_size: int
    optimizer: str = "AdamW"
    accum_steps: int = 1
    deep: bool = False
    steps: int = STEPS

    def model(self) -> nn.Module:
        """Return the model, the same numbers each time."""
        torch.manual_seed(5)
        if self.deep:
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        return nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 9))

    def batch(self, rank: int, number: int) -> Pair:
        """Return inputs and targets of one rank: a sample of the deep model, four of the other."""
        luck = torch.Generator().manual_seed(700 + 70 * number + rank)
        rows, into, out = (1, WIDTH, WIDTH) if self.deep else (4, 33, 9)
        return torch.randn(rows, into, generator=luck), torch.randn(rows, out, generator=luck)

    def make_optimizer(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer. With this eps Adam tells a sum of gradients from their mean."""
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(params, lr=0.05, eps=0.1, weight_decay=0.1)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def describe(self) -> str:
        """Say in a few words what was run."""
        micro = f", {self.accum_steps} micro-batches" if self.accum_steps > 1 else ""
        return f"{self.optimizer} on {self.world_size} ranks{micro}"


@dataclass(slots=True)
class Blank:
    """What one rank showed when it trained on the learner's page."""

    rank: int
    weights: torch.Tensor
    held: list[int]  # bytes before every step and after the last
    peaks: list[int]  # the most bytes within each step
    given: int  # elements handed to the optimizer
    moved: dict[str, int]  # elements of a step


def _train(page: Page) -> Blank:
    model, gpu = page.model().to(evidence.home()), device.current()
    assert gpu is not None
    held: list[int] = []
    peaks: list[int] = []
    given: list[int] = []

    def steps() -> Iterator[list[Pair]]:
        for step in range(page.steps):
            held.append(gpu.allocated_bytes)
            first = step * page.accum_steps
            with device.paused():
                micro_batches = [
                    _here(page, number) for number in range(first, first + page.accum_steps)
                ]
            gpu.reset_peak()
            yield micro_batches
            peaks.append(gpu.peak_bytes)
            del micro_batches
        held.append(gpu.allocated_bytes)

    def make(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        given.extend(param.numel() for param in params)
        return page.make_optimizer(params)

    gradient_sharding.train_sharded_gradients(model, steps(), make)
    moved: dict[str, int] = {}
    for event in comm.records().collectives:
        moved[event.op] = moved.get(event.op, 0) + event.elements
    moved = {op: round(elements / page.steps) for op, elements in moved.items()}
    return Blank(comm.get_rank(), evidence.weights_of(model), held, peaks, sum(given), moved)


def _here(page: Page, number: int) -> Pair:
    inputs, targets = page.batch(comm.get_rank(), number)
    return inputs.to(evidence.home()), targets.to(evidence.home())


def run(page: Page, world: str | None = None) -> list[Blank]:
    """Train on whatever stands for `train_sharded_gradients` at the moment."""
    return evidence.run(_train, page.world_size, page, world=world)


def alone(page: Page) -> torch.Tensor:
    """Train in one process with torch alone, on the micro-batches of all ranks."""
    model = page.model()
    optimizer = page.make_optimizer(list(model.parameters()))
    for step in range(page.steps):
        numbers = range(step * page.accum_steps, (step + 1) * page.accum_steps)
        pairs = [page.batch(rank, n) for n in numbers for rank in range(page.world_size)]
        optimizer.zero_grad()
        losses = [F.mse_loss(model(inputs), targets) for inputs, targets in pairs]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return evidence.weights_of(model)


def check_train_sharded_gradients(answer: Function) -> Iterator[str]:
    """Weights with and without accumulation, traffic, and the peak of a deep model."""
    page = Page(4)
    yield _check_weights(page, run(page))
    page = Page(3, "SGD", accum_steps=3)
    ranks = run(page)
    yield _check_weights(page, ranks)
    _check_traffic(page, ranks[0])
    said = ", ".join(f"{op} {elements}" for op, elements in ranks[0].moved.items())
    yield f"elements moved in a step of 3 micro-batches: {said}"
    page = Page(3, deep=True, steps=2)
    for shown in run(page):
        _check_peak(page, shown)
    yield f"bytes: {LAYERS} layers, and never more gradients than of two parameters and a slice"


def _check_weights(page: Page, ranks: list[Blank]) -> str:
    what, reference = f"{page.describe()}: after {page.steps} steps the weights", alone(page)
    for shown in ranks:
        apart = (shown.weights - reference).abs().max().item()
        if not apart <= TOLERANCE:
            raise Wrong(
                f"{what} are {apart:.3g} off those of one process that saw the micro-batches of "
                "all ranks.",
                expected=f"at most {TOLERANCE:g}",
                observed=f"{apart:.3g}",
                rank=shown.rank,
                call=CALL,
            )
    return f"{what} of one process"


def _check_traffic(page: Page, shown: Blank) -> None:
    numel, passes = len(shown.weights), page.accum_steps + 1
    moved = sum(n * (2 if op == "all_reduce" else 1) for op, n in shown.moved.items())
    allowed = passes * (numel + 4 * page.world_size)
    if moved > allowed:
        said = ", ".join(f"{op} {elements}" for op, elements in shown.moved.items())
        raise Wrong(
            f"A step of {page.accum_steps} micro-batches moves {said}: {moved / numel:.1f} for "
            f"each of {numel} parameters, where {passes} are enough.",
            expected=f"{passes} for each parameter, padding aside",
            observed=f"{moved / numel:.1f}",
            rank=shown.rank,
            call=CALL,
        )


def _check_peak(page: Page, shown: Blank) -> None:
    """What a step adds to what is held between steps; then what is held between steps."""
    params = list(page.model().parameters())
    own = sum(-(-param.numel() // page.world_size) for param in params)
    allowed = 4 * (own + 3 * LARGEST) + SLACK
    grew = max(peak - before for peak, before in zip(shown.peaks[1:], shown.held[1:], strict=False))
    if grew > allowed:
        raise Wrong(
            f"In a step of {LAYERS} layers a rank holds {grew} bytes more than before it. The own "
            f"slices of all gradients, two whole ones on their way and activations are {allowed}.",
            expected=f"at most {allowed}",
            observed=grew,
            rank=shown.rank,
            call=CALL,
        )
    whole = 4 * sum(-(-p.numel() // page.world_size) * page.world_size for p in params)
    between = whole + 12 * own  # the slice itself, if it is a copy, and two averages
    if max(shown.held[1:]) > between + SLACK:
        raise Wrong(
            f"Between two steps a rank holds {max(shown.held[1:])} bytes; parameters, a copy of "
            f"the own slices and two averages for each are {between}. A variable that still names "
            "a gradient or a full buffer keeps it.",
            expected=f"at most {between + SLACK}",
            observed=max(shown.held[1:]),
            rank=shown.rank,
            call=CALL,
        )


def left_behind(world_size: int) -> str:
    """Return in a line what two layers leave, trained with two micro-batches a step: a hunt."""
    ranks = run(Page(world_size, "SGD", 2), world="lockstep")
    moved = ", ".join(f"{op} {elements}" for op, elements in ranks[0].moved.items())
    sums = ", ".join(f"{shown.weights.sum().item():.4f}" for shown in ranks)
    right = alone(Page(world_size, "SGD", 2)).sum().item()
    return f"elements moved a step: {moved}; sum of the weights {sums} (one process: {right:.4f})"
