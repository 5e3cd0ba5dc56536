"""Chapter 7: wrong answers to its blank page and its parts. The docstring is the misconception.

Owns nothing. Each is what somebody writes who believes its docstring, in the names of the module
that it is plugged into; none calls the function that it stands for.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, precision
from ...bucket import Bucket

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Make = Callable[..., torch.optim.Optimizer]


# 7.1 train_mixed_precision: one loop with a switch for each mistake.


def _by_hand(
    model: nn.Module, batches: Batches, make: Make, scale: float, window: int, bug: str
) -> list[float]:
    params, scales, good = list(model.parameters()), [], 0
    masters = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make(masters)
    model.half()
    for inputs, targets in batches:
        scales.append(scale)
        used = 1.0 if bug == "no scale" else scale
        (F.mse_loss(model(inputs.half()).float(), targets) * used).backward()
        grads = [param.grad for param in params if param.grad is not None]
        model.zero_grad()
        bad = not all(bool(grad.isfinite().all()) for grad in grads)
        mine = bad
        if bug != "alone":
            bad = _somewhere(bad)
        if bad and bug != "no skip":
            scale, good = (scale if bug == "drift" and not mine else scale / 2), 0
            continue
        grown = scale * 2 if (good + 1) % window == 0 else scale
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
            comm.all_reduce(master.grad, "sum" if bug == "sum" else "avg")
            master.grad.div_(grown if bug == "early" else used)
        optimizer.step()
        if bug != "keeps":
            optimizer.zero_grad()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master.data)
            if bug == "no master":
                master.data.copy_(param.data)
        scale, good = grown, good + 1
    return scales


def _somewhere(bad: bool) -> bool:
    flag = torch.tensor([bad])
    comm.all_reduce(flag, "max", purpose="control")
    return bool(flag.item())


def skips_alone(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """Only the rank that sees the infinity skips; the others wait for its gradients in vain."""
    return _by_hand(model, batches, make_optimizer, scale, window, "alone")


def never_skips(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """An infinity in one gradient makes the mean infinite, and one step ruins all weights."""
    return _by_hand(model, batches, make_optimizer, scale, window, "no skip")


def trains_without_masters(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """The optimizer goes on from rounded weights: what a step changed below half a unit is lost."""
    return _by_hand(model, batches, make_optimizer, scale, window, "no master")


def never_scales(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """Without a scale small gradients become zero in fp16; what has vanished cannot be averaged."""
    return _by_hand(model, batches, make_optimizer, scale, window, "no scale")


def unscales_by_the_next_scale(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """The scale grows before the gradients are divided: they are divided by twice too much."""
    return _by_hand(model, batches, make_optimizer, scale, window, "early")


def sums_over_ranks(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """A sum over N ranks is N times the gradient of the global batch: average it."""
    return _by_hand(model, batches, make_optimizer, scale, window, "sum")


def halves_where_it_hurt(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """All ranks skip, and only one halves its scale: next time they average different units."""
    return _by_hand(model, batches, make_optimizer, scale, window, "drift")


def keeps_fp32_gradients(
    model: nn.Module, batches: Batches, make_optimizer: Make, scale: float, window: int
) -> list[float]:
    """Gradients that stay after the step cost 4 bytes a parameter while the next one runs."""
    return _by_hand(model, batches, make_optimizer, scale, window, "keeps")


# 7.2 square_sum


def squares_in_16_bits(values: torch.Tensor) -> torch.Tensor:
    """fp16 ends at 65504: the square of 300 is an infinity already. Widen before you square."""
    return (values * values).double().sum()


def adds_in_fp32(values: torch.Tensor) -> torch.Tensor:
    """fp32 keeps 24 bits: the sum then depends on where shards are cut, and so does the norm."""
    return values.float().square().sum().double()


def widens_it_whole(values: torch.Tensor) -> torch.Tensor:
    """A bucket in fp64 is four times the bucket in 16 bits, and just when memory is short."""
    wide = values.double()
    return torch.dot(wide, wide)


def adds_without_squaring(values: torch.Tensor) -> torch.Tensor:
    """Positive and negative gradients cancel in a plain sum; a norm adds squares."""
    return values.double().sum()


def drops_the_tail(values: torch.Tensor) -> torch.Tensor:
    """Whole chunks only: what is left at the end counts for nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, values.numel() - precision.CHUNK + 1, precision.CHUNK):
        exact = values[start : start + precision.CHUNK].double()
        total += torch.dot(exact, exact)
    return total


# 7.3 any_rank


