"""Chapter 5: wrong answers to the exercises of 05_gradient_reduce_scatter.

Owns nothing. The docstring of each is what its author believes. Those of the empty page are from
public code: gradients summed and never averaged (Tiny-DeepSpeed), a hook that changes something
else than the gradient (picotron's naive data parallelism), N copies sent where one was meant (an
adaptation of a ZeRO course), earlier micro-batches lost (DeepSpeed pull request 7981).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm, device, zero1
from ...bucket import Bucket, GradState
from ...sim.layouts import Layout

Steps = Iterable[Sequence[tuple[torch.Tensor, torch.Tensor]]]
Make = Callable[..., torch.optim.Optimizer]


# 5.1 train_sharded_gradients


class _Slices:
    """Every parameter padded, and this rank's slice of it: the right answer's data."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.params = list(model.parameters())
        self.whole: dict[torch.Tensor, torch.Tensor] = {}
        self.own: dict[torch.Tensor, nn.Parameter] = {}
        for param in self.params:
            flat = F.pad(param.data.reshape(-1), (0, -param.numel() % self.world_size))
            param.data = flat[: param.numel()].view_as(param)
            self.whole[param] = flat
            self.own[param] = nn.Parameter(flat.chunk(self.world_size)[self.rank])

    def padded(self, param: torch.Tensor) -> torch.Tensor:
        """Return a gradient [padded_numel]."""
        assert param.grad is not None
        return F.pad(param.grad.reshape(-1), (0, self.whole[param].numel() - param.numel()))

    def mean(self, param: torch.Tensor, op: str = "avg") -> torch.Tensor:
        """Return this rank's slice of the mean of a gradient."""
        mean = torch.empty_like(self.own[param])
        comm.reduce_scatter(mean, self.padded(param), op)
        return mean

    def add(self, param: torch.Tensor, mean: torch.Tensor) -> None:
        """Add to what earlier micro-batches left."""
        before = self.own[param].grad
        self.own[param].grad = mean if before is None else before + mean


def _page(
    model: nn.Module,
    steps: Steps,
    make_optimizer: Make,
    on_grad: Callable[[_Slices, torch.Tensor], None] | None,
    *,
    after_backward: Callable[[_Slices, torch.Tensor], None] | None = None,
    scaled: bool = True,
) -> None:
    """The right answer, with a place for what happens to a gradient."""
    slices = _Slices(model)
    hooks = []
    if on_grad is not None:
        for param in slices.params:
            hook = param.register_post_accumulate_grad_hook(lambda p: on_grad(slices, p))
            hooks.append(hook)
    optimizer = make_optimizer(list(slices.own.values()))
    for micro_batches in steps:
        for inputs, targets in micro_batches:
            loss = F.mse_loss(model(inputs), targets)
            (loss / (len(micro_batches) if scaled else 1)).backward()
            del loss
            for param in slices.params if after_backward is not None else ():
                assert after_backward is not None
                after_backward(slices, param)
        optimizer.step()
        for param, own in slices.own.items():
            comm.all_gather(slices.whole[param], own.detach())
            own.grad = param.grad = None
    for hook in hooks:
        hook.remove()


def _reduce(slices: _Slices, param: torch.Tensor) -> None:
    mean = slices.mean(param)
    param.grad = None
    slices.add(param, mean)


