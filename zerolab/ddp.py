"""Chapter 3: data parallelism, stage 0. Every rank holds everything and the gradients are averaged.

Owns the buckets of a model on this rank and the hooks that fill them. The classes of the
next stages derive from `DDP` and say only what they do differently: what they own, how they
reduce, what they publish.

The five moments, in the order of a step:

    pre_forward, post_forward   (stage 3) parameters appear before they are used, go after
    pre_backward                (stage 3) and once more
    post_backward               a bucket has all its gradients: reduce it while backward runs on
    step                        update what this rank owns, publish it

Buckets are reduced strictly in index order on every rank: a collective has no name tag, so
the order is the only thing that tells the ranks which bucket they are talking about.

Source: Li et al., PyTorch Distributed (2020), section 3; DeepSpeed `stage: 0`.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from . import bucket as buckets_
from . import comm, device, flat, optim, reducing, sharded_param
from .bucket import Bucket, GradState, Unit
from .options import StageOptions


class DDP:
    """Stage 0. All ranks must construct it together and call the same methods in the same order.

    After backward the parameters' own `.grad` is None: gradients live in the buckets.
    """

    stage = 0
    fresh_kind = "grad"  # the buffer that backward fills is also where the mean stays

    def __init__(self, root: nn.Module, units: list[Unit], options: StageOptions) -> None:
        """Lay every bucket out and register the hooks.

        Args:
            root: the whole model.
            units: its parameters, cut into units and buckets.
            options: precision and traffic.
        """
        self.root = root
        self.units = units
        self.options = options
        self.buckets: list[Bucket] = sorted(
            (bucket for unit in units for bucket in unit.buckets), key=lambda bucket: bucket.index
        )
        self.trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self.in_flight: deque[Bucket] = deque()
        self.next_launch = 0  # position in self.trainable
        self.flushed = True  # no gradient has arrived since the last flush
        self.flushes = 0  # since the last micro-step ended
        self.boundary = True  # this micro-step ends with an optimizer step
        self.no_sync = False  # the user wants gradients to stay local for now
        self.handles: list = []
        for bucket in self.buckets:
            self.place(bucket)
        self.register_hooks()

    def __repr__(self) -> str:
        return f"<stage {self.stage}>"

    # -- layout: where parameters live ------------------------------------------------------

    def owned_shards(self, bucket: Bucket) -> list[int]:
        """Return the ranks whose shards this rank updates: here all of them."""
        return list(range(bucket.world_size))

    def owned_range(self, bucket: Bucket) -> flat.Range:
        """Return the positions in the bucket of what this rank updates."""
        shards = self.owned_shards(bucket)
        start, _ = flat.shard_bounds(bucket.numel, bucket.world_size, shards[0])
        _, stop = flat.shard_bounds(bucket.numel, bucket.world_size, shards[-1])
        return start, stop

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """Return the parameters this rank updates [owned], as a slice of the bucket."""
        return bucket.flat_param[slice(*self.owned_range(bucket))]

    @torch.no_grad()
    def place(self, bucket: Bucket) -> None:
        """Move a bucket's parameters into one flat buffer; rank 0's values win everywhere.

        Gradients from before are gone: an `optimizer.zero_grad()` would no longer find them.
        """
        params = [slot.param for slot in bucket.slots]
        starts = [slot.offset for slot in bucket.slots]
        exact = torch.empty(bucket.padded_numel, dtype=params[0].dtype, device=bucket.device)
        sharded_param.pack(exact, params, starts)
        comm.broadcast(exact, src=0, purpose="control")
        bucket.flat_param = exact.to(bucket.dtype)
        device.set_kind(bucket.flat_param, "param")
        bucket.shard = self.place_shard(bucket)
        for slot in bucket.slots:
            slot.param.data = flat.view(bucket.flat_param, slot.offset, slot.shape)
            bucket.views.append(slot.param.data)
        if bucket.trainable:
            for param in params:
                param.grad = None
            self.place_target(bucket, exact)

    def place_shard(self, bucket: Bucket) -> torch.Tensor:
        """Return the own slice [shard_numel]: here a view of the bucket."""
        return bucket.flat_param[slice(*bucket.bounds)]

    def place_target(self, bucket: Bucket, exact: torch.Tensor) -> None:
        """Set what the optimizer updates: the owned parameters, or an fp32 copy of them.

        The copy is made from the values before they were rounded to 16 bits.
        """
        bucket.target = self.owned(bucket)
        if self.options.mixed:
            with device.tag("master"):
                own = exact[slice(*self.owned_range(bucket))]
                bucket.target = bucket.master = own.to(torch.float32, copy=True)
        bucket.segments = optim.cut_segments(bucket, self.owned_shards(bucket))

    # -- hooks ------------------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Ask autograd to call `grad_ready` when it has accumulated a parameter's gradient.

        A parameter that the optimizer has and that is frozen may be unfrozen later: torch only
        takes a hook while it is not.
        """
        for bucket in self.trainable:
            for position, slot in enumerate(bucket.slots):
                hook, frozen = _weak_hook(self, bucket, position), not slot.param.requires_grad
                slot.param.requires_grad_(True)
                self.handles.append(slot.param.register_post_accumulate_grad_hook(hook))
                slot.param.requires_grad_(not frozen)

    def remove_hooks(self) -> None:
        """Take every hook out again."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def grad_dtype(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which this bucket's gradients wait."""
        return self.options.grad_dtype or bucket.dtype

    @torch.no_grad()
    def grad_ready(self, bucket: Bucket, position: int) -> None:
        """Take one gradient out of the parameter; with the last of a bucket, reduce it."""
        if self.flushed:
            self.begin_backward()
        buckets_.collect(bucket, position, self.grad_dtype(bucket), self.fresh_kind)
        if self.reducing and bucket.complete:
            self.post_backward()

    @property
    def reducing(self) -> bool:
        """Whether gradients are reduced in this micro-step."""
        return (self.boundary or self.options.every_micro_step) and not self.no_sync

    # -- the moments ------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """Nothing to do: every parameter is always here."""

    def post_forward(self, unit: Unit) -> None:
        """Nothing to do."""

    def pre_backward(self, unit: Unit) -> None:
        """Nothing to do."""

    def begin_backward(self) -> None:
        """Start a pass over the buckets."""
        self.flushed = False
        self.next_launch = 0

    def post_backward(self) -> None:
        """Launch the reductions whose turn has come: complete buckets, in index order."""
        reducing.post_backward(self)

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Reduce what is left, in index order, and wait for everything.

        Parameters that got no gradient on this rank count as zeros here: another rank may
        have used them.
        """
        if self.flushed:
            self.begin_backward()
        reducing.finish_backward(self)
        comm.release_scratch()
        self.flushed = True
        self.flushes += 1

    def receive_all(self) -> None:
        """Wait for every bucket that is on its way."""
        while self.in_flight:
            self.receive(self.in_flight.popleft())

    @torch.no_grad()
    def send_again(self, buckets: Sequence[Bucket]) -> None:
        """Reduce buckets a second time; all ranks call it together, after backward."""
        reducing.send_again(self, buckets)

    def end_micro_step(self) -> None:
        """Flush if nobody did: the user called `loss.backward()` and not `engine.backward`."""
        if self.flushes == 0 or not self.flushed:
            self.finish_backward()
        self.flushes = 0

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket on its way, and wait for an older one if too many are."""
        buckets_.seal(bucket, self.grad_dtype(bucket), self.fresh_kind)
        self.reduce(bucket)
        bucket.filled.clear()
        bucket.fresh = None
        bucket.state = GradState.IN_FLIGHT
        self.in_flight.append(bucket)
        while len(self.in_flight) > self.options.in_flight:
            self.receive(self.in_flight.popleft())

    def outgoing(self, bucket: Bucket) -> torch.Tensor:
        """Return the gradients [padded_numel] in the dtype in which they travel."""
        assert bucket.fresh is not None
        with device.tag("bucket"):
            return bucket.fresh.to(self.options.reduce_dtype or bucket.fresh.dtype)

    def reduce(self, bucket: Bucket) -> None:
        """Start averaging a bucket over the ranks, in place."""
        bucket.incoming = self.outgoing(bucket)
        bucket.work = comm.all_reduce(
            bucket.incoming, self.options.reduce_op, async_op=True, label=bucket.name
        )

    def receive(self, bucket: Bucket) -> None:
        """Wait for a bucket's mean and add it to what earlier micro-steps left."""
        reducing.receive(bucket, self.grad_dtype(bucket))

    @torch.no_grad()
    def step(
        self,
        groups: optim.BucketGroups,
        unused: dict[Bucket, set[int]],
        factor: torch.Tensor | None = None,
    ) -> None:
        """Update the owned parameters bucket by bucket and publish them.

        Args:
            groups: the optimizer over this rank's segments.
            unused: per bucket, the parameters that no rank used since the last step.
            factor: number that the gradients are multiplied with (loss scale, clipping).
        """
        works = []
        for bucket in self.trainable:
            optim.step_bucket(bucket, groups, unused[bucket], factor)
            self.write_back(bucket)
            works.append(self.publish(bucket))
        for work in works:
            if work is not None:
                work.wait()
        comm.release_scratch()

    def write_back(self, bucket: Bucket) -> None:
        """Round the updated master weights to the parameters' dtype."""
        if bucket.master is not None:
            self.owned(bucket).copy_(bucket.master)

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Nothing to tell: every rank computed the same update."""
        return None

    def drop_grads(self) -> None:
        """Forget the gradients of this step: it is skipped."""
        for bucket in self.trainable:
            bucket.reduced = bucket.fresh = None
            bucket.filled.clear()
            bucket.used.clear()
            bucket.state = GradState.EMPTY

    def abandon(self) -> None:
        """A backward or a step broke off: forget its gradients, which are not whole.

        What is in flight ends first, well or not: a collective must not lose its memory.
        """
        reducing.abandon(self)

    def before_model(self) -> None:
        """A forward of the whole model begins."""

    def after_model(self) -> None:
        """A forward of the whole model has ended, well or not."""

    def before_backward(self) -> None:
        """Backward from an output of the whole model begins."""


def _weak_hook(stage: DDP, bucket: Bucket, position: int) -> Callable[[nn.Parameter], None]:
    """Return a hook that keeps neither the stage nor the bucket alive.

    Autograd never collects a post-accumulate hook that refers to its own parameter.
    """
    stage_ref, bucket_ref = weakref.ref(stage), weakref.ref(bucket)

    def hook(param: nn.Parameter) -> None:
        stage, bucket = stage_ref(), bucket_ref()
        if stage is not None and bucket is not None:
            stage.grad_ready(bucket, position)

    return hook
