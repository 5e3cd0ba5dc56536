"""Chapter 7: numbers that every rank must agree on before anybody steps.

Owns the loss scale. Gradients lie in shards, one rank sees an infinity that the others do not,
and the norm of the whole is no rank's norm; so before a step the ranks agree on

    used      which parameters had a gradient somewhere (a bitmap, all-reduced with "max")
    overflow  whether any gradient anywhere is infinite or NaN (one more bit of that bitmap)
    late      whether a gradient came on any rank when its bucket had left (another bit)
    norm      the global norm: an fp64 sum of squares per segment, gathered from all ranks and
              added in one fixed order, so that all stages get the same last bit

and every rank draws the same conclusion: skip, or multiply by the same factor.

Phases of a step (`run_step`): agree, decide, step or drop, update the scale. The scale that
multiplied the loss is the one that divides the gradients: it changes only after the step.

Source: Micikevicius et al., Mixed Precision Training (2018), section 3.2; DeepSpeed keys
`fp16`, `gradient_clipping`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import comm
from .bucket import Bucket, GradState
from .errors import UsageError

if TYPE_CHECKING:
    from .ddp import DDP
    from .optim import BucketGroups

CHUNK = 2**17  # elements turned to fp64 at a time: 1 MiB of scratch


def read(tensor: torch.Tensor) -> list:
    """Return a tensor's values as Python numbers: the one place where the engine looks at data."""
    return tensor.tolist()


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a 1-D tensor, computed in fp64, as a 0-dim fp64 tensor.

    The tensor may be as long as a bucket: at most 4 MiB of scratch are taken, whatever its
    length. `CHUNK` elements in fp64 are 1 MiB.

    Example: three times 300 in fp16, whose square fp16 cannot hold, gives 270000.
    """
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
    if math.isfinite(read(total.reshape(1))[0]):
        return True
    return bool(read(torch.isfinite(bucket.reduced).all().reshape(1))[0])


def any_rank(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """Return for every flag whether it is set on any rank: the same answer on all ranks.

    One small collective carries all flags together; it is control traffic.

    Args:
        flags: what this rank saw, equally many on all ranks.
        target: the device on which the ranks talk.

    Example: [False, True] here and [False, False] elsewhere give [False, True] everywhere.
    """
    mine = torch.tensor(flags, dtype=torch.uint8, device=target)
    comm.all_reduce(mine, "max", purpose="control")
    return [bool(flag) for flag in read(mine)]


class LateGradientsError(Exception):
    """On some rank a gradient came late: `buckets` must be sent again, the same on all ranks."""

    def __init__(self, buckets: list[Bucket]) -> None:
        """Remember the buckets."""
        super().__init__(f"{buckets} must be sent again")
        self.buckets = buckets


def late_anywhere(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets that are FILLING on some rank; all ranks call it, after backward."""
    late = any_rank([bucket.state is GradState.FILLING for bucket in buckets], buckets[0].device)
    return [bucket for bucket, again in zip(buckets, late, strict=True) if again]


@dataclass(slots=True)
class Agreement:
    """What all ranks know about a step."""

    overflow: bool
    unused: dict[Bucket, set[int]]  # per bucket, parameters that no rank used
    changed: list[bool]  # per buffer, whether some rank wrote to it
    norm: torch.Tensor | None = None  # of the unscaled gradients before clipping, if it was needed


def agree(
    buckets: Sequence[Bucket], check_overflow: bool, changed: Sequence[bool] = ()
) -> Agreement:
    """Tell all ranks what this one saw, and learn what they saw: one small all-reduce.

    Args:
        buckets: the trainable buckets, all REDUCED.
        check_overflow: look for infinities and NaN; without it `overflow` is False.
        changed: for every buffer of the model, whether this rank wrote to it.

    Raises:
        LateGradientsError: on all ranks, when a bucket is FILLING on some rank.
    """
    late = any(bucket.state is GradState.FILLING for bucket in buckets)
    bad = check_overflow and not late and not all(is_finite(bucket) for bucket in buckets)
    seen = [position in bucket.used for bucket in buckets for position in range(len(bucket.slots))]
    target = buckets[0].device if buckets else torch.device("cpu")
    some_late, overflow, *answers = any_rank([late, bad, *changed, *seen], target)
    if some_late:
        raise LateGradientsError(late_anywhere(buckets))
    rest = iter(answers[len(changed) :])
    unused = {b: {p for p in range(len(b.slots)) if not next(rest)} for b in buckets}
    for bucket in buckets:
        bucket.used.clear()
    return Agreement(overflow, unused, answers[: len(changed)])