def reduces_after_backward(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """After backward all gradients are there at once: the peak has been, and nothing was saved."""
    _page(model, steps, make_optimizer, None, after_backward=_reduce)


def sums_over_ranks(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """Gradients are added up over ranks and never divided by their number."""

    def on_grad(slices: _Slices, param: torch.Tensor) -> None:
        mean = slices.mean(param, "sum")
        param.grad = None
        slices.add(param, mean)

    _page(model, steps, make_optimizer, on_grad)


def changes_something_else(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """The mean is computed, into a tensor that nobody uses; the rank steps on its own gradient."""

    def on_grad(slices: _Slices, param: torch.Tensor) -> None:
        slices.mean(param)
        mine = slices.padded(param).chunk(slices.world_size)[slices.rank].clone()
        param.grad = None
        slices.add(param, mine)

    _page(model, steps, make_optimizer, on_grad)


def counts_earlier_ones_twice(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """The local gradient is never cleared, so each micro-batch sends those before it once more."""

    def on_grad(slices: _Slices, param: torch.Tensor) -> None:
        slices.add(param, slices.mean(param))

    _page(model, steps, make_optimizer, on_grad)


def loses_earlier_ones(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """Each micro-batch's mean takes the place of the one before it; they are to be added up."""

    def on_grad(slices: _Slices, param: torch.Tensor) -> None:
        slices.own[param].grad = slices.mean(param)
        param.grad = None

    _page(model, steps, make_optimizer, on_grad)


def forgets_to_divide(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """The loss of a step is the mean over its micro-batches; their sum makes the step longer."""
    _page(model, steps, make_optimizer, _reduce, scaled=False)


def sends_a_copy_to_each(model: nn.Module, steps: Steps, make_optimizer: Make) -> None:
    """One copy for every rank is sent, end to end, where each rank's slice was meant: N times."""

    def on_grad(slices: _Slices, param: torch.Tensor) -> None:
        copies = slices.padded(param).repeat(slices.world_size)
        whole = torch.empty_like(slices.whole[param])
        comm.reduce_scatter(whole, copies, "avg")
        param.grad = None
        slices.add(param, whole.chunk(slices.world_size)[slices.rank].clone())

    _page(model, steps, make_optimizer, on_grad)


# 5.2 keep_own_slice


def asks_for_contiguous(bucket: Bucket) -> torch.Tensor:
    """A slice of one row is contiguous already: this is the slice itself, and holds the whole."""
    assert bucket.incoming is not None
    with device.tag("grad" if bucket.reduced is None else "bucket"):
        return bucket.incoming.contiguous()


def makes_room_only(bucket: Bucket) -> torch.Tensor:
    """Room of the right size is not yet the values in it."""
    assert bucket.incoming is not None
    with device.tag("grad" if bucket.reduced is None else "bucket"):
        return torch.zeros_like(bucket.incoming)


def widens_it(bucket: Bucket) -> torch.Tensor:
    """In fp32 the slice takes twice its bytes; it was to stay as it came."""
    assert bucket.incoming is not None
    with device.tag("grad" if bucket.reduced is None else "bucket"):
        return bucket.incoming.to(torch.float32, copy=True)


def always_calls_it_gradient(bucket: Bucket) -> torch.Tensor:
    """What is only added to the gradients that are there does not stay: it is on its way."""
    assert bucket.incoming is not None
    with device.tag("grad"):
        return bucket.incoming.clone()


# 5.5 reduction_passes


def once_a_step(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """Accumulation makes synchronisation rarer only where the local gradients can stay."""
    every = bool(every_micro_step)
    return (accum_steps if every else 1) * (2 if stage == 0 or all_reduce else 1)


def every_time(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """Stages 0 and 1 keep their gradients whole, so they can wait for the last micro-batch."""
    every = True if every_micro_step is None else every_micro_step
    return (accum_steps if every else 1) * (2 if stage == 0 or all_reduce else 1)


def counts_an_all_reduce_once(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """An all-reduce is a reduce-scatter and an all-gather: every element goes twice."""
    every = stage >= 2 if every_micro_step is None else every_micro_step
    return accum_steps if every else 1


def nobody_may_decide(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """The schedule can be chosen: `every_micro_step` counts where it is not None."""
    return (accum_steps if stage >= 2 else 1) * (2 if stage == 0 or all_reduce else 1)


def stage_0_scatters(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """At stage 0 every rank updates everything, so every rank needs the whole mean: all-reduce."""
    every = stage >= 2 if every_micro_step is None else every_micro_step
    return (accum_steps if every else 1) * (2 if all_reduce else 1)


# 5.4 bucket_peak_numel


def _simulated(
    sizes: Layout,
    arrivals: Sequence[int] | None,
    in_flight: int,
    *,
    padded: bool = True,
    in_order: bool = True,
    freed_at_launch: bool = False,
    freed: bool = True,
    one_at_a_time: bool = False,
) -> int:
    """The right answer, with switches."""
    buckets = sizes.trained
    arrivals = arrivals or [i for i, each in enumerate(buckets) for _ in each.numels]
    numels = [each.padded_numel if padded else each.numel for each in buckets]
    waiting = [len(each.numels) for each in buckets]
    held: set[int] = set()
    sent: set[int] = set()
    flying: deque[int] = deque()
    most = 0
    for index in arrivals:
        held.add(index)
        waiting[index] -= 1
        most = max(most, sum(numels[i] for i in held))
        ready = [i for i in range(len(buckets)) if i not in sent and not waiting[i]]
        ready = ready[:1] if one_at_a_time else ready
        for number in ready:
            if in_order and any(i not in sent for i in range(number)):
                break
            sent.add(number)
            flying.append(number)
            while len(flying) > (0 if freed_at_launch else in_flight) and freed:
                held.discard(flying.popleft())
    return most


def forgets_what_flies(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """A bucket on its way still takes its memory: it is free when the reduction has ended."""
    return _simulated(sizes, arrivals, in_flight, freed_at_launch=True)


def never_frees(sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1) -> int:
    """If nothing were freed, stage 2 would hold what stage 1 holds: the whole model."""
    return _simulated(sizes, arrivals, in_flight, freed=False)


def sends_what_is_full(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """A full bucket waits for those before it: the order is the same on every rank."""
    return _simulated(sizes, arrivals, in_flight, in_order=False)


def leaves_out_padding(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """The buffer holds the padding too, from its first gradient on."""
    return _simulated(sizes, arrivals, in_flight, padded=False)


def sends_one_a_gradient(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """A gradient can complete the bucket that several others wait for: then all of them leave."""
    return _simulated(sizes, arrivals, in_flight, one_at_a_time=True)


def two_of_the_largest(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """Two at a time is a rule of thumb: a bucket that gets an early gradient waits beside them."""
    numels = sorted((each.padded_numel for each in sizes.trained), reverse=True)
    return sum(numels[: 1 + in_flight])


# 5.3 Zero2


class _Right(zero1.Zero1):
    """Stage 2, as the others vary it."""

    stage = 2
    fresh_kind = "bucket"

    def reduce(self, bucket: Bucket) -> None:
        outgoing, op = self.outgoing(bucket), self.options.reduce_op
        if self.options.all_reduce:
            bucket.incoming = outgoing[slice(*bucket.bounds)]
            bucket.work = comm.all_reduce(outgoing, op, async_op=True)
            return
        with device.tag(_kind(bucket)):
            bucket.incoming = outgoing.new_empty(bucket.shard_numel)
        bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, op, async_op=True)

    def receive(self, bucket: Bucket) -> None:
        assert bucket.work is not None and bucket.incoming is not None
        bucket.work.wait()
        if self.options.all_reduce:
            with device.tag(_kind(bucket)):
                bucket.incoming = bucket.incoming.clone()
        _add(bucket, bucket.incoming.to(self.grad_dtype(bucket)))


def _kind(bucket: Bucket) -> str:
    return "grad" if bucket.reduced is None else "bucket"


def _add(bucket: Bucket, mean: torch.Tensor) -> None:
    """Keep a mean, as `reducing.receive` does."""
    if bucket.reduced is None:
        bucket.reduced = mean
        device.set_kind(mean, "grad")
    else:
        bucket.reduced.add_(mean)
    bucket.work = bucket.incoming = None
    bucket.state = GradState.REDUCED if bucket.fresh is None else GradState.FILLING


class ReducesInPlace(zero1.Zero1):
    """The mean is written over the full gradients, as at stage 1, and so all of them stay."""

    stage = 2
    fresh_kind = "bucket"


class KeepsAList(_Right):
    """Somebody keeps the full buffers, to look at them later: nothing is freed until then."""

    def reduce(self, bucket: Bucket) -> None:
        """Remember what was sent."""
        vars(self).setdefault("sent", []).append(bucket.fresh)
        super().reduce(bucket)

    def receive(self, bucket: Bucket) -> None:
        """Forget it when the last bucket is there."""
        super().receive(bucket)
        if bucket is self.trainable[-1]:
            vars(self)["sent"].clear()


class LosesEarlierMicroSteps(_Right):
    """The mean of each micro-step takes the place of the one before, where it is to be added."""

    def receive(self, bucket: Bucket) -> None:
        """Forget what was there."""
        bucket.reduced = None
        super().receive(bucket)


class ReducesTheSumAgain(_Right):
    """What earlier micro-steps left is reduced already: put back in, it is averaged once more."""

    def reduce(self, bucket: Bucket) -> None:
        """Send the earlier mean along."""
        if bucket.reduced is not None and bucket.fresh is not None:
            bucket.fresh[slice(*bucket.bounds)] += bucket.reduced
        super().reduce(bucket)


class NeverWaits(_Right):
    """Until `wait()` has returned, what the collective writes to may hold anything."""

    def receive(self, bucket: Bucket) -> None:
        """Use the tensor at once."""
        mean = bucket.incoming
        assert mean is not None
        _add(bucket, mean.clone())


class ReducesEverything(_Right):
    """All slices of the mean come to every rank, to keep one: 3 Psi a step, not 2."""

    def reduce(self, bucket: Bucket) -> None:
        """All-reduce whatever the options say."""
        outgoing = self.outgoing(bucket)
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        bucket.work = comm.all_reduce(outgoing, self.options.reduce_op, async_op=True)

    def receive(self, bucket: Bucket) -> None:
        """Keep the own slice."""
        assert bucket.work is not None and bucket.incoming is not None
        bucket.work.wait()
        with device.tag(_kind(bucket)):
            bucket.incoming = bucket.incoming.clone()
        _add(bucket, bucket.incoming)


class WaitsInBackward(_Right):
    """Each reduction is waited for where it starts: backward stands still meanwhile."""

    def reduce(self, bucket: Bucket) -> None:
        """Wait at once."""
        outgoing = self.outgoing(bucket)
        with device.tag(_kind(bucket)):
            bucket.incoming = outgoing.new_empty(bucket.shard_numel)
        bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, self.options.reduce_op)


class CountsAllAsGradients(_Right):
    """The first mean stays and is the gradient; a later one is added to it and goes again."""

    def reduce(self, bucket: Bucket) -> None:
        """Count every mean as a gradient."""
        super().reduce(bucket)
        if bucket.incoming is not None and not self.options.all_reduce:
            device.set_kind(bucket.incoming, "grad")


class AlwaysAverages(_Right):
    """The configuration may ask for a sum over the ranks, and `options.reduce_op` says so."""

    def reduce(self, bucket: Bucket) -> None:
        """Average whatever the options say."""
        outgoing = self.outgoing(bucket)
        if self.options.all_reduce:
            super().reduce(bucket)
            return
        with device.tag(_kind(bucket)):
            bucket.incoming = outgoing.new_empty(bucket.shard_numel)
        bucket.work = comm.reduce_scatter(bucket.incoming, outgoing, "avg", async_op=True)


class ForgetsToWaitForAll(_Right):
    """An all-reduce has to be waited for as well, before the own slice of it is kept."""

    def receive(self, bucket: Bucket) -> None:
        """Keep the slice, then wait."""
        if self.options.all_reduce and bucket.incoming is not None:
            with device.tag(_kind(bucket)):
                bucket.incoming = bucket.incoming.clone()
            assert bucket.work is not None
            bucket.work.wait()
            _add(bucket, bucket.incoming)
            return
        super().receive(bucket)


class KeepsThemAsTheyCame(_Right):
    """Gradients may travel in 16 bits and be added up in 32: `grad_dtype` says in which to keep."""

    def receive(self, bucket: Bucket) -> None:
        """Keep every mean in the dtype of the parameters."""
        super().receive(bucket)
        assert bucket.reduced is not None
        bucket.reduced = bucket.reduced.to(bucket.dtype)
        device.set_kind(bucket.reduced, "grad")
