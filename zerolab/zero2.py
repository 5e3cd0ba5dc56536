"""Chapter 5: stage 2. Gradients are sharded too: a bucket is freed as soon as it is reduced.

Owns, beside what stage 1 owns, one shard of gradients in place of all of them: 2 more of the
16 bytes a parameter divided by the number of ranks.

What changes against stage 1, moment by moment:

    post_backward   the mean of the own slice goes into a tensor of its own, so that the full
                    bucket dies when the collective ends. While backward runs there is one
                    bucket being filled and one on its way, never a full set of gradients.

The price: with gradient accumulation the local gradients are gone after each micro-step, so
each micro-step reduces. G micro-steps move (G + 1) Psi where stage 1 moves 2 Psi.

Source: ZeRO, section 5.2; DeepSpeed `stage: 2` (which all-reduces by default).
"""

import torch

from . import comm, device, reducing, zero1
from .bucket import Bucket


def kind_of_mean(bucket: Bucket) -> str:
    """Return how the mean of the own slice is counted: it stays, or is added and gone."""
    return "grad" if bucket.reduced is None else "bucket"


def keep_own_slice(bucket: Bucket) -> torch.Tensor:
    """Return the mean of the own slice [shard_numel], in memory of its own, counted by its kind.

    When the caller lets go of `bucket.incoming`, the full gradients must be free.

    Args:
        bucket: `bucket.incoming` [shard_numel] is a slice of the full gradients after an
            all-reduce; `kind_of_mean(bucket)` is how the ledger is to count the result.
    """
    assert bucket.incoming is not None
    with device.tag(kind_of_mean(bucket)):
        return bucket.incoming.clone()


class Zero2(zero1.Zero1):
    """Stage 2: optimizer states and gradients are sharded, parameters are whole."""

    stage = 2
    fresh_kind = "bucket"  # the buffer that backward fills dies when it has been reduced

    def reduce(self, bucket: Bucket) -> None:
        """Start the mean of the own slice, into a new tensor of one shard.

        The full gradients are held by the collective alone: they are free when it has ended.
        With `options.all_reduce` all slices of the mean are received, over the gradients.
        """
        outgoing, op = self.outgoing(bucket), self.options.reduce_op
        if self.options.all_reduce:
            bucket.incoming = outgoing[slice(*bucket.bounds)]
            bucket.work = comm.all_reduce(outgoing, op, async_op=True, label=bucket.name)
            return
        with device.tag(kind_of_mean(bucket)):
            bucket.incoming = outgoing.new_empty(bucket.shard_numel)
        bucket.work = comm.reduce_scatter(
            bucket.incoming, outgoing, op, async_op=True, label=bucket.name
        )

    def receive(self, bucket: Bucket) -> None:
        """Wait for the mean and add it to what earlier micro-steps left, as stage 0 does.

        After an all-reduce, first keep the own slice and let the others go.
        """
        assert bucket.work is not None
        if self.options.all_reduce:
            bucket.work.wait()
            bucket.incoming = keep_own_slice(bucket)
        reducing.receive(bucket, self.grad_dtype(bucket))
