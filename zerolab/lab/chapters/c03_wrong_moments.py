"""Chapter 3: wrong answers to the moments. The docstring of each is the misconception.

Owns nothing. They run in the namespace of the module whose function they stand in for.
"""

from typing import Any

import torch

from ... import device
from ...bucket import Bucket, GradState

# 3.4 post_backward


def sends_whatever_is_complete(stage: Any) -> None:
    """On another rank another bucket may be complete first: the ranks would add up unlike ones."""
    for bucket in stage.trainable[stage.next_launch :]:
        if bucket.complete and bucket.state is GradState.FILLING:
            stage.launch(bucket)


def waits_for_the_whole_model(stage: Any) -> None:
    """When the last bucket is complete, backward is over: nothing is left to overlap with."""
    if all(bucket.complete for bucket in stage.trainable):
        while stage.next_launch < len(stage.trainable):
            stage.launch(stage.trainable[stage.next_launch])
            stage.next_launch += 1


def sends_one_at_most(stage: Any) -> None:
    """One gradient can make it the turn of several: those that were complete and had to wait."""
    if stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if bucket.complete:
            stage.launch(bucket)
            stage.next_launch += 1


def sends_again_and_again(stage: Any) -> None:
    """A bucket that was sent stays complete: without a step to the next its turn never ends."""
    bucket = stage.trainable[stage.next_launch]
    if bucket.complete:
        stage.launch(bucket)


def waits_at_once(stage: Any) -> None:
    """Who waits right after sending pays for the collective on top of backward, not under it."""
    while stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if not bucket.complete:
            return
        stage.launch(bucket)
        stage.receive_all()
        stage.next_launch += 1


def skips_the_incomplete(stage: Any) -> None:
    """An incomplete bucket keeps its turn: passed over, it leaves at another time on each rank."""
    while stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if bucket.complete:
            stage.launch(bucket)
        stage.next_launch += 1


def leaves_the_last_for_the_end(stage: Any) -> None:
    """The last bucket as well is complete when its last gradient comes, not when all is over."""
    while stage.next_launch < len(stage.trainable) - 1:
        bucket = stage.trainable[stage.next_launch]
        if not bucket.complete:
            return
        stage.launch(bucket)
        stage.next_launch += 1


def takes_filled_for_complete(stage: Any) -> None:
    """`filled` may be from an earlier micro-step; `arrived` alone tells what this backward left."""
    while stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if len(bucket.filled) < len(bucket.slots):
            return
        stage.launch(bucket)
        stage.next_launch += 1


def waits_for_the_one_before(stage: Any) -> None:
    """At stage 0 all buckets may travel at once: to wait for one before the next stops backward."""
    while stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if not bucket.complete:
            return
        stage.receive_all()
        stage.launch(bucket)
        stage.next_launch += 1


# 3.5 finish_backward


def _rest(stage: Any) -> list[Bucket]:
    return list(stage.trainable[stage.next_launch :]) if stage.reducing else []


def _send(stage: Any, buckets: list[Bucket]) -> None:
    for bucket in buckets:
        stage.launch(bucket)
    stage.receive_all()


def _empty(stage: Any) -> None:
    for bucket in stage.trainable:
        bucket.arrived.clear()


def sends_only_what_it_used(stage: Any) -> None:
    """Rank 1 has gradients that rank 0 does not: it sends, nobody answers, and all ranks stop."""
    _send(stage, [bucket for bucket in _rest(stage) if bucket.filled])
    _empty(stage)


def forgets_to_wait(stage: Any) -> None:
    """Sent is not received: the optimizer would read a mean that is still on its way."""
    for bucket in _rest(stage):
        stage.launch(bucket)
    _empty(stage)


def forgets_to_empty(stage: Any) -> None:
    """What has arrived is a matter of one backward: else every bucket is complete in the next."""
    _send(stage, _rest(stage))


def reduces_in_every_micro_step(stage: Any) -> None:
    """Gradients stay at home until the last micro-step: reducing each moves G times as much."""
    _send(stage, list(stage.trainable[stage.next_launch :]))
    _empty(stage)


def sends_everything_again(stage: Any) -> None:
    """The buckets before `next_launch` are on their way already: this sends them a second time."""
    _send(stage, list(stage.trainable) if stage.reducing else [])
    _empty(stage)


