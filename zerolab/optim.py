"""Chapter 4: a torch optimizer over the part of the parameters that this rank owns.

Owns the segments: for every parameter, the piece of it that lies in an owned shard, as a
view into what the optimizer updates (the fp32 master copy, or the parameters themselves).
The optimizer is an ordinary one from `torch.optim`; it never learns that its parameters are
slices, which is why only elementwise optimizers can be sharded.

Phases of a step: the gradients of one bucket in fp32, one optimizer step on that bucket
alone, the updated values back into the parameters, the gradients gone; then the next bucket.
So the temporaries of a step never exceed one bucket.

Source: ZeRO, section 5.1; torch.optim.Optimizer.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (the first optimizer would load it, and a time-out may hit that)
from torch import nn

from . import device, flat
from .bucket import Bucket, GradState, Segment
from .elementwise import LAYOUT_DEPENDENT
from .errors import UsageError


def cut_segments(bucket: Bucket, shards: Sequence[int]) -> list[Segment]:
    """Cut the parameters of a bucket at the borders of the given shards.

    Fused AdamW is not indifferent to where a tensor is cut (its last few elements take another
    path), so a stage that keeps everything cuts at the same places as one that keeps a shard.

    Args:
        bucket: its `target` [owned] must be set.
        shards: the ranks whose shards `target` holds, in order and adjacent: all, or the own.

    Returns:
        One segment per shard and parameter. With a single shard every parameter has one, of
        no elements if need be, so that segment i is parameter i on every rank; with several,
        empty ones are left out.
    """
    origin = flat.shard_bounds(bucket.numel, bucket.world_size, shards[0])[0]
    segments = []
    for shard in shards:
        bounds = flat.shard_bounds(bucket.numel, bucket.world_size, shard)
        for position, slot in enumerate(bucket.slots):
            start, stop = flat.intersect(slot.span, bounds)
            if start < stop or len(shards) == 1:
                piece = bucket.target[start - origin : stop - origin]
                segments.append(Segment(position, shard, start - origin, nn.Parameter(piece)))
    return segments


def refuse_layout_dependent(optimizer_class: type) -> None:
    """Raise UsageError for an optimizer whose result depends on the shape of a parameter."""
    reason = LAYOUT_DEPENDENT.get(optimizer_class.__name__.lower())
    if reason:
        raise UsageError(
            f"optimizer {optimizer_class.__name__} cannot run on shards: {reason}; "
            "use an elementwise one such as AdamW, SGD or Adagrad"
        )


def carry_states(bucket: Bucket, before: Mapping[Any, Any], after: dict[Any, Any]) -> None:
    """Cut the states of whole parameters as their segments are: the optimizer goes on from them.

    Args:
        bucket: its segments are cut.
        before: states by whole parameter, of an optimizer that has stepped or was loaded.
        after: states by segment.
    """
    shards = {segment.shard for segment in bucket.segments}
    origin = flat.shard_bounds(bucket.numel, bucket.world_size, min(shards, default=0))[0]
    for segment in bucket.segments:
        slot = bucket.slots[segment.slot]
        state, start = before.get(slot.param), origin + segment.start - slot.offset
        if state:
            after[segment.param] = {
                name: _cut_state(value, slot.shape, start, segment.param)
                for name, value in state.items()
            }


def _cut_state(value: Any, shape: torch.Size, start: int, piece: torch.Tensor) -> Any:
    """Return the part of a state that belongs to a piece; what is one number stays whole."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape or not shape:
        return value.clone()
    return value.reshape(-1)[start : start + piece.numel()].to(piece.dtype, copy=True)


