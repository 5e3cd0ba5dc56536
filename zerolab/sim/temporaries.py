"""Chapter 1: memory that comes and goes within a step: buckets, gathered units, scratch.

Owns no data. These are peaks of one kind of memory, the kinds "bucket", "gathered" and the
step's "temp" of the virtual GPU, with the engine's default schedule: one reduction in flight
while backward fills the next bucket, one unit gathered ahead.

Source: DeepSpeed keys `reduce_bucket_size`, `overlap_comm`, `stage3_prefetch_bucket_size`.
"""

from collections import deque
from collections.abc import Sequence

from .layouts import Layout
from .states import MASTER_BYTES, PARAM_BYTES, check_precision, check_stage


def bucket_peak_numel(
    sizes: Layout, arrivals: Sequence[int] | None = None, in_flight: int = 1
) -> int:
    """Return the most elements of gradients that are on their way at stages 2 and 3.

    A bucket appears with its first gradient, is sent when it is full and all before it have been
    sent, and dies when the reduction after it has been launched. So two buckets at a time, plus
    those whose first gradients come long before their last: the root's, in most models.

    Args:
        sizes: the model's lengths.
        arrivals: for each gradient, in the order of backward, which trained bucket it belongs
            to; None when gradients arrive exactly in the order of the buckets.
        in_flight: reductions that run while backward goes on: 1 with `overlap_comm`, else 0.
    """
    buckets = sizes.trained
    if arrivals is None:
        arrivals = [i for i, each in enumerate(buckets) for _ in each.numels]
    waiting = [len(each.numels) for each in buckets]
    held: set[int] = set()
    flying: deque[int] = deque()
    launched = most = 0
    for index in arrivals:
        held.add(index)
        waiting[index] -= 1
        most = max(most, sum(buckets[i].padded_numel for i in held))
        while launched < len(buckets) and waiting[launched] == 0:
            flying.append(launched)
            launched += 1
            if len(flying) > in_flight:
                held.discard(flying.popleft())
    return most


def gpt_arrivals(sizes: Layout) -> list[int]:
    """Return in which order the gradients of a `zerolab.gpt.GPT` arrive, as buckets.

    The last norm belongs to the root, whose buckets are reduced last, but its gradients come
    first: the bucket that holds them waits through all of backward.

    Args:
        sizes: the layout of a GPT with a tied head.
    """
    order = [i for i, each in enumerate(sizes.trained) for _ in each.numels]
    root = sum(len(each.numels) for each in sizes.units[0])
    blocks, early, late = order[:-root], order[-root:][:2], order[-root:][2:]
    return [*early, *blocks, *late]


def bucket_peak_bytes(
    stage: int, sizes: Layout, dtype: str, arrivals: Sequence[int] | None = None
) -> int:
    """Return the peak of the kind "bucket" in a step without accumulation.

    At stages 0 and 1 gradients wait where backward left them: nothing is on its way besides.
    """
    check_stage(stage)
    check_precision(dtype)
    return 0 if stage < 2 else PARAM_BYTES[dtype] * bucket_peak_numel(sizes, arrivals)


def gathered_peak_numel(unit_numels: Sequence[int], prefetch: bool = True) -> int:
    """Return the most elements of full parameters at stage 3, from the second step on.

    The root is whole all the time, and beside it the block that computes and, with prefetch, the
    next one.

    Args:
        unit_numels: elements of each unit with padding, root first, then blocks in the order of
            forward.
        prefetch: whether the next unit is gathered while one computes (`zerolab.prefetch`).
    """
    root, *blocks = unit_numels
    width = 2 if prefetch else 1
    together = [sum(blocks[start : start + width]) for start in range(len(blocks))]
    return root + max(together, default=0)


def gathered_peak_bytes(stage: int, sizes: Layout, dtype: str, prefetch: bool = True) -> int:
    """Return the peak of the kind "gathered": full parameters, there only while they are used."""
    check_stage(stage)
    check_precision(dtype)
    numel = gathered_peak_numel(sizes.unit_numels(), prefetch) if stage == 3 else 0
    return PARAM_BYTES[dtype] * numel


def step_scratch_bytes(stage: int, sizes: Layout, dtype: str) -> int:
    """Return the largest temporary of the optimizer step: one bucket's gradients in fp32.

    The step goes bucket by bucket, so the scratch is bounded by `reduce_bucket_size` and not by
    the model. In fp32 the gradients are used where they lie.
    """
    check_stage(stage)
    check_precision(dtype)
    if dtype == "fp32":
        return 0
    share = 1 if stage == 0 else sizes.world_size
    return MASTER_BYTES * sizes.largest_bucket_numel // share
