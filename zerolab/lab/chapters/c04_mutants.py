"""Chapter 4: wrong answers to the exercises of 04_optimizer_sharding.

Owns nothing. The docstring of each is what its author believes. Several are from public code:
the optimizer that shards nothing passes the tests of a well-known course, stale gradients and
the step counter that runs too fast stood in published ZeRO implementations.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, ddp, flat
from ...bucket import Bucket, GradState, Segment
from ...optim import BucketGroups

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Make = Callable[..., torch.optim.Optimizer]
Range = tuple[int, int]


# 4.1 train_sharded_optimizer


def _one_buffer(model: nn.Module) -> torch.Tensor:
    """Lay all parameters end to end in a padded buffer; they become views of it."""
    params, world_size = list(model.parameters()), comm.get_world_size()
    numel = sum(param.numel() for param in params)
    whole = params[0].new_zeros(-(-numel // world_size) * world_size)
    start = 0
    for param in params:
        param.data = whole[start : start + param.numel()].view_as(param).copy_(param.data)
        start += param.numel()
    return whole


def _grads(model: nn.Module, padded_numel: int) -> torch.Tensor:
    """Return all gradients end to end, padded."""
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return F.pad(found, (0, padded_numel - found.numel()))


def _train(
    model: nn.Module,
    batches: Batches,
    make_optimizer: Make,
    *,
    op: str = "avg",
    all_reduce: bool = False,
    gather: bool = True,
    clear: Callable[[nn.Module], None] = nn.Module.zero_grad,
) -> None:
    """The right answer, with a switch for each thing that can go wrong."""
    whole = _one_buffer(model)
    own = nn.Parameter(whole.chunk(comm.get_world_size())[comm.get_rank()])
    optimizer = make_optimizer([own])
    for inputs, targets in batches:
        F.mse_loss(model(inputs), targets).backward()
        grads = _grads(model, whole.numel())
        own.grad = torch.empty_like(own)
        if all_reduce:
            comm.all_reduce(grads, op)
            own.grad.copy_(grads.chunk(comm.get_world_size())[comm.get_rank()])
        else:
            comm.reduce_scatter(own.grad, grads, op)
        optimizer.step()
        if gather:
            comm.all_gather(whole, own.detach())
        own.grad = None
        del grads
        clear(model)


def shards_nothing(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """Equal weights prove nothing: every rank still keeps optimizer state for the whole model."""
    optimizer = make_optimizer(list(model.parameters()))
    for inputs, targets in batches:
        F.mse_loss(model(inputs), targets).backward()
        for param in model.parameters():
            assert param.grad is not None
            comm.all_reduce(param.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()


def one_owner_a_parameter(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """Whole parameters are dealt out to ranks: whoever gets the largest holds more than a slice."""
    params, rank, world_size = list(model.parameters()), comm.get_rank(), comm.get_world_size()
    mine = params[rank::world_size]
    optimizer = make_optimizer(mine) if mine else None
    for inputs, targets in batches:
        F.mse_loss(model(inputs), targets).backward()
        for param in params:
            assert param.grad is not None
            comm.all_reduce(param.grad, "avg")
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        for number, param in enumerate(params):
            comm.broadcast(param.data, src=number % world_size)


def keeps_old_gradients(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """Only the slice is cleared; the parameters' own `.grad` adds up from step to step."""
    _train(model, batches, make_optimizer, clear=lambda model: None)


