"""Chapter 6: stage 3. Parameters are sharded as well: they appear for a unit's turn and go again.

Owns nothing beside what `unit_sharding` owns: the shard of every bucket in place of the bucket,
and a `Turn` for every unit.

What changes against stage 2, moment by moment:

    pre_forward     unshard the unit, start gathering the one that follows
    post_forward    reshard it (the saved tensors of autograd keep pointing at its memory)
    pre_backward    unshard it again, into that very memory; start gathering the next
    post_backward   when all its gradients are there, reshard; the gradients go as in stage 2
    step            update the own slice; nothing to publish: the next forward gathers it

Each unit is gathered twice and reduced once: 3 Psi a step in place of 2.

Source: ZeRO, section 5.3; DeepSpeed `stage: 3`; FSDP2's states and moments.
"""

from . import comm, turns, unit_sharding, watching
from .bucket import Bucket, Unit


class Zero3(unit_sharding.UnitSharding):
    """Stage 3: optimizer states, gradients and parameters are sharded.

    What `unit_sharding` has for the moments: `fetch(unit)`, `unshard(unit)`, `reshard(unit)`;
    `note_turn(unit, in_backward)`, and what came of it, `followers[in_backward]`;
    `needed_again(unit)` after forward, `done_with(unit)` in backward; `turns[unit]`, `unit_of`.
    """

    stage = 3

    def take_turn(self, unit: Unit, in_backward: bool) -> None:
        """Make a unit whole, note whose turn it is, and start gathering those that follow.

        Nothing is gathered ahead with `options.prefetch` off; `options.prefetch_numel` is the
        limit for `turns.units_ahead`.
        """
        self.unshard(unit)
        self.note_turn(unit, in_backward)
        if self.options.prefetch:
            followers, limit = self.followers[in_backward], self.options.prefetch_numel
            for follower in turns.units_ahead(unit, followers, limit):
                self.fetch(follower)

    def pre_forward(self, unit: Unit) -> None:
        """A unit's module is about to run; inside backward it is being recomputed."""
        self.take_turn(unit, watching.in_backward())

    def post_forward(self, unit: Unit) -> None:
        """A unit's module has run: free the unit, unless it is needed again."""
        if not self.needed_again(unit):
            self.reshard(unit)

    def pre_backward(self, unit: Unit) -> None:
        """Backward enters a unit, by the gradient of its output."""
        self.take_turn(unit, in_backward=True)

    def grad_ready(self, bucket: Bucket, position: int) -> None:
        """Take a gradient as stage 2 does; with the last one of its unit, backward may be done.

        `turns[unit].missing` holds the ids of the unit's parameters that wait for a gradient.
        """
        super().grad_ready(bucket, position)
        unit = self.unit_of[bucket]
        self.turns[unit].missing.discard(id(bucket.slots[position].param))
        self.post_backward_of(unit)

    def post_backward_of(self, unit: Unit) -> None:
        """A gradient of a unit, or of its inputs, has come: free the unit once it is done with."""
        if self.done_with(unit):
            self.reshard(unit)

    def publish(self, bucket: Bucket) -> comm.Work | None:
        """Tell nobody, and return None: the next forward gathers the new slices.

        What is whole between two steps needs them at once, by a gather as at stage 2: persistent
        buckets, and units that somebody holds (`turns[unit].holds` of them).
        """
        if not bucket.persistent and not self.turns[self.unit_of[bucket]].holds:
            return None
        return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True, label=bucket.name)
