"""Chapter 7: the small runs in fp16 that its checks look at, and what torch makes of the same.

Owns one model of 23 parameters: a tied matrix, sizes that nothing divides, two buckets, and a
bias whose gradient one rank's batch can blow up. `train` runs the engine on it; `alone` is one
process with torch's own `GradScaler`, `clip_grad_norm_` and fp32 master weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device, engine
from ...errors import DeadlockError
from .. import evidence
from ..evidence import weights_of
from ..outcome import Wrong

POISON = 1e6  # times any loss scale more than fp16 holds
TOLERANCE = 2e-3  # of weights around 1 that were rounded to fp16
LR = 0.5


class Pair(nn.Module):
    """tanh of a layer and back through the same matrix: 15 + 3 + 5 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 3)
        self.bias = nn.Parameter(torch.full((5,), 0.25))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, poison: float) -> torch.Tensor:
        """Return the loss in fp32; `poison` is added to the gradient of one element."""
        outputs = torch.tanh(self.first(inputs)) @ self.first.weight + self.bias
        return F.mse_loss(outputs.float(), targets) + poison * self.bias[0].float()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        steps: how many.
        window: good steps before the scale doubles; it begins at 16 and halves at once.
        overflow_at: the step in which the last rank's batch overflows; None for none.
        max_norm: clipping; 0 for none.
        dtype: "fp16" or "fp32".
    """

    steps: int = 4
    window: int = 100
    overflow_at: int | None = None
    max_norm: float = 0.0
    dtype: str = "fp16"

    def config(self, stage: int) -> dict[str, Any]:
        """Return the ds_config.json of the run."""
        fp16 = {"initial_scale_power": 4, "loss_scale_window": self.window, "hysteresis": 1}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 20},
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "gradient_clipping": self.max_norm,
            "fp16": {"enabled": True, **fp16} if self.dtype == "fp16" else {},
        }

    def batch(
        self, rank: int, world_size: int, step: int, home: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return inputs [4, 5], targets [4, 5] and the poison of one rank."""
        luck = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(4, 5, generator=luck)
        bad = step == self.overflow_at and rank == world_size - 1
        targets = torch.randn(4, 5, generator=luck)
        dtype = torch.float16 if self.dtype == "fp16" else torch.float32
        return inputs.to(home, dtype), targets.to(home), POISON if bad else 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What one rank showed, step by step."""

    weights: list[torch.Tensor]  # after each step [23]
    scales: list[float]  # in use in each step
    norms: list[float | None]  # before clipping
    grad_bytes: list[int]  # still held at the end of each step
    skipped: int = 0


def train(plan: Plan, stage: int, world_size: int, world: str | None = None) -> list[Shown]:
    """Train with the engine at stage 0, 1 or 2, on ranks of the check's world or of another.

    Raises:
        Wrong: ranks went separate ways, and then waited for each other.
    """
    try:
        return evidence.run(_train_rank, world_size, plan, stage, world=world)
    except DeadlockError as error:
        raise torn(error, f"Stage {stage} on {world_size} ranks") from None


def torn(error: DeadlockError, where: str) -> Wrong:
    """Return the verdict on ranks that wait for each other: who did what."""
    calls = [f"waits in {row.op}" if row.state == "waiting" else row.state for row in error.table]
    if len(set(calls)) == 1 and calls[0].startswith("waits"):  # elements tell the ranks apart
        calls = [f"waits in {row.detail}" for row in error.table]
    states = "; ".join(f"rank {i} {call}" for i, call in enumerate(calls))
    return Wrong(
        f"{where}: the ranks went separate ways, and wait for each other now: {states}.",
        expected="the same collectives on all ranks",
        observed=states,
        call=where,
    )


def _train_rank(plan: Plan, stage: int) -> Shown:
    home, rank, world_size = evidence.home(), comm.get_rank(), comm.get_world_size()
    model = Pair().to(home)
    trainer, *_ = engine.initialize(model=model, config=plan.config(stage))
    shown = Shown([], [], [], [])
    for step in range(plan.steps):
        shown.scales.append(trainer.loss_scale())
        trainer.backward(trainer(*plan.batch(rank, world_size, step, home)))
        trainer.step()
        shown.weights.append(weights_of(model).float())
        shown.norms.append(trainer.get_global_grad_norm())
        gpu = device.current()
        shown.grad_bytes.append(gpu.by_kind().get("grad", 0) if gpu is not None else 0)
    trainer.close()
    return Shown(shown.weights, shown.scales, shown.norms, shown.grad_bytes, trainer.skipped_steps)


@cache
def alone(plan: Plan, world_size: int) -> Shown:
    """Train in one process on all ranks' batches, with torch alone."""
    model = Pair()
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    mixed = plan.dtype == "fp16"
    model = model.half() if mixed else model
    optimizer = torch.optim.SGD(masters, lr=LR)
    scaler = torch.amp.GradScaler(  # its defaults: doubles, halves, at the first overflow
        "cpu", init_scale=16.0, growth_interval=plan.window, enabled=mixed
    )
    shown = Shown([], [], [], [])
    for step in range(plan.steps):
        shown.scales.append(scaler.get_scale())
        total = [torch.zeros_like(master) for master in masters]
        for rank in range(world_size):
            scaler.scale(model(*plan.batch(rank, world_size, step))).backward()
            _add_grads(total, model)
        for master, sums, param in zip(masters, total, model.parameters(), strict=True):
            master.grad = (sums / world_size).to(param.dtype).float()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(masters, plan.max_norm or float("inf"))
        shown.norms.append(float(norm) if plan.max_norm else None)
        scaler.step(optimizer)
        scaler.update()
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data.copy_(master.data)
        shown.weights.append(weights_of(model).float())
    return shown