def zeroes_without_freeing(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """A gradient of zeros takes as many bytes as any other: it is set to None to free it."""
    _train(model, batches, make_optimizer, clear=lambda model: model.zero_grad(set_to_none=False))


def forgets_to_gather(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """Each rank has new values for its own slice alone; the others never hear of them."""
    _train(model, batches, make_optimizer, gather=False)


def reduces_everything(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """An all-reduce brings all slices of the mean, of which a rank needs one: 3 Psi, not 2."""
    _train(model, batches, make_optimizer, all_reduce=True)


def sums_over_ranks(model: nn.Module, batches: Batches, make_optimizer: Make) -> None:
    """The gradient of the global batch is the mean of the ranks' gradients, not their sum."""
    _train(model, batches, make_optimizer, op="sum")


# 4.2 pack


def leaves_the_padding(
    flat_param: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> None:
    """Padding is not nothing: it is sent and summed, and a NaN that lies there spreads."""
    for tensor, start in zip(tensors, starts, strict=True):
        flat_param[start : start + tensor.numel()].copy_(tensor.detach().reshape(-1))


def replaces_the_buffer(
    flat_param: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> None:
    """Assigning to the name makes a new tensor; the caller's buffer stays as it was."""
    packed = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    flat_param = F.pad(packed, (0, flat_param.numel() - packed.numel()))


def always_at_the_front(
    flat_param: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> None:
    """Each tensor has its own place in `starts`; written at 0, the next one covers it."""
    for tensor in tensors:
        flat_param[: tensor.numel()].copy_(tensor.detach().reshape(-1))
    flat_param[sum(tensor.numel() for tensor in tensors) :].zero_()


def walks_down_the_columns(
    flat_param: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> None:
    """Rows lie one after the other in a tensor. By columns, a view would read it transposed."""
    for tensor, start in zip(tensors, starts, strict=True):
        turned = tensor.detach().t() if tensor.dim() == 2 else tensor.detach()
        flat_param[start : start + tensor.numel()].copy_(turned.reshape(-1))
    flat_param[starts[-1] + tensors[-1].numel() :].zero_()


# 4.3 intersect


def crosses_when_apart(first: Range, second: Range) -> Range:
    """Of two ranges that share nothing this makes one that stops before it starts."""
    return max(first[0], second[0]), min(first[1], second[1])


def takes_both(first: Range, second: Range) -> Range:
    """That is the range that covers both; shared is only what lies in the one and the other."""
    return min(first[0], second[0]), max(first[1], second[1])


def counts_the_stop(first: Range, second: Range) -> Range:
    """A range ends before its stop: ranges that only touch share no element."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return start, stop if start < stop else start + (start == stop)


def all_or_nothing(first: Range, second: Range) -> Range:
    """A parameter need not lie in one shard as a whole: a shard may begin or end inside it."""
    inside = second[0] <= first[0] and first[1] <= second[1]
    return first if inside else (first[0], first[0])


# 4.4 cut_segments


def _segments(
    bucket: Bucket, shards: Sequence[int], *, shifted: bool = False, padded: bool = False
) -> list[Segment]:
    """The right answer, with switches."""
    origin = flat.shard_bounds(bucket.numel, bucket.world_size, shards[0])[0]
    found = []
    for shard in shards:
        bounds = flat.shard_bounds(bucket.numel, bucket.world_size, shard)
        for position, slot in enumerate(bucket.slots):
            start, stop = flat.intersect(slot.span, bounds)
            if padded and position == len(bucket.slots) - 1 and start < stop:
                stop = bounds[1]
            if start < stop or len(shards) == 1:
                from_ = 0 if shifted else origin
                piece = bucket.target[start - from_ : stop - from_]
                found.append(Segment(position, shard, start - from_, nn.Parameter(piece)))
    return found


def whole_parameters_only(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """A parameter belongs to whoever owns its beginning. But a shard may end inside of it."""
    origin = flat.shard_bounds(bucket.numel, bucket.world_size, shards[0])[0]
    found = []
    for shard in shards:
        low, high = flat.shard_bounds(bucket.numel, bucket.world_size, shard)
        for position, slot in enumerate(bucket.slots):
            start, stop = slot.span if low <= slot.offset < high else (low, low)
            piece = bucket.target[start - origin : stop - origin]
            found.append(Segment(position, shard, start - origin, nn.Parameter(piece)))
    return [s for s in found if s.param.numel() or len(shards) == 1]


def skips_empty_pieces(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """Lists of different lengths on the ranks: segment 2 is then another parameter on each."""
    return [s for s in _segments(bucket, shards) if s.param.numel()]


def copies_the_piece(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """A copy is updated where nobody reads it: a segment is a view into what is updated."""
    return [
        Segment(s.slot, s.shard, s.start, nn.Parameter(s.param.detach().clone()))
        for s in _segments(bucket, shards)
    ]


def counts_from_the_bucket(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """Positions in the bucket are not positions in `target`, which begins with the own shard."""
    return _segments(bucket, shards, shifted=True)


def steps_on_the_padding(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """Padding belongs to the shard and to no parameter: the optimizer has no business there."""
    return _segments(bucket, shards, padded=True)


# 4.5 step_bucket


def _as_wide(bucket: Bucket, factor: torch.Tensor | None) -> torch.Tensor:
    """Return the reduced gradients in the dtype of the target, multiplied with the factor."""
    assert bucket.reduced is not None
    wide = bucket.reduced.to(bucket.target.dtype)
    return wide if factor is None else wide.mul(factor)


def _end(bucket: Bucket) -> None:
    for segment in bucket.segments:
        segment.param.grad = None
    bucket.reduced = None
    bucket.state = GradState.EMPTY


def _hand_out(bucket: Bucket, grad: torch.Tensor, unused: set[int]) -> None:
    for segment in bucket.segments:
        if segment.slot not in unused:
            segment.param.grad = grad[segment.start : segment.start + segment.param.numel()]


def never_forgets(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """The used gradients stay, and the next step's mean is added to them."""
    _hand_out(bucket, _as_wide(bucket, factor), unused)
    groups.step(bucket)
    for segment in bucket.segments:
        segment.param.grad = None


def steps_once_a_parameter(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """One step for each parameter: those that have their gradient already move several times."""
    grad = _as_wide(bucket, factor)
    for segment in bucket.segments:
        if segment.slot not in unused:
            segment.param.grad = grad[segment.start : segment.start + segment.param.numel()]
            groups.step(bucket)
    _end(bucket)


def always_the_first_gradients(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """A segment's gradients begin at its `start`; here all segments get the first ones."""
    grad = _as_wide(bucket, factor)
    for segment in bucket.segments:
        if segment.slot not in unused:
            segment.param.grad = grad[: segment.param.numel()]
    groups.step(bucket)
    _end(bucket)


def steps_what_nobody_used(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """A gradient of zeros is one: weight decay and averages act on it. Unused means None."""
    _hand_out(bucket, _as_wide(bucket, factor), set())
    groups.step(bucket)
    _end(bucket)


def forgets_the_factor(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """Clipping and the loss scale come in as one factor; without it gradients are not clipped."""
    _hand_out(bucket, _as_wide(bucket, None), unused)
    groups.step(bucket)
    _end(bucket)


def holds_on_to_the_views(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """A slice keeps its whole buffer alive: while a segment has a `.grad`, nothing is freed."""
    _hand_out(bucket, _as_wide(bucket, factor), unused)
    groups.step(bucket)
    bucket.reduced = None
    bucket.state = GradState.EMPTY


def forgets_the_state(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """The gradients have gone and the bucket still says that they are there: REDUCED, not EMPTY."""
    _hand_out(bucket, _as_wide(bucket, factor), unused)
    groups.step(bucket)
    for segment in bucket.segments:
        segment.param.grad = None
    bucket.reduced = None


def takes_numbers_for_slots(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """Segment i is parameter i where a rank owns one shard; at stage 0 a parameter has several."""
    grad = _as_wide(bucket, factor)
    for number, segment in enumerate(bucket.segments):
        if number not in unused:
            segment.param.grad = grad[segment.start : segment.start + segment.param.numel()]
    groups.step(bucket)
    _end(bucket)


def multiplies_in_16_bits(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """Multiplied before they are converted, the gradients are rounded to 16 bits once more."""
    assert bucket.reduced is not None
    if factor is not None:
        bucket.reduced.mul_(factor)
    _hand_out(bucket, _as_wide(bucket, None), unused)
    groups.step(bucket)
    _end(bucket)


# 4.6 Zero1


class _Right(ddp.DDP):
    """Stage 1, as the others vary it."""

    stage = 1

    def owned_shards(self, bucket: Bucket) -> list[int]:
        return [bucket.rank]

    def reduce(self, bucket: Bucket) -> None:
        outgoing, op = self.outgoing(bucket), self.options.reduce_op
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        if self.options.all_reduce:
            bucket.work = comm.all_reduce(outgoing, op, async_op=True)
        else:
            bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, op, async_op=True)

    def publish(self, bucket: Bucket) -> comm.Work | None:
        return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True)


class ShardsNothing(ddp.DDP):
    """The same weights as stage 0, and the same bytes: nothing has been sharded."""

    stage = 1


class NeverPublishes(_Right):
    """A rank has updated its own slice; forward needs the new values of all the others too."""

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Tell nobody."""
        return None


class UpdatesTheNextSlice(_Right):
    """The mean arrives for the own slice and another slice is updated: gradients of strangers."""

    def owned_shards(self, bucket: Bucket) -> list[int]:
        """Own the slice of the next rank."""
        return [(bucket.rank + 1) % bucket.world_size]


class Sums(_Right):
    """Adam hides a factor of N, since it divides by the size of the gradient; SGD does not."""

    def reduce(self, bucket: Bucket) -> None:
        """Add up in place of averaging."""
        outgoing = self.outgoing(bucket)
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, "sum", async_op=True)


class ReducesEverything(_Right):
    """All slices of the mean come, and N - 1 of them are thrown away: 3 Psi a step, not 2."""

    def reduce(self, bucket: Bucket) -> None:
        """All-reduce whatever the options say."""
        outgoing = self.outgoing(bucket)
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        bucket.work = comm.all_reduce(outgoing, self.options.reduce_op, async_op=True)


class WaitsInBackward(_Right):
    """A call that waits keeps backward from going on: nothing of the traffic is hidden."""

    def reduce(self, bucket: Bucket) -> None:
        """Wait for each mean at once."""
        outgoing, op = self.outgoing(bucket), self.options.reduce_op
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        if self.options.all_reduce:
            bucket.work = comm.all_reduce(outgoing, op)
        else:
            bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, op)


class PublishesOneByOne(_Right):
    """A gather that is waited for where it starts keeps the next bucket's update from beginning."""

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Wait for each gather at once."""
        return comm.all_gather(bucket.flat_param, bucket.shard)


class TakesTheWholeMean(_Right):
    """An all-reduce brings every slice, and the rank updates one: `incoming` is that one alone."""

    def reduce(self, bucket: Bucket) -> None:
        """Let all slices come in."""
        super().reduce(bucket)
        if self.options.all_reduce:
            bucket.incoming = bucket.fresh


class AlwaysAverages(_Right):
    """The configuration may ask for a sum over the ranks, and `options.reduce_op` says so."""

    def reduce(self, bucket: Bucket) -> None:
        """Average whatever the options say."""
        outgoing = self.outgoing(bucket)
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        if self.options.all_reduce:
            bucket.work = comm.all_reduce(outgoing, "avg", async_op=True)
        else:
            bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, "avg", async_op=True)