def asks_nobody(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """A rank cannot see the others' gradients: without a collective each knows only its own."""
    return [bool(flag) for flag in flags]


def rank_0_decides(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """A broadcast tells all ranks what rank 0 saw, and nobody what the others saw."""
    mine = torch.tensor(flags, dtype=torch.uint8, device=target)
    comm.broadcast(mine, src=0, purpose="control")
    return [bool(flag) for flag in mine.tolist()]


def only_if_all(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """One bad gradient spoils the mean: it needs no agreement of all that they saw one."""
    mine = torch.tensor(flags, dtype=torch.int64, device=target)
    comm.all_reduce(mine, "sum", purpose="control")
    return [flag == comm.get_world_size() for flag in mine.tolist()]


def flag_by_flag(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """One collective for each flag: every one of them waits for the slowest rank."""
    answers = []
    for flag in flags:
        mine = torch.tensor([flag], dtype=torch.uint8, device=target)
        comm.all_reduce(mine, "max", purpose="control")
        answers.append(bool(mine.item()))
    return answers


def counts_as_data(flags: Sequence[bool], target: torch.device) -> list[bool]:
    """Flags are control traffic: as data they are counted in the 2 Psi of the model."""
    mine = torch.tensor(flags, dtype=torch.uint8, device=target)
    comm.all_reduce(mine, "max")
    return [bool(flag) for flag in mine.tolist()]


# 7.4 global_norm

Unused = dict[Bucket, set[int]]


def _tables(buckets: Sequence[Bucket], unused: Unused) -> list[torch.Tensor]:
    return [precision.square_table(bucket, unused[bucket]) for bucket in buckets]


def _holds_all(buckets: Sequence[Bucket]) -> bool:
    return all(len({s.shard for s in b.segments}) == b.world_size for b in buckets)


def own_shard_only(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """The norm of a shard is not the norm of the model: every rank would clip by another factor."""
    return torch.cat([table.reshape(-1) for table in _tables(buckets, unused)]).sum().sqrt()


def adds_norms(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """Norms do not add up, their squares do: add first, and take one root at the end."""
    mine = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)]).sum().sqrt()
    if not _holds_all(buckets):
        comm.all_reduce(mine, "sum", purpose="control")
    return mine


def counts_every_copy(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """Where every rank holds all gradients, adding over ranks counts each of them N times."""
    mine = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)]).sum()
    comm.all_reduce(mine, "sum", purpose="control")
    return mine.sqrt()


def gathers_in_fp32(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """Rounded to fp32 on the way, the sums depend on where the shards were cut."""
    mine = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)]).float()
    if not _holds_all(buckets):
        comm.all_reduce(mine, "sum", purpose="control")
    return mine.double().sum().sqrt()


def bucket_by_bucket(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """One small collective a bucket: hundreds of waits, where one message carries all the sums."""
    total = torch.zeros((), dtype=torch.float64)
    for bucket, table in zip(buckets, _tables(buckets, unused), strict=True):
        if not _holds_all([bucket]):
            comm.all_reduce(table, "sum", purpose="control")
        total += table.sum()
    return total.sqrt()


def counts_norm_as_data(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """The sums are control traffic; as data they would be counted with the gradients."""
    tables = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)])
    if not _holds_all(buckets):
        comm.all_reduce(tables, "sum")
    return tables.sum().sqrt()


def returns_the_square(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """The sum of squares is the square of the norm: the root is missing."""
    tables = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)])
    if not _holds_all(buckets):
        comm.all_reduce(tables, "sum", purpose="control")
    return tables.sum()


def squares_in_place(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """Squares need no new memory if they take the place of the gradients, which are gone then."""
    tables = torch.cat([table.reshape(-1) for table in _tables(buckets, unused)])
    if not _holds_all(buckets):
        comm.all_reduce(tables, "sum", purpose="control")
    for bucket in buckets:
        assert bucket.reduced is not None
        bucket.reduced.square_()
    return tables.sum().sqrt()


def takes_unused_out(buckets: Sequence[Bucket], unused: Unused) -> torch.Tensor:
    """What is taken out of the caller's dictionary is missing where the optimizer asks for it."""
    tables = [precision.square_table(bucket, unused.pop(bucket)) for bucket in buckets]
    mine = torch.cat([table.reshape(-1) for table in tables])
    if not _holds_all(buckets):
        comm.all_reduce(mine, "sum", purpose="control")
    return mine.sum().sqrt()


# 7.5 step_factor


def _clip(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clips_scaled_gradients(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """The norm is still times the scale: compared with max_norm, it clips whatever comes."""
    if norm is not None:
        return (_clip(norm, max_norm) / scale).float()
    return None if scale == 1 else torch.tensor(1 / scale)


def clips_and_forgets_to_unscale(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """Clipping alone leaves the scale in the gradients: the step is `scale` times too long."""
    if norm is not None:
        return _clip(norm / scale, max_norm).float()
    return None if scale == 1 else torch.tensor(1 / scale)


def unscales_only_when_clipping(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """Clipping off is no reason to keep the scale in the gradients."""
    return None if norm is None else (_clip(norm / scale, max_norm) / scale).float()


def stretches_short_gradients(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """Clipping only shortens. Without the limit of 1, small gradients are blown up to max_norm."""
    if norm is not None:
        return (max_norm / (norm / scale + 1e-6) / scale).float()
    return None if scale == 1 else torch.tensor(1 / scale)


def multiplies_by_the_scale(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """The loss was multiplied, so the gradients must be divided."""
    if norm is not None:
        return (_clip(norm / scale, max_norm) * scale).float()
    return None if scale == 1 else torch.tensor(float(scale))


def always_a_number(
    norm: torch.Tensor | None, scale: float, max_norm: float
) -> torch.Tensor | None:
    """A factor of 1 changes nothing and costs a pass over all gradients: return None."""
    if norm is not None:
        return (_clip(norm / scale, max_norm) / scale).float()
    return torch.tensor(1 / scale)