def global_norm(buckets: Sequence[Bucket], unused: dict[Bucket, set[int]]) -> torch.Tensor:
    """Return the 2-norm of the reduced gradients of all parameters, as a 0-dim fp64 tensor.

    The same number, to the last bit, on every rank and at every stage: a table of sums of
    squares [rank, parameter] for every bucket, added in the order (bucket, rank, parameter). What
    this rank does not hold comes from the others, in one collective of control traffic.

    Args:
        buckets: the trainable buckets; `square_table(bucket, unused)` gives the rows of the
            shards that this rank owns, and zeros for the rest.
        unused: per bucket, parameters that do not count.
    """
    if not buckets:
        return torch.zeros((), dtype=torch.float64)
    tables = [square_table(bucket, unused[bucket]) for bucket in buckets]
    if any(len({s.shard for s in b.segments}) < b.world_size for b in buckets):
        own = torch.cat([table[b.rank] for b, table in zip(buckets, tables, strict=True)])
        world_size = buckets[0].world_size
        everyone = own.new_empty(world_size * own.numel())  # [world_size * parameters]
        comm.all_gather(everyone, own, purpose="control")
        widths = [len(bucket.slots) for bucket in buckets]
        tables = everyone.view(world_size, -1).split(widths, dim=1)
    return torch.cat([table.reshape(-1) for table in tables]).sum().sqrt()


def square_table(bucket: Bucket, unused: set[int]) -> torch.Tensor:
    """Return [world_size, parameters] fp64 sums of squares; rows of other ranks are zero.

    Padding belongs to no segment and a tied parameter to one, so both count right.
    """
    assert bucket.reduced is not None
    shape = (bucket.world_size, len(bucket.slots))
    table = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
    for segment in bucket.segments:
        if segment.slot not in unused:
            stop = segment.start + segment.param.numel()
            table[segment.shard, segment.slot] = square_sum(bucket.reduced[segment.start : stop])
    return table


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the number, at most 1, that brings a gradient of this norm down to `max_norm`.

    The same rule as `torch.nn.utils.clip_grad_norm_`.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def step_factor(norm: torch.Tensor | None, scale: float, max_norm: float) -> torch.Tensor | None:
    """Return the one number that unscales the gradients and clips them, as 0-dim fp32.

    Args:
        norm: 0-dim fp64, the global norm of the gradients as they lie, still times `scale`;
            None where nothing is clipped.
        scale: the loss scale that these gradients were computed with.
        max_norm: what the norm of the unscaled gradients may be at most; clipping follows
            `clip_factor`.

    Returns:
        None when nothing was asked for, neither clipping nor a scale: it saves a pass over all
        gradients. A factor that turns out to be 1 is a factor.

    Example: scale 4, norm 8, max_norm 1: the true norm is 2, so half of a quarter: 0.125.
    """
    if norm is not None:
        return (clip_factor(norm / scale, max_norm) / scale).float()
    return None if scale == 1 else torch.tensor(1 / scale, dtype=torch.float32)


class LossScaler:
    """The number that the loss is multiplied with, so that small gradients survive fp16.

    Dynamic: halved after an overflow (once `hysteresis` - 1 of them have been borne), doubled
    after every `window` good steps in a row; doubling allows as many overflows again. Every
    rank updates its own copy from the same agreement, so the copies stay equal.

    Attributes:
        scale: in use now; greater than 0. Gradients that it produced are divided by it.
        dynamic: whether it changes at all.
        window: good steps in a row before it doubles, and again after as many more.
        min_scale: halving stops here.
        hysteresis: which overflow halves it: 1 the first, 2 the second.
        consecutive_hysteresis: a good step, too, allows as many overflows again.
        budget: how many overflows are left; at 1 the next one halves the scale.
        good_steps: since the last overflow.
    """

    def __init__(
        self,
        scale: float = 1.0,
        dynamic: bool = False,
        window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        """Begin with a full budget; a scale that is not above 0 is a UsageError."""
        if scale <= 0:
            raise UsageError(f"loss scale {scale} must be greater than 0")
        self.scale = scale
        self.dynamic = dynamic
        self.window = window
        self.min_scale = min_scale
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.budget = hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Draw the conclusion from a step; called after its gradients were used or dropped."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            if self.budget > 1:
                self.budget -= 1
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.good_steps += 1
        doubles = self.good_steps % self.window == 0
        if doubles:
            self.scale *= 2
        if doubles or self.consecutive_hysteresis:
            self.budget = self.hysteresis


def run_step(
    sharding: "DDP",
    groups: "BucketGroups",
    scaler: LossScaler,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Agreement:
    """End a step on all ranks alike: update the parameters, or skip and forget the gradients.

    `agreed = agree(buckets, check_overflow, changed)` says whether to skip: `agreed.overflow`. If
    not, `sharding.step(groups, agreed.unused, factor)` updates and frees the gradients;
    `sharding.drop_grads()` only frees them. The scaler learns of every step.

    Args:
        sharding: the stage; its `trainable` buckets are REDUCED, still times the loss scale.
        groups: the optimizer over this rank's segments.
        scaler: the loss scale, in use since forward.
        max_norm: the largest norm; 0 for no clipping, and then no norm is computed.
        check_overflow: whether to look for infinities and NaN.
        changed: for every buffer of the model, whether this rank wrote to it.

    Returns:
        What the ranks agreed on; its `norm` is that of the unscaled gradients, if computed.
    """
    agreed = agree(sharding.trainable, check_overflow, changed)
    if agreed.overflow:
        sharding.drop_grads()
    else:
        norm = global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
        factor = step_factor(norm, scaler.scale, max_norm)
        sharding.step(groups, agreed.unused, factor)
        agreed.norm = None if norm is None else norm / scaler.scale
    scaler.update(agreed.overflow)
    return agreed
