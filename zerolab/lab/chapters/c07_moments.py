"""Chapter 7: the checks of its moments: global_norm, LossScaler, run_step.

Owns nine stories of a loss scale as rows of numbers. Otherwise the references are fp64 sums over
whole gradients and torch alone (`c07_runs`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import bucket as buckets_
from ... import comm, engine, precision, utils
from ...errors import DeadlockError, UsageError
from .. import evidence
from ..evidence import weights_of
from ..outcome import Wrong
from . import c07_runs as runs

Function = Callable[..., Any]


# 7.4 global_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """What one rank said about its gradients, and what is true."""

    said: float
    true: float
    without_bias: float
    true_without_bias: float
    events: int
    purposes: frozenset[str]
    touched: str = ""  # what of its arguments it has changed


def check_global_norm(answer: Function) -> Iterator[str]:
    """Stages 0 to 3 on 1, 3 and 4 ranks against fp64 sums and clip_grad_norm_."""
    _check_norms(0, 1)
    yield "one rank: the norm of whole gradients, twelve digits of it"
    for world_size, stages in ((3, (0, 1, 2, 3)), (4, (0, 2))):
        said = {stage: _check_norms(stage, world_size) for stage in stages}
        _check_same_bits(said, world_size)
    yield "stages 0 to 3 on 3 ranks, 0 and 2 on 4: all say the same, to the last bit"
    for stage, world_size in ((0, 2), (2, 4)):
        runs.compare(runs.Plan(steps=3, max_norm=0.25), stage, world_size)
    yield "with clipping at 0.25: the weights and norms of clip_grad_norm_ in one process"


def _norm_rank(stage: int) -> Norm:
    plan, rank, world_size = runs.Plan(dtype="fp32"), comm.get_rank(), comm.get_world_size()
    model = runs.Pair().to(evidence.home())
    trainer, *_ = engine.initialize(model=model, config=plan.config(stage))
    trainer.backward(trainer(*plan.batch(rank, world_size, 0, evidence.home())))
    grads = {name: _whole_grad(param) for name, param in model.named_parameters()}
    rest = [grad for name, grad in grads.items() if name != "bias"]
    buckets = trainer.sharding.trainable
    first = len(comm.records().collectives)
    said, touched = _said_of(buckets, {bucket: set() for bucket in buckets})
    events = comm.records().collectives[first:]
    fewer = said
    if not touched:
        fewer, touched = _said_of(buckets, {b: _bias_in(b) for b in buckets})
    trainer.close()
    return Norm(
        _number(said),
        torch.cat(list(grads.values())).norm().item(),
        _number(fewer),
        torch.cat(rest).norm().item(),
        len(events),
        frozenset(event.purpose for event in events),
        touched,
    )


def _said_of(
    buckets: Sequence[buckets_.Bucket], unused: dict[buckets_.Bucket, set[int]]
) -> tuple[Any, str]:
    """Return what the answer says, and which of its arguments it has changed: "" for none."""
    before = [(bucket, _look_of(bucket)) for bucket in buckets]
    given, left_out = list(buckets), {bucket: set(found) for bucket, found in unused.items()}
    said = precision.global_norm(given, left_out)
    for bucket, look in before:
        if _look_of(bucket) != look:
            return said, f"the gradients of {bucket.name}"
    if left_out != unused:
        return said, "`unused`"
    return said, "" if given == list(buckets) else "`buckets`"


def _look_of(bucket: buckets_.Bucket) -> tuple[Any, ...]:
    """Describe a bucket's gradients so that a change is seen."""
    grads = None if bucket.reduced is None else bucket.reduced.tolist()
    return id(bucket.reduced), grads, bucket.state, len(bucket.segments)


