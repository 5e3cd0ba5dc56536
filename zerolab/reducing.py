"""Chapter 3: when a bucket is sent, and what becomes of the mean that comes back.

Owns no data. These are moments of a stage, as functions over it: the stage (`ddp.DDP`) holds the
buckets in the order in which they are reduced (`trainable`), the position of the next one
(`next_launch`), and those that are on their way (`in_flight`).

Phases of a backward:

    post_backward    a bucket is complete: send every one whose turn has come
    finish_backward  no more gradients will come: send the rest, wait for everything
    receive          one bucket's mean is there: keep it, or add it to what was kept
    send_again       (rarely) on some rank a gradient came when its bucket had left: once more
    abandon          (rarely) an exception broke backward or the step off: forget what there is

A collective has no name tag. What tells the ranks which bucket they are talking about is the
order alone, and gradients come in another order on another rank. So the order is the index.

Source: Li et al., PyTorch Distributed (2020), section 3.2.3.
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import comm, device
from .bucket import Bucket, GradState

if TYPE_CHECKING:
    from .ddp import DDP


def post_backward(stage: "DDP") -> None:
    """Send the buckets whose turn has come: complete ones, strictly in index order.

    Called while backward runs, whenever a bucket has become complete. A bucket is sent once,
    as soon as it and all before it in `stage.trainable` are complete. Nothing is waited for.

    Args:
        stage: `stage.trainable[stage.next_launch]` is the bucket whose turn it is, and moving
            `next_launch` on is part of your work; `stage.launch(bucket)` sends a bucket;
            `bucket.complete` says that it has all its gradients.
    """
    while stage.next_launch < len(stage.trainable):
        bucket = stage.trainable[stage.next_launch]
        if not bucket.complete:
            return
        stage.launch(bucket)
        stage.next_launch += 1


def finish_backward(stage: "DDP") -> None:
    """Send what is left, wait for everything, and get ready for the next backward.

    Backward is over on this rank. In a micro-step that reduces, every bucket has been sent when
    this returns, on every rank in the same order, and received. A bucket without some of its
    gradients, or without any, is sent all the same: another rank may have them. A bucket that is
    FILLING after that has got a gradient when it had been sent. That is not sent here, since the
    other ranks do not know of it: it leaves with the next round.
    In any micro-step no bucket remembers afterwards what has arrived.

    Args:
        stage: `stage.reducing` says whether this micro-step reduces; `stage.trainable` are the
            buckets, those before `stage.next_launch` have been sent; `stage.launch(bucket)`
            sends one; `stage.receive_all()` waits until nothing is on its way;
            `bucket.arrived` is the set to be emptied.
    """
    if stage.reducing:
        for bucket in stage.trainable[stage.next_launch :]:
            stage.launch(bucket)
        stage.receive_all()
    for bucket in stage.trainable:
        bucket.arrived.clear()


def receive(bucket: Bucket, dtype: torch.dtype) -> None:
    """Wait for a bucket's mean and add it to what earlier micro-steps left.

    Afterwards the mean of all micro-steps since the last update lies in `bucket.reduced`, in
    `dtype` and counted as "grad"; `bucket.incoming` and `bucket.work` are None. The bucket is
    REDUCED, or FILLING if `bucket.fresh` holds gradients that came meanwhile.

    Args:
        bucket: `bucket.work` is the reduction on its way, `bucket.incoming` the tensor it
            writes to, `bucket.reduced` what earlier micro-steps left, or None.
        dtype: in which gradients are kept.
    """
    assert bucket.work and bucket.incoming is not None, "`reduce` sets bucket.work and .incoming"
    bucket.work.wait()
    if bucket.reduced is None:
        bucket.reduced = bucket.incoming.to(dtype)
        device.set_kind(bucket.reduced, "grad")
    else:
        bucket.reduced.add_(bucket.incoming)
    bucket.work = bucket.incoming = None
    bucket.state = GradState.REDUCED if bucket.fresh is None else GradState.FILLING


def send_again(stage: "DDP", buckets: Sequence[Bucket]) -> None:
    """Send buckets a second time, on all ranks alike: on some rank a gradient came late.

    It takes reentrant checkpointing: what is recomputed has a backward of its own, so a parameter
    that is used twice gets two gradients, and the second may find its bucket gone.
    """
    for bucket in buckets:
        stage.launch(bucket)
    stage.receive_all()


def abandon(stage: "DDP") -> None:
    """Forget the gradients of a step that broke off, which are not whole.

    What is in flight ends first, well or not: a collective must not lose its memory.
    """
    while stage.in_flight:
        bucket = stage.in_flight.popleft()
        settle([bucket.work] if bucket.work is not None else [])
        bucket.work = bucket.incoming = None
    for bucket in stage.trainable:
        bucket.arrived.clear()
        for slot in bucket.slots:
            slot.param.grad = None
    stage.drop_grads()
    stage.flushed, stage.flushes, stage.next_launch = True, 0, 0


def settle(works: Sequence[comm.Work]) -> None:
    """Wait for collectives whose results nobody will use, also for those that fail."""
    for work in works:
        with contextlib.suppress(Exception):
            work.wait()