class BucketGroups:
    """Which segments of which bucket belong to which parameter group of the optimizer.

    Swapping a group's list for the segments of one bucket is what lets an unmodified torch
    optimizer step bucket by bucket, without a loop over all parameters for each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group_of: dict[int, int]) -> None:
        """Remember the optimizer and the group of every parameter (by id)."""
        self.optimizer = optimizer
        self.group_of = group_of
        self.members: dict[Bucket, list[list[nn.Parameter]]] = {}
        self.stepping = False
        self.handles = [
            optimizer.register_step_pre_hook(_refuse_other_steps(self)),
            optimizer.register_load_state_dict_pre_hook(_refuse_whole_states),
        ]

    def remove_hooks(self) -> None:
        """Let the optimizer go."""
        for handle in self.handles:
            handle.remove()

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Give the optimizer the buckets' segments in place of the model's parameters."""
        everything: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for bucket in buckets:
            mine: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
            for segment in bucket.segments:
                group = self.group_of[id(bucket.slots[segment.slot].param)]
                mine[group].append(segment.param)
                everything[group].append(segment.param)
            self.members[bucket] = mine
        for group, params in zip(self.optimizer.param_groups, everything, strict=True):
            group["params"] = params
        states = dict(self.optimizer.state)
        self.optimizer.state.clear()
        with device.tag("optimizer"):
            for bucket in buckets:
                carry_states(bucket, states, self.optimizer.state)

    def step(self, bucket: Bucket) -> None:
        """Run one optimizer step on the segments of one bucket."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.members[bucket]):
            raise UsageError(
                f"the optimizer had {len(self.members[bucket])} parameter groups at initialize and "
                f"has {len(groups)} now: call add_param_group before initialize, so that the new "
                "parameters get a bucket"
            )
        everything = [group["params"] for group in groups]
        self.stepping = True
        try:
            for group, params in zip(groups, self.members[bucket], strict=True):
                group["params"] = params
            with device.tag("optimizer"):
                self.optimizer.step()
        finally:
            self.stepping = False
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params


def _refuse_other_steps(groups: BucketGroups) -> Callable[..., None]:
    """Return a hook against `optimizer.step()` in a script: it would find no gradient to use."""
    groups_ref = weakref.ref(groups)

    def refuse(*_: Any) -> None:
        groups = groups_ref()
        if groups is not None and not groups.stepping:
            raise UsageError(
                "optimizer.step() was called, but the gradients are with the engine: call "
                "engine.step(), which runs the optimizer and frees the gradients"
            )

    return refuse


def _refuse_whole_states(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Refuse to load states that are not of these segments: torch would notice in the next step."""
    pieces = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    fits = len(keys) == len(pieces) and all(
        value.shape == piece.shape
        for key, piece in zip(keys, pieces, strict=True)
        for value in saved["state"].get(key, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    if not fits:
        raise UsageError(
            "optimizer.load_state_dict: these states are of whole parameters, or of another number "
            "of ranks, and the optimizer steps on this rank's pieces: load them before "
            "initialize, which cuts them as it cuts the parameters"
        )


def step_bucket(
    bucket: Bucket, groups: BucketGroups, unused: set[int], factor: torch.Tensor | None = None
) -> None:
    """Update the owned part of one bucket and free its reduced gradients: it is EMPTY then.

    Args:
        bucket: in state REDUCED; its `reduced` [owned] holds the mean over ranks.
        groups: the optimizer and who is in which of its groups.
        unused: positions of parameters that no rank used since the last step: torch would
            leave their `.grad` None, so neither decay nor moments touch them.
        factor: 0-dim fp32 number the gradients are multiplied with first (loss scale, clipping).
    """
    assert bucket.reduced is not None
    grad = bucket.reduced
    if grad.dtype != bucket.target.dtype or grad.shape != bucket.target.shape:
        grad = grad.to(bucket.target.dtype)
    if factor is not None:
        grad = grad.mul_(factor) if grad is bucket.reduced else grad.mul(factor)
    for segment in bucket.segments:
        if segment.slot not in unused:
            segment.param.grad = grad[segment.start : segment.start + segment.param.numel()]
    groups.step(bucket)
    for segment in bucket.segments:
        segment.param.grad = None
    bucket.reduced = None
    bucket.state = GradState.EMPTY