def _whole_grad(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's reduced gradient [numel] in fp64, from whoever holds it."""
    grad = utils.safe_get_full_grad(param)
    assert grad is not None
    return grad.double().flatten()


def _bias_in(bucket: buckets_.Bucket) -> set[int]:
    return {i for i, slot in enumerate(bucket.slots) if slot.name == "bias"}


def _number(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype != torch.float64:
        raise Wrong(
            "It must return a 0-dim fp64 tensor.",
            expected="0-dim float64",
            observed=f"{value!r}",
            call="global_norm(buckets, unused)",
        )
    return value.item()


def _norms(stage: int, world_size: int) -> list[Norm]:
    try:
        return evidence.run(_norm_rank, world_size, stage)
    except DeadlockError as error:
        raise runs.torn(error, f"The norm at stage {stage} on {world_size} ranks") from None


def _check_norms(stage: int, world_size: int) -> float:
    """Compare what every rank says with the truth; return what rank 0 said."""
    where = f"Stage {stage} on {world_size} rank{'s' * (world_size > 1)}"
    norms = _norms(stage, world_size)
    for rank, norm in enumerate(norms):
        _check_untouched(norm, where, rank)
        for said, true, what in (
            (norm.said, norm.true, "the norm of all gradients"),
            (norm.without_bias, norm.true_without_bias, "the norm without the unused bias"),
        ):
            if not abs(said - true) <= 1e-12 * true:
                raise Wrong(
                    f"{where}: rank {rank} says that {what} is {said:.12g}; it is {true:.12g}.",
                    expected=f"{true:.15g}",
                    observed=f"{said:.15g}",
                    call="global_norm(buckets, unused)",
                    rank=rank,
                )
        if norm.events > 1 or norm.purposes - {"control"}:
            purposes = ", ".join(sorted(norm.purposes))
            raise Wrong(
                f"{where}: {norm.events} collectives ({purposes}) for two buckets; one of control "
                "traffic is enough.",
                expected="at most 1 collective, control",
                observed=f"{norm.events}, {purposes}",
                call="global_norm(buckets, unused)",
                rank=rank,
            )
    return norms[0].said


def _check_untouched(norm: Norm, where: str, rank: int) -> None:
    if norm.touched:
        raise Wrong(
            f"{where}: after the call rank {rank} does not find {norm.touched} as before. A norm "
            "looks at gradients; the optimizer still needs them.",
            expected="the arguments as they were",
            observed=f"changed: {norm.touched}",
            call="global_norm(buckets, unused)",
            rank=rank,
        )


def _check_same_bits(said: dict[int, float], world_size: int) -> None:
    for stage, norm in said.items():
        if norm != said[0]:
            raise Wrong(
                f"On {world_size} ranks stages 0 and {stage} disagree in the norm's last bits, "
                "and so will their weights.",
                expected=repr(said[0]),
                observed=repr(norm),
                call="global_norm(buckets, unused)",
            )


# 7.6 LossScaler

GOOD, BAD = False, True
STORIES = (  # arguments of LossScaler, what happens, the scale in use at each step
    ((64.0, True, 100, 1.0, 1), (BAD, GOOD, BAD, GOOD), (64, 32, 32, 16)),
    ((8.0, True, 2, 1.0, 1), (GOOD,) * 6, (8, 8, 16, 16, 32, 32)),
    ((8.0, True, 3, 1.0, 1), (GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD), (8, 8, 8, 4, 4, 4, 8)),
    ((64.0, True, 100, 1.0, 3), (BAD,) * 5, (64, 64, 64, 32, 16)),
    ((64.0, True, 100, 1.0, 2), (BAD, GOOD, BAD, BAD), (64, 64, 64, 32)),
    ((64.0, True, 2, 1.0, 2), (BAD, GOOD, GOOD, BAD, BAD, BAD), (64, 64, 64, 128, 128, 64)),
    ((64.0, True, 100, 1.0, 2, True), (BAD, GOOD, BAD, BAD), (64, 64, 64, 64)),
    ((4.0, True, 100, 2.0, 1), (BAD,) * 4, (4, 2, 2, 2)),
    ((138.0, False, 1, 1.0, 1), (BAD, GOOD, BAD), (138, 138, 138)),
)


def check_loss_scaler(answer: Function) -> Iterator[str]:
    """Nine stories as rows of numbers, torch's GradScaler, and a run that overflows on one rank."""
    for arguments, outcomes, expected in STORIES:
        _check_story(answer, arguments, outcomes, expected)
    yield f"{len(STORIES)} stories: window, hysteresis, floor, refilling, a fixed scale"
    outcomes = (GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, BAD, BAD, GOOD)
    _check_story(answer, (1024.0, True, 2, 1.0, 1), outcomes, grad_scaler(outcomes))
    yield "hysteresis 1: the scales of torch's GradScaler"
    _check_refusal(answer)
    plan = runs.Plan(steps=5, window=2, overflow_at=2)
    for stage in (0, 2):
        runs.compare(plan, stage, 4)
    yield "the engine trains on it: scales and weights of GradScaler, the same on four ranks"


def grad_scaler(outcomes: Sequence[bool]) -> list[float]:
    """Return the scales that torch's GradScaler uses, beginning at 1024, with a window of 2."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for overflow in outcomes:
        scales.append(scaler.get_scale())
        param.grad = scaler.scale(torch.full((1,), float("inf") if overflow else 1.0))
        scaler.step(optimizer)
        scaler.update()
    return scales


def _check_story(
    answer: Function, arguments: tuple, outcomes: Sequence[bool], expected: Sequence[float]
) -> None:
    scaler, seen = answer(*arguments), []
    for overflow in outcomes:
        seen.append(float(scaler.scale))
        scaler.update(overflow)
    if seen != [float(scale) for scale in expected]:
        story = ", ".join("overflow" if overflow else "good" for overflow in outcomes)
        raise Wrong(
            f"LossScaler{arguments} after {story}: the scales in use are {runs.numbers(seen)}, and "
            f"must be {runs.numbers(expected)}.",
            expected=runs.numbers(expected),
            observed=runs.numbers(seen),
            call=f"LossScaler{arguments}",
        )


def _check_refusal(answer: Function) -> None:
    for scale in (0.0, -2.0):
        try:
            answer(scale)
        except UsageError:
            continue
        raise Wrong(
            f"A loss scale of {scale:g} would make every gradient zero or turn it round.",
            expected="UsageError",
            observed="a LossScaler",
            call=f"LossScaler({scale:g})",
        )


# 7.7 run_step


def check_run_step(answer: Function) -> Iterator[str]:
    """One step by hand; growth, overflow on one rank and clipping against torch alone."""
    _check_answer()
    runs.compare(runs.Plan(steps=3, window=1), 1, 4)
    yield "the scale doubles every step: each update as long as GradScaler's"
    for stage, world_size in ((0, 2), (1, 2), (2, 4)):
        ranks = runs.compare(runs.Plan(steps=3, overflow_at=1), stage, world_size)
        _check_skipped(ranks, stage)
    yield "an overflow on the last rank: skipped by all once, no gradient left, training goes on"
    runs.compare(runs.Plan(steps=3, max_norm=0.25, overflow_at=1), 2, 3)
    yield "clipped at 0.25 on 3 ranks: the norms and weights of clip_grad_norm_"


def _one_step() -> tuple[Any, bool]:
    """End one step on one rank: no check for overflow, an infinite gradient, two buffers."""
    plan, home = runs.Plan(), evidence.home()
    trainer, *_ = engine.initialize(model=runs.Pair().to(home), config=plan.config(0))
    inputs, targets, _ = plan.batch(0, 1, 0, home)
    trainer.backward(trainer(inputs, targets, runs.POISON))
    parts = trainer.sharding, trainer.groups, trainer.scaler
    said = precision.run_step(*parts, 0.0, check_overflow=False, changed=(True, False))
    finite = bool(weights_of(trainer.module).isfinite().all())
    trainer.close()
    return said, finite


def _check_answer() -> None:
    """Look at what comes back, and at two arguments that training seldom uses."""
    said, finite = evidence.run(_one_step, 1)[0]
    call = "run_step(..., check_overflow=False, changed=(True, False))"
    if not isinstance(said, precision.Agreement):
        raise Wrong(
            "It must return the Agreement, whatever happened: the engine reads in it whether "
            "the step was made.",
            expected="an Agreement",
            observed=f"{said!r}",
            call=call,
        )
    if list(said.changed) != [True, False]:
        raise Wrong(
            "Of two buffers this rank wrote to the first, and the answer does not say so: "
            "`changed` is a question to all ranks as well.",
            expected="changed [True, False]",
            observed=f"changed {list(said.changed)}",
            call=call,
        )
    if said.overflow or finite:
        raise Wrong(
            "A gradient is infinite and nobody was to look: the step is made all the same.",
            expected="overflow False, and the step made",
            observed="a skipped step",
            call=call,
        )


def _check_skipped(ranks: list[runs.Shown], stage: int) -> None:
    skipped = [shown.skipped for shown in ranks]
    if skipped != [1] * len(ranks):
        raise Wrong(
            f"Stage {stage}: the ranks skipped {skipped} steps; one step overflowed.",
            expected="1 on every rank",
            observed=skipped,
            call="run_step(...)",
        )


def hunt_run_step(world_size: int) -> str:
    """Return what five steps leave: the scale grows, one step overflows on the last rank."""
    plan = runs.Plan(steps=5, window=2, overflow_at=3)
    try:
        ranks = runs.train(plan, 1, world_size, "lockstep")
    except Wrong as torn:
        return f"stopped: {torn.message}"
    before, moves = runs.weights_of(runs.Pair()).half().float(), []
    for weights in ranks[0].weights:
        moves.append((weights - before).abs().max().item())
        before = weights
    steps = ", ".join(f"{move:.4f}" for move in moves)
    scales, held = runs.numbers(ranks[0].scales), ranks[0].grad_bytes
    return f"scales {scales}; largest change of a weight {steps}; gradient bytes after it {held}"
