"""Chapter 7: the check of its blank page: a training loop in fp16, written by hand.

Owns the small data on which fp16 alone fails: gradients that vanish, weights whose changes are
below half a unit, and one batch on one rank that overflows. The reference is torch's GradScaler
in one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device
from ...errors import DeadlockError
from ...two_layers import mixed_precision
from .. import evidence
from ..outcome import Wrong
from . import c07_runs as runs

Function = Callable[..., Any]

SCALE, WINDOW, STEPS, RANKS = 2.0**14, 2, 6, 4
BAD_STEP = 2  # the last rank's batch overflows


def two_layers() -> nn.Module:
    """Return 8 -> 16 -> 4 with a first layer so small that fp16 alone would lose its changes."""
    torch.manual_seed(7)
    first = nn.Linear(8, 16)
    with torch.no_grad():
        first.weight.mul_(0.01)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 4))


def small_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [4, 8] and targets [4, 4] of one rank; one batch overflows in fp16."""
    luck = torch.Generator().manual_seed(1000 + 100 * step + rank)
    bad = step == BAD_STEP and rank == RANKS - 1
    inputs = 3e-5 * torch.randn(4, 8, generator=luck)
    return inputs, torch.randn(4, 4, generator=luck) * (1e9 if bad else 1e-2)


@dataclass(slots=True)
class ByHand:
    """What one rank showed of a training loop written by hand."""

    scales: list[float]
    masters: list[torch.Tensor]  # as the optimizer left them
    held: list[int]  # bytes between two steps, batches aside
    sent: frozenset[str] = frozenset()  # the dtypes in which gradients travelled