def _add_grads(total: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Add a model's gradients to the sums, and clear them."""
    for sums, param in zip(total, model.parameters(), strict=True):
        assert param.grad is not None
        sums += param.grad.float()
        param.grad = None


def compare(plan: Plan, stage: int, world_size: int) -> list[Shown]:
    """Train, and raise `Wrong` where any rank differs from torch alone."""
    ranks, expected = train(plan, stage, world_size), alone(plan, world_size)
    where = f"Stage {stage} on {world_size} ranks"
    for rank, shown in enumerate(ranks):
        _compare_weights(shown, expected, where, rank)
        _compare_scales(shown, expected, where, rank)
        _compare_norms(shown, expected, where, rank)
        for step, held in enumerate(shown.grad_bytes):
            if held:
                raise Wrong(
                    f"{where}: {held} bytes of gradients are still there after step {step + 1}.",
                    expected="0 bytes",
                    observed=f"{held} bytes",
                    call=where,
                    rank=rank,
                )
    return ranks


def _compare_weights(shown: Shown, expected: Shown, where: str, rank: int) -> None:
    before = before_ours = weights_of(Pair()).half().float()
    for step, (ours, theirs) in enumerate(zip(shown.weights, expected.weights, strict=True)):
        moved = (ours - before_ours).abs().max().item()
        should = (theirs - before).abs().max().item()
        if not (ours - theirs).abs().max().item() <= TOLERANCE:
            raise Wrong(
                f"{where}, step {step + 1}: the weights move by up to {moved:.3g}; torch's "
                f"GradScaler in one process moves them by {should:.3g}.",
                expected=f"{should:.3g}",
                observed=f"{moved:.3g}",
                call=where,
                rank=rank,
            )
        before, before_ours = theirs, ours


def _compare_scales(shown: Shown, expected: Shown, where: str, rank: int) -> None:
    if shown.scales != expected.scales:
        raise Wrong(
            f"{where}: the loss scale of the steps is {numbers(shown.scales)}, and torch's "
            f"GradScaler has {numbers(expected.scales)}.",
            expected=numbers(expected.scales),
            observed=numbers(shown.scales),
            call=where,
            rank=rank,
        )


def _compare_norms(shown: Shown, expected: Shown, where: str, rank: int) -> None:
    for step, (ours, theirs) in enumerate(zip(shown.norms, expected.norms, strict=True)):
        true = theirs if theirs is not None and theirs < float("inf") else None  # None: skipped
        if ours is None and true is None:
            continue
        if ours is None or true is None or abs(ours - true) > 1e-3 * true:
            says = f"clip_grad_norm_ in one process says {_norm(true)}"
            if true is None:
                says = "in a step that is skipped, or without clipping, none is computed"
            raise Wrong(
                f"{where}, step {step + 1}: the norm of the answer is {_norm(ours)}; {says}.",
                expected=_norm(true),
                observed=_norm(ours),
                call=where,
                rank=rank,
            )


def _norm(value: float | None) -> str:
    return "None" if value is None else f"{value:.4g}"


def numbers(values: Sequence[float]) -> str:
    """Write numbers in a row, whole ones without a point."""
    return ", ".join(f"{value:g}" for value in values)