def sends_the_latecomers_alone(stage: Any) -> None:
    """Only this rank knows that a gradient came late: a bucket it sends again finds no answer."""
    _send(stage, _rest(stage))
    _send(stage, [bucket for bucket in stage.trainable if bucket.fresh is not None])
    _empty(stage)


def drops_the_latecomers(stage: Any) -> None:
    """Empty `arrived`, no more: what lies in `fresh` now came late and has not been sent."""
    _send(stage, _rest(stage))
    for bucket in stage.trainable if stage.reducing else []:
        bucket.fresh = None
        bucket.state = GradState.REDUCED
    _empty(stage)


def sends_the_rest_backwards(stage: Any) -> None:
    """What one rank sends at the end another has sent in backward, in index order: so it stays."""
    _send(stage, _rest(stage)[::-1])
    _empty(stage)


def waits_for_each(stage: Any) -> None:
    """One after the other, each bucket pays its latency; sent together they overlap."""
    for bucket in _rest(stage):
        _send(stage, [bucket])
    if stage.reducing:
        stage.receive_all()
    _empty(stage)


# 3.6 receive


def _keep(bucket: Bucket, mean: torch.Tensor, *, add: bool = True) -> None:
    if bucket.reduced is None or not add:
        bucket.reduced = mean
        device.set_kind(bucket.reduced, "grad")
    else:
        bucket.reduced.add_(mean)


def _let_go(bucket: Bucket) -> None:
    bucket.work = bucket.incoming = None
    bucket.state = GradState.REDUCED if bucket.fresh is None else GradState.FILLING


def keeps_the_last_only(bucket: Bucket, dtype: torch.dtype) -> None:
    """A step is the sum of its micro-steps: overwriting keeps the last and wastes the others."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype), add=False)
    _let_go(bucket)


def reads_before_it_arrives(bucket: Bucket, dtype: torch.dtype) -> None:
    """An asynchronous collective has returned long before its result is there: `wait` says when."""
    assert bucket.work is not None and bucket.incoming is not None
    _keep(bucket, bucket.incoming.to(dtype, copy=True))
    bucket.work.wait()
    _let_go(bucket)


def divides_once_more(bucket: Bucket, dtype: torch.dtype) -> None:
    """The collective was an average: it has divided by the number of ranks already."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype) / bucket.world_size)
    _let_go(bucket)


def keeps_the_dtype_of_the_journey(bucket: Bucket, dtype: torch.dtype) -> None:
    """Gradients travel in one dtype and are added up in another, which is the wider one."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming)
    _let_go(bucket)


def holds_on_to_the_message(bucket: Bucket, dtype: torch.dtype) -> None:
    """A handle holds its tensors alive, so a bucket that is home lets go of it."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype))
    bucket.state = GradState.REDUCED if bucket.fresh is None else GradState.FILLING


def takes_it_for_done(bucket: Bucket, dtype: torch.dtype) -> None:
    """A gradient may have come while this one travelled; marked as done it is never sent."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype))
    _let_go(bucket)
    bucket.state = GradState.REDUCED


def makes_a_new_sum(bucket: Bucket, dtype: torch.dtype) -> None:
    """A sum in new memory is a second set of gradients for a moment, and counts as nothing."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    if bucket.reduced is None:
        _keep(bucket, bucket.incoming.to(dtype))
    else:
        bucket.reduced = bucket.reduced + bucket.incoming
    _let_go(bucket)


def keeps_where_it_came(bucket: Bucket, dtype: torch.dtype) -> None:
    """The handle is not all that holds memory: `incoming` is the tensor that has travelled."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype))
    bucket.work = None
    bucket.state = GradState.REDUCED if bucket.fresh is None else GradState.FILLING


def says_empty(bucket: Bucket, dtype: torch.dtype) -> None:
    """EMPTY is a bucket whose gradients were used; what has come home waits for that: REDUCED."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype))
    _let_go(bucket)
    bucket.state = GradState.EMPTY if bucket.fresh is None else GradState.FILLING


def always_fills(bucket: Bucket, dtype: torch.dtype) -> None:
    """FILLING asks for one more round. Without gradients in `fresh` there is nothing to send."""
    assert bucket.work is not None and bucket.incoming is not None
    bucket.work.wait()
    _keep(bucket, bucket.incoming.to(dtype))
    _let_go(bucket)
    bucket.state = GradState.FILLING