def sgd(tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the loop."""
    return torch.optim.SGD(tensors, lr=0.5)


def check_train_mixed_precision(answer: Function) -> Iterator[str]:
    """Scales and master weights against GradScaler in one process; bytes between two steps."""
    try:
        ranks = evidence.run(_by_hand_rank, RANKS)
    except DeadlockError as error:
        raise runs.torn(error, f"{RANKS} ranks, an overflow on one of them") from None
    expected = by_hand_alone()
    for rank, shown in enumerate(ranks):
        _check_masters_are_fp32(shown, rank)
        _check_finite(shown, rank)
        _check_scales(shown, expected, rank)
    yield f"scales {runs.numbers(expected.scales)}: all ranks skipped the step that broke on one"
    for rank, shown in enumerate(ranks):
        _check_moved(shown, expected, rank)
        _check_sent(shown, rank)
    yield f"after {STEPS} steps the master weights of torch's GradScaler in one process"
    yield _check_held(ranks)


def _by_hand_rank() -> ByHand:
    """Run the learner's loop on one rank, and look at it between steps."""
    home, gpu, rank = evidence.home(), device.current(), comm.get_rank()
    assert gpu is not None
    model = two_layers().to(home)
    batches = []
    for step in range(STEPS):
        inputs, targets = small_batch(rank, step)
        batches.append((inputs.to(home), targets.to(home)))
    given = sum(tensor.nbytes for batch in batches for tensor in batch)
    shown = ByHand([], [], [])

    def stream() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step, batch in enumerate(batches):
            if step:
                shown.held.append(gpu.allocated_bytes - given)
            yield batch

    def keep(tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        shown.masters = list(tensors)
        return sgd(shown.masters)

    shown.scales = mixed_precision.train_mixed_precision(model, stream(), keep, SCALE, WINDOW)
    shown.masters = [master.detach().clone().cpu() for master in shown.masters]
    events = comm.records().collectives
    shown.sent = frozenset(event.dtype for event in events if event.purpose == "data")
    return shown


@cache
def by_hand_alone() -> ByHand:
    """Do the same in one process, with torch's GradScaler."""
    model = two_layers()
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    optimizer = sgd(masters)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=WINDOW)
    model.half()
    scales = []
    for step in range(STEPS):
        scales.append(scaler.get_scale())
        total = [torch.zeros_like(master) for master in masters]
        for rank in range(RANKS):
            inputs, targets = small_batch(rank, step)
            scaler.scale(F.mse_loss(model(inputs.half()).float(), targets)).backward()
            for sums, param in zip(total, model.parameters(), strict=True):
                assert param.grad is not None
                sums += param.grad.float()
                param.grad = None
        for master, sums in zip(masters, total, strict=True):
            master.grad = sums / RANKS
        scaler.step(optimizer)
        scaler.update()
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data.copy_(master.data)
    return ByHand(scales, [master.detach() for master in masters], [])


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
BY_HAND = f"train_mixed_precision(..., scale={SCALE:g}, window={WINDOW})"


def _check_masters_are_fp32(shown: ByHand, rank: int) -> None:
    dtypes = [str(master.dtype) for master in shown.masters]
    if dtypes != ["torch.float32"] * len(NAMES):
        raise Wrong(
            "The optimizer must get one fp32 master weight for each of the model's parameters.",
            expected="4 tensors of torch.float32",
            observed=", ".join(dtypes) or "none: make_optimizer was not called",
            call=BY_HAND,
            rank=rank,
        )


def _check_finite(shown: ByHand, rank: int) -> None:
    for name, master in zip(NAMES, shown.masters, strict=True):
        if not bool(master.isfinite().all()):
            raise Wrong(
                f"{name} is not finite any more: the step with the infinite gradient was made.",
                expected="finite weights",
                observed=f"{master.flatten()[0].item()}",
                call=BY_HAND,
                rank=rank,
            )


def _check_scales(shown: ByHand, expected: ByHand, rank: int) -> None:
    if not isinstance(shown.scales, list) or len(shown.scales) != STEPS:
        raise Wrong(
            "It must return a list with the scale of every step.",
            expected=runs.numbers(expected.scales),
            observed=shown.scales,
            call=BY_HAND,
            rank=rank,
        )
    if shown.scales != expected.scales:
        raise Wrong(
            f"Rank {rank} used the scales {runs.numbers(shown.scales)}; torch's GradScaler uses "
            f"{runs.numbers(expected.scales)}. Step {BAD_STEP + 1} overflows on rank {RANKS - 1}.",
            expected=runs.numbers(expected.scales),
            observed=runs.numbers(shown.scales),
            call=BY_HAND,
            rank=rank,
        )


def _check_moved(shown: ByHand, expected: ByHand, rank: int) -> None:
    start = [param.detach() for param in two_layers().parameters()]
    rows = zip(NAMES, start, shown.masters, expected.masters, strict=True)
    for name, first, ours, theirs in rows:
        should, moved = ((x - first).abs().max().item() for x in (theirs, ours))
        apart = (ours - theirs).abs().max().item() / should
        if not apart <= 0.02:
            raise Wrong(
                f"After {STEPS} steps {name} has moved by up to {moved:.3g} and is {apart:.0%} of "
                f"the way off: torch's GradScaler in one process moves it by {should:.3g}.",
                expected=f"{should:.3g}, element by element",
                observed=f"{moved:.3g}, {apart:.1%} off",
                call=BY_HAND,
                rank=rank,
            )


def _check_sent(shown: ByHand, rank: int) -> None:
    if "float16" in shown.sent:
        raise Wrong(
            "The gradients travel in fp16: their mean is rounded again, and a sum of large ones "
            "would be infinite.",
            expected="averaged in fp32",
            observed="float16 on the wire",
            call=BY_HAND,
            rank=rank,
        )


def _check_held(ranks: list[ByHand]) -> str:
    numels = [param.numel() for param in two_layers().parameters()]
    rule = 6 * sum(numels)
    most = rule + 4 * max(numels)  # whatever a loop variable still holds of one parameter
    for rank, shown in enumerate(ranks):
        held = max(shown.held, default=0)
        if held > most:
            raise Wrong(
                f"Between two steps rank {rank} holds {held} bytes. 2 bytes for the parameter and "
                f"4 for its master are {rule}. What a variable of yours still names counts too: a "
                "list of gradients, or a loss, lives until `del`.",
                expected=f"{rule} bytes, and one gradient at most",
                observed=f"{held} bytes",
                call=BY_HAND,
                rank=rank,
            )
    return f"bytes held between two steps: 6 a parameter, {rule} in all, and no gradients"
