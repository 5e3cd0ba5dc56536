"""Chapter 7: numbers that every rank must agree on before anybody steps.

Owns the loss scale. Gradients lie in shards, one rank sees an infinity that the others do not,
and the norm of the whole is no rank's norm; so before a step the ranks agree on

    used      which parameters had a gradient somewhere (a bitmap, all-reduced with "max")
    overflow  whether any gradient anywhere is infinite or NaN (one more bit of that bitmap)
    norm      the global norm: an fp64 sum of squares per segment, gathered from all ranks and
              added in one fixed order, so that all stages get the same last bit

and every rank draws the same conclusion: skip, or multiply by the same factor.

Phases of a step: agree, decide, (step), update the scale. The scale that multiplied the loss
is the one that divides the gradients: it changes only after the step.

Source: Micikevicius et al., Mixed Precision Training (2018), section 3.2; DeepSpeed keys
`fp16`, `gradient_clipping`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from . import comm
from .bucket import Bucket
from .errors import UsageError

CHUNK = 2**17  # elements turned to fp64 at a time: 1 MiB of scratch


def read(tensor: torch.Tensor) -> list:
    """Return a tensor's values as Python numbers: the one place where the engine looks at data."""
    return tensor.tolist()


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the fp64 sum of squares of a 1-D tensor, with bounded scratch memory."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(CHUNK):
        exact = chunk.double()
        total += torch.dot(exact, exact)
    return total


def is_finite(bucket: Bucket) -> bool:
    """Whether a bucket's reduced gradients hold neither an infinity nor a NaN.

    A sum is ten times as fast as a look at every element, and an infinity or a NaN always shows
    in it. A sum that overflowed by itself is looked at again, element by element.
    """
    assert bucket.reduced is not None
    total = bucket.reduced.sum(dtype=torch.promote_types(bucket.reduced.dtype, torch.float32))
    if read(torch.isfinite(total).reshape(1))[0]:
        return True
    return bool(read(torch.isfinite(bucket.reduced).all().reshape(1))[0])


@dataclass(slots=True)
class Agreement:
    """What all ranks know before a step."""

    overflow: bool
    unused: dict[Bucket, set[int]]  # per bucket, parameters that no rank used
    changed: list[bool]  # per buffer, whether some rank wrote to it


def agree(
    buckets: Sequence[Bucket], check_overflow: bool, changed: Sequence[bool] = ()
) -> Agreement:
    """Tell all ranks what this one saw, and learn what they saw: one small all-reduce.

    Args:
        buckets: the trainable buckets, all REDUCED.
        check_overflow: look for infinities and NaN; without it `overflow` is False.
        changed: for every buffer of the model, whether this rank wrote to it.
    """
    bad = check_overflow and not all(is_finite(bucket) for bucket in buckets)
    seen = [position in bucket.used for bucket in buckets for position in range(len(bucket.slots))]
    target = buckets[0].device if buckets else torch.device("cpu")
    flags = torch.tensor([bad, *changed, *seen], dtype=torch.uint8, device=target)
    comm.all_reduce(flags, "max", purpose="control")
    overflow, *answers = read(flags)
    rest = iter(answers[len(changed) :])
    unused = {b: {p for p in range(len(b.slots)) if not next(rest)} for b in buckets}
    for bucket in buckets:
        bucket.used.clear()
    return Agreement(bool(overflow), unused, [bool(flag) for flag in answers[: len(changed)]])


def global_norm(buckets: Sequence[Bucket], unused: dict[Bucket, set[int]]) -> torch.Tensor:
    """Return the 2-norm over all parameters of the reduced gradients, as a 0-dim fp64 tensor.

    Each rank sums the squares of its segments; the sums are gathered as a table
    [rank, parameter] and added in the order (bucket, rank, parameter). A rank that owns all
    shards fills the whole table by itself, so one path serves all stages. Padding belongs to
    no segment and tied parameters to one, so both count once.
    """
    if not buckets:
        return torch.zeros((), dtype=torch.float64)
    tables = [_square_table(bucket, unused[bucket]) for bucket in buckets]
    if any(len({s.shard for s in b.segments}) < b.world_size for b in buckets):
        tables = _gather_tables(buckets, tables)
    return torch.cat([table.reshape(-1) for table in tables]).sum().sqrt()


def _square_table(bucket: Bucket, unused: set[int]) -> torch.Tensor:
    """Return [world_size, parameters] fp64 sums of squares; rows of other ranks are zero."""
    assert bucket.reduced is not None
    shape = (bucket.world_size, len(bucket.slots))
    table = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
    for segment in bucket.segments:
        if segment.slot not in unused:
            stop = segment.start + segment.param.numel()
            table[segment.shard, segment.slot] = square_sum(bucket.reduced[segment.start : stop])
    return table


def _gather_tables(buckets: Sequence[Bucket], tables: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tables with all ranks' rows, after one gather for all buckets."""
    own = torch.cat([table[b.rank] for b, table in zip(buckets, tables, strict=True)])
    world_size = buckets[0].world_size
    everyone = own.new_empty(world_size * own.numel())  # [world_size * parameters]
    comm.all_gather(everyone, own, purpose="control")
    columns = everyone.view(world_size, -1)
    return list(columns.split([len(bucket.slots) for bucket in buckets], dim=1))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the number, at most 1, that brings a gradient of this norm down to `max_norm`.

    The same rule as `torch.nn.utils.clip_grad_norm_`.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(slots=True)
class LossScaler:
    """The number that the loss is multiplied with, so that small gradients survive fp16.

    Dynamic: halved after an overflow (once `hysteresis` of them have been borne), doubled
    after `window` good steps in a row. Every rank updates its own copy from the same
    agreement, so the copies stay equal.

    Attributes:
        scale: in use now; gradients that this scale produced are divided by it.
        dynamic: whether it changes.
        window: good steps before it doubles.
        min_scale: it never falls below this.
        hysteresis: overflows borne before it is halved.
        consecutive_hysteresis: refill the budget on every good step, not only when it doubles.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    min_scale: float = 1.0
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    budget: int = field(init=False)
    good_steps: int = 0

    def __post_init__(self) -> None:
        """Begin with a full budget of overflows."""
        if self.scale <= 0:
            raise UsageError(f"loss scale {self.scale} must be greater than 0")
        self.budget = self.hysteresis

    def update(self, overflow: bool) -> None:
        """Draw the conclusion from a step; call it after the gradients were used or dropped."""
        if not self.dynamic:
            return
        self._shrink() if overflow else self._grow()

    def _shrink(self) -> None:
        self.good_steps = 0
        if self.budget > 1:
            self.budget -= 1
        else:
            self.scale = max(self.scale / 2, self.min_scale)

    def _grow(self) -> None:
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.budget = self.hysteresis
        if self.good_steps % self.window == 0:
            self.budget = self.hysteresis
            self.scale *= 2
