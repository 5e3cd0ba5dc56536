"""Chapter 4: stage 1. The optimizer's states are sharded: each rank updates only its own slice.

Owns, beside what stage 0 owns, nothing; it owns less: master weights and moments of this
rank's shard only, 12 of the 16 bytes a parameter divided by the number of ranks.

What changes against stage 0, moment by moment:

    post_backward   reduce-scatter in place of all-reduce: only the own slice need be right
    step            update the own slice, then gather everybody's (the other half of the
                    all-reduce that stage 0 did before the step: the same traffic, 2 Psi)

Source: ZeRO (Rajbhandari et al. 2020), section 5.1; DeepSpeed `stage: 1`.
"""

from . import comm, ddp
from .bucket import Bucket


class Zero1(ddp.DDP):
    """Stage 1: optimizer states are sharded, gradients and parameters are whole."""

    stage = 1

    def owned_shards(self, bucket: Bucket) -> list[int]:
        """Return the one rank whose shard this rank updates: itself."""
        return [bucket.rank]

    def reduce(self, bucket: Bucket) -> None:
        """Start the mean of the own slice, written over that slice of the local gradients.

        The rest of the buffer keeps this rank's local gradients, of no use to anybody: it is
        what stage 2 frees.
        """
        outgoing = self.outgoing(bucket)
        bucket.incoming = outgoing[slice(*bucket.bounds)]
        if self.options.all_reduce:
            bucket.work = comm.all_reduce(
                outgoing, self.options.reduce_op, async_op=True, label=bucket.name
            )
        else:
            bucket.work = comm.reduce_scatter(
                bucket.incoming,
                outgoing,
                self.options.reduce_op,
                async_op=True,
                label=bucket.name,
            )

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Start gathering the updated slices of all ranks into the bucket."""
        return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True, label=bucket.name)
