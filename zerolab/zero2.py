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

from . import comm, device, zero1
from .bucket import Bucket


class Zero2(zero1.Zero1):
    """Stage 2: optimizer states and gradients are sharded, parameters are whole."""

    stage = 2
    fresh_kind = "bucket"  # the buffer that backward fills dies when it has been reduced

    def reduce(self, bucket: Bucket) -> None:
        """Start the mean of the own slice, into a new tensor of one shard."""
        if self.options.all_reduce:
            return super().reduce(bucket)
        outgoing = self.outgoing(bucket)
        with device.tag("grad" if bucket.reduced is None else "bucket"):
            bucket.incoming = torch.empty(
                bucket.shard_numel, dtype=outgoing.dtype, device=bucket.device
            )
        bucket.work = comm.reduce_scatter(
            bucket.incoming, outgoing, self.options.reduce_op, async_op=True, label=bucket.name
        )
        return None

    def receive(self, bucket: Bucket) -> None:
        """Wait for the own slice; after an all-reduce, let the other slices go."""
        if self.options.all_reduce and bucket.work is not None and bucket.incoming is not None:
            bucket.work.wait()
            with device.tag("grad" if bucket.reduced is None else "bucket"):
                bucket.incoming = bucket.incoming.clone()
        super().receive(bucket)
