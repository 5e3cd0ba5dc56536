"""Chapter 12: the batch equation, train_batch_size = micro x accum x world.

Data: three numbers, of which a file gives one to three, and the world size.
Phases: the missing ones are inferred by DeepSpeed's rules; the equation is checked; what breaks it
is answered with the equation in numbers and the choices nearby that satisfy it.
"""

from dataclasses import dataclass

from .problems import Edit, Problem, error

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUM = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Triad:
    """A solution: `total` samples a step = `micro` a forward x `accum` micro-steps x world size."""

    total: int
    micro: int
    accum: int


def infer(total: int | None, micro: int | None, accum: int | None, world_size: int) -> Triad:
    """Fill in what is missing as DeepSpeed does: floor division, checked by `solves` afterwards.

    At least one of `total` and `micro` must be given. An accumulation that nothing determines
    is 1.

    Example: a total of 30 with accum 5 on 3 ranks gives Triad(total=30, micro=2, accum=5).
    """
    if total is None:
        assert micro is not None
        accum = accum or 1
        return Triad(micro * accum * world_size, micro, accum)
    if micro is not None:
        return Triad(total, micro, accum or total // micro // world_size)
    accum = accum or 1
    return Triad(total, total // world_size // accum, accum)


def solves(triad: Triad, world_size: int) -> bool:
    """Whether the numbers are positive and satisfy the equation."""
    positive = min(triad.total, triad.micro, triad.accum) > 0
    return positive and triad.total == triad.micro * triad.accum * world_size


def solve(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Triad | Problem:
    """The solution, or the problem with the choices nearby."""
    if total is None and micro is None:
        return _nothing_given(accum)
    triad = infer(total, micro, accum, world_size)
    return triad if solves(triad, world_size) else _impossible(total, micro, accum, world_size)


def _nothing_given(accum: int | None) -> Problem:
    given = f"only {ACCUM} = {accum}" if accum else "no batch size"
    return error(
        (TOTAL,),
        f"{given} is given: at least one of {TOTAL} and {MICRO} must be, for the equation "
        f"{TOTAL} = {MICRO} x {ACCUM} x number of GPUs",
        f"add {MICRO}, for example 1",
        Edit((MICRO,), 1),
    )


def _impossible(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Problem:
    assert total is not None  # without it the equation defines it
    choices = nearby(total, micro, accum, world_size)
    best = choices[0]
    equation = (
        f"{total} = {_factor(micro, 'micro')} x {_factor(accum, 'accum')} x {world_size} GPUs"
    )
    worlds = fitting_worlds(total, micro, accum)
    also = f", or run on {_either(worlds)} GPUs" if worlds else ""
    listed = "; ".join(f"{c.total} = {c.micro} x {c.accum} x {world_size}" for c in choices)
    return error(
        (TOTAL,),
        f"{equation} has no solution in whole numbers "
        f"({TOTAL} = {MICRO} x {ACCUM} x number of GPUs)",
        f"take one of {listed}{also}",
        *_edits(best, micro, accum),
    )


def _factor(number: int | None, name: str) -> str:
    return name if number is None else str(number)


def _either(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if numbers[1:] else "") + str(numbers[-1])


def nearby(
    total: int, micro: int | None, accum: int | None, world_size: int, limit: int = 4
) -> list[Triad]:
    """Solutions close to what was asked, best first: the same total if possible, then close ones.

    The total comes first because it changes what is learned; micro and accum only how.
    """
    found: dict[Triad, None] = {}
    for near_total in _multiples(total, world_size):
        per_rank = near_total // world_size
        for near_accum in _divisors_by_distance(per_rank, accum, micro):
            found[Triad(near_total, per_rank // near_accum, near_accum)] = None
            if sum(t.total == near_total for t in found) == 2:
                break
    return sorted(found, key=lambda t: abs(t.total - total))[:limit]


def _multiples(total: int, world_size: int) -> list[int]:
    below = total // world_size * world_size
    exact = [total] if below == total else []
    return [m for m in exact or (below, below + world_size) if m > 0]


def _divisors_by_distance(per_rank: int, accum: int | None, micro: int | None) -> list[int]:
    wanted = accum or (max(per_rank // micro, 1) if micro else 1)
    divisors = _divisors(per_rank)
    return sorted(divisors, key=lambda d: (abs(d - wanted), d))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, min(int(number**0.5), 100_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def fitting_worlds(total: int, micro: int | None, accum: int | None, limit: int = 4) -> list[int]:
    """World sizes at which the numbers as given have a solution, the smallest ones."""
    if micro and accum:
        share, rest = divmod(total, micro * accum)
        return [share] if rest == 0 and share else []
    share, rest = divmod(total, micro or accum or 1)
    return _divisors(share)[:limit] if rest == 0 and share else []


def _edits(best: Triad, micro: int | None, accum: int | None) -> tuple[Edit, ...]:
    edits = [Edit((TOTAL,), best.total)]
    if micro is not None:
        edits.append(Edit((MICRO,), best.micro))
    if accum is not None or micro is None:
        edits.append(Edit((ACCUM,), best.accum))
    return tuple(edits)
