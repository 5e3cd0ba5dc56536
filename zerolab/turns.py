"""Chapter 6: one unit's turn. Its parameters appear while they are used, and go again.

Owns, for every unit of stage 3, where its parameters are:

    SHARDED    only the own slice exists; the parameters are NaN scalars expanded to shape
    IN_FLIGHT  memory is there and a gather is filling it
    UNSHARDED  the parameters are whole and may be used

and the ways between: `fetch` starts a gather, `unshard` ends it, `reshard` frees. A bucket keeps
its tensors all the time. What comes and goes is the memory behind them, so that the tensors
which autograd saved in forward are whole again in backward without being told.

Source: FSDP2's states; DeepSpeed's `fetch_sub_module` and `release_sub_module`.
"""

from collections.abc import Mapping
from enum import Enum

from . import comm, sharded_param
from .bucket import Bucket, Unit


class ShardState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    IN_FLIGHT = "in flight"
    UNSHARDED = "unsharded"


def unshard_bucket(bucket: Bucket) -> comm.Work:
    """Give a sharded bucket its memory back and start gathering all slices into it.

    Args:
        bucket: its `flat_param` [padded_numel] has a storage of 0 bytes, its `shard`
            [shard_numel] is whole. The collective carries `bucket.name` as its label.

    Returns:
        The collective, which has only been started.
    """
    nbytes = bucket.padded_numel * bucket.flat_param.element_size()
    bucket.flat_param.untyped_storage().resize_(nbytes)
    return comm.all_gather(bucket.flat_param, bucket.shard, async_op=True, label=bucket.name)


def reshard_bucket(bucket: Bucket) -> None:
    """Take the memory of a bucket's full parameters away; the tensors stay.

    Afterwards `flat_param` is the same tensor with a storage of 0 bytes, and every parameter
    keeps its shape and holds one NaN: a number that spreads, where no memory at all would
    end the process.
    """
    for slot in bucket.slots:
        slot.param.data = sharded_param.placeholder(slot.param)
    bucket.flat_param.untyped_storage().resize_(0)


def unit_numel(unit: Unit) -> int:
    """Return how many elements of a unit appear when it is unsharded."""
    return sum(bucket.padded_numel for bucket in unit.buckets if not bucket.persistent)


def units_ahead(unit: Unit, follower: Mapping[Unit, Unit], limit: int | None) -> list[Unit]:
    """Return the units to gather while `unit` computes, nearest first.

    With followers a -> b -> c, and units of 10 elements each: for a and None it is [b]; for a
    and a limit of 25 it is [b, c]; for a and 5, and for c, it is []. No unit comes twice, and
    `unit` itself never, also where the followers run in a circle.

    Args:
        unit: the one whose turn it is.
        follower: who had the next turn, the last time that model ran in this direction.
        limit: most elements (`unit_numel`) of all these units together; None for one unit,
            whatever its size.
    """
    ahead: list[Unit] = []
    numel, following = 0, follower.get(unit)
    while following is not None and following is not unit and following not in ahead:
        numel += unit_numel(following)
        if limit is not None and numel > limit:
            break
        ahead.append(following)
        following = follower.get(following) if limit is not None else None
    return ahead


class Turn:
    """One unit: where its parameters are now, and who still needs them.

    The buckets of the unit that are sharded are in `buckets`: small ones that stay whole on
    every rank (`persistent`) have no turns.
    """

    def __init__(self, unit: Unit) -> None:
        """Begin sharded."""
        self.buckets = [bucket for bucket in unit.buckets if not bucket.persistent]
        self.state = ShardState.SHARDED
        self.works: list[comm.Work] = []  # gathers that nobody has waited for
        self.borrowed = False  # read outside its own turn
        self.holds = 0  # `with` blocks that need it whole
        self.inputs_pending = 0  # forward calls whose inputs still wait for their gradients
        self.missing: set[int] = set()  # ids of parameters without their gradient yet

    def fetch(self) -> None:
        """Start gathering a SHARDED unit, which then is IN_FLIGHT; leave any other as it is."""
        if self.state is ShardState.SHARDED:
            self.state = ShardState.IN_FLIGHT
            for bucket in self.buckets:
                self.works.append(unshard_bucket(bucket))

    def unshard(self) -> None:
        """Return when the unit is UNSHARDED: gathered, and its parameters are the views again.

        `bucket.views` are the parameters' places in `flat_param`, in the order of the slots.
        """
        self.fetch()
        if self.state is ShardState.IN_FLIGHT:
            for work in self.works:
                work.wait()
            self.works = []
            for bucket in self.buckets:
                for slot, view in zip(bucket.slots, bucket.views, strict=True):
                    slot.param.data = view
            self.state = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Free the unit, which then is SHARDED; a gather still in flight must end first."""
        for work in self.works:
            work.wait()
        self.works = []
        for bucket in self.buckets:
            reshard_bucket(bucket)
        self.state = ShardState.SHARDED
