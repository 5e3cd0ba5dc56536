"""Chapter 7: the checks of its parts: square_sum, any_rank, step_factor.

Owns nothing. References are fp64 sums, torch's clip_grad_norm_ and what the ledger and the
records of collectives say.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ... import comm, device, precision
from ...errors import DeadlockError
from .. import evidence
from ..outcome import Wrong
from . import c07_runs as runs

Function = Callable[..., Any]


# 7.2 square_sum

SCRATCH = 4 * 2**20


def check_square_sum(answer: Function) -> Iterator[str]:
    """Values in three dtypes against fp64, and the scratch that the ledger sees."""
    _check_sum(answer, torch.tensor([300.0, 300.0, 300.0], dtype=torch.float16), "300, 300, 300")
    _check_sum(answer, torch.tensor([3.0, -4.0]), "3, -4")
    _check_sum(answer, torch.zeros(0), "no elements")
    yield "squares that fp16 cannot hold, signs, and an empty shard"
    luck = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(300_001, generator=luck).to(dtype)
        _check_sum(answer, values, f"300,001 numbers in {str(dtype)[6:]}")
    yield "300,001 elements: twelve digits of the sum in fp64"
    yield _check_scratch(answer)


def _check_sum(answer: Function, values: torch.Tensor, what: str) -> None:
    expected, before = values.double().square().sum().item(), values.clone()
    found = answer(values)
    if not torch.equal(values, before):
        raise Wrong(
            f"{what}: the values are others afterwards, and the optimizer still needs them.",
            expected="the tensor as it was",
            observed="other values",
        )
    if not isinstance(found, torch.Tensor) or found.dim() or found.dtype != torch.float64:
        shown = (
            f"{found.dtype} of shape {tuple(found.shape)}"
            if isinstance(found, torch.Tensor)
            else repr(found)
        )
        raise Wrong("It must return a 0-dim fp64 tensor.", expected="0-dim float64", observed=shown)
    if not abs(found.item() - expected) <= 1e-12 * max(expected, 1):
        raise Wrong(
            f"{what}: the squares add up to {expected:.12g}, not {found.item():.12g}.",
            expected=f"{expected:.15g}",
            observed=f"{found.item():.15g}",
        )


def _check_scratch(answer: Function) -> str:
    numel = 3 * 2**20 + 1
    with device.VirtualGPU() as gpu:
        values = torch.ones(numel, dtype=torch.bfloat16)
        before = gpu.allocated_bytes
        gpu.reset_peak()
        answer(values)
        taken = gpu.peak_bytes - before
    if taken > SCRATCH:
        raise Wrong(
            f"For {numel:,} elements it takes {taken / 2**20:.1f} MiB of scratch; 4 MiB must do "
            "for any length.",
            expected=f"at most {SCRATCH:,} bytes",
            observed=f"{taken:,} bytes",
        )
    return f"{numel:,} elements with {taken / 2**20:.1f} MiB of scratch"


# 7.3 any_rank


def check_any_rank(answer: Function) -> Iterator[str]:
    """Answers on four ranks, the traffic of the question, and a step that breaks on one rank."""
    for seen in (((0, 2), (2,), (2,), (1, 2)), ((0,), (), (), ()), ((), (), (), ())):
        _check_flags(seen)
    yield "a flag on one rank, on some, on none: the same answer on all four"
    yield _check_question()
    plan = runs.Plan(overflow_at=1)
    for stage in (0, 1, 2):
        runs.compare(plan, stage, 4)
    yield "stages 0 to 2 in fp16, an overflow on rank 3: skipped by all, as by GradScaler"


def _check_flags(seen: Sequence[Sequence[int]]) -> None:
    flags = [[position in mine for position in range(3)] for mine in seen]
    expected = [any(mine[position] for mine in flags) for position in range(3)]
    try:
        answers = evidence.run(_ask, len(seen), flags)
    except DeadlockError as error:
        raise runs.torn(error, "A question of three flags") from None
    for rank, found in reversed(list(enumerate(answers))):
        if not isinstance(found, list) or not all(isinstance(flag, bool) for flag in found):
            raise Wrong(
                f"Rank {rank} gets {found!r}, which is no list of bools, one for each flag.",
                expected=expected,
                observed=f"{found!r}",
                call=f"any_rank({flags[rank]}, torch.device('cpu'))",
                rank=rank,
            )
        if found != expected:
            raise Wrong(
                f"Ranks saw {flags}; rank {rank} is told {found}.",
                expected=expected,
                observed=found,
                call=f"any_rank({flags[rank]}, torch.device('cpu'))",
                rank=rank,
            )


def _ask(flags: Sequence[Sequence[bool]]) -> list[bool]:
    return precision.any_rank(flags[comm.get_rank()], evidence.home())


def _ask_and_look(numel: int) -> list[Any]:
    first = len(comm.records().collectives)
    precision.any_rank([False] * numel, evidence.home())
    return list(comm.records().collectives[first:])


def _check_question() -> str:
    events = evidence.run(_ask_and_look, 4, 5)[0]
    call = "any_rank([False, False, False, False, False], torch.device('cpu'))"
    if len(events) != 1:
        raise Wrong(
            f"Five flags take {len(events)} collectives; one is enough.",
            expected="1 collective",
            observed=f"{len(events)} collectives",
            call=call,
        )
    if events[0].purpose != "control":
        raise Wrong(
            "The flags are counted as data, with the gradients.",
            expected='purpose="control"',
            observed=f"purpose={events[0].purpose!r}",
            call=call,
        )
    return f"five flags in one {events[0].op} of {events[0].nbytes} bytes of control traffic"


# 7.5 step_factor

NORMS, SCALES, MAXIMA = (1e-6, 0.5, 2.0, 3000.0), (1.0, 16.0, 65536.0), (1e-6, 1.0, 100.0)


def check_step_factor(answer: Function) -> Iterator[str]:
    """Factors against unscaling and clip_grad_norm_; None where there is nothing to do."""
    for scale in SCALES[1:]:
        _check_factor(answer, None, scale, 0.0, 1 / scale)
    yield "no clipping: one over the scale"
    for norm in NORMS:
        for scale in SCALES:
            for maximum in MAXIMA:
                _check_factor(answer, norm * scale, scale, maximum, clipped(norm, maximum) / scale)
    cases = len(NORMS) * len(SCALES) * len(MAXIMA)
    yield f"{cases} norms, scales and limits: unscaled, then torch's clip_grad_norm_"
    nothing = answer(None, 1.0, 0.0)
    if nothing is not None:
        raise Wrong(
            "Scale 1 and no clipping: there is nothing to multiply, and still a number came.",
            expected="None",
            observed=nothing,
        )
    yield "nothing to do: None, and no pass over the gradients"


@cache
def clipped(norm: float, maximum: float) -> float:
    """Return what clip_grad_norm_ multiplies a gradient of this norm with."""
    param = nn.Parameter(torch.zeros((), dtype=torch.float64))
    param.grad = torch.tensor(norm, dtype=torch.float64)
    nn.utils.clip_grad_norm_([param], maximum)
    return param.grad.item() / norm


def _check_factor(
    answer: Function, norm: float | None, scale: float, maximum: float, expected: float
) -> None:
    given = None if norm is None else torch.tensor(norm, dtype=torch.float64)
    found = answer(given, scale, maximum)
    words = "no norm" if norm is None else f"norm {norm:g}"
    if found is None:
        why = "" if norm is None else " Whether clipping shortens is not known before it is read."
        raise Wrong(
            f"{words}, scale {scale:g}, max_norm {maximum:g}: the factor is {expected:.6g}, and "
            f"None multiplies nothing.{why}",
            expected=f"tensor({expected:.6g})",
            observed="None",
        )
    if not isinstance(found, torch.Tensor) or found.dim() or found.dtype != torch.float32:
        raise Wrong(
            f"{words}, scale {scale:g}, max_norm {maximum:g}: it must return a 0-dim fp32 tensor.",
            expected=f"tensor({expected:.6g})",
            observed=f"{found!r}",
        )
    if not abs(found.item() - expected) <= 1e-6 * expected:
        raise Wrong(
            f"{words}, scale {scale:g}, max_norm {maximum:g}: the gradients must be multiplied "
            f"with {expected:.6g}, not {found.item():.6g}.",
            expected=f"{expected:.6g}",
            observed=f"{found.item():.6g}",
        )
