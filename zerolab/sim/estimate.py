"""Chapter 1: where the memory goes, in closed form: multiply and add, run nothing.

Owns the numbers of a `Layout`: what is left of a model when only lengths count. Two formulas
stand on it, and the tests hold the engine to both exactly:

    state_bytes     what one rank holds when its gradients are ready, before the step
    elements_moved  what the collectives of one step carry

In both, P counts elements with the padding and E without: padding lies in buffers and is
sent, but the optimizer never touches it.
"""

from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from .. import bucket, flat
from ..errors import UsageError

MASTER_BYTES = 4  # an fp32 copy
MOMENT_BYTES = 8  # AdamW's two moments, fp32
STEP_BYTES = 4  # AdamW's count of steps, one fp32 scalar for every segment
PARAM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of a model cut into buckets and shards, as one rank sees it.

    Attributes:
        world_size: into how many shards every bucket is cut.
        padded_numel: P, elements of all buckets with padding.
        numel: E, elements of all parameters.
        own_numel: elements of parameters that lie in this rank's shards.
        num_params: parameters; each has one segment in an owned shard, of no elements if need be.
        num_pieces: pieces when every parameter is cut at every border between shards.
    """

    world_size: int
    padded_numel: int
    numel: int
    own_numel: int
    num_params: int
    num_pieces: int


def layout(model: nn.Module, bucket_numel: int, world_size: int, rank: int = 0) -> Layout:
    """Count what the engine will cut `model` into; the meta device is enough.

    Args:
        model: all its parameters are trained.
        bucket_numel: most elements a bucket may hold (`reduce_bucket_size`).
        world_size: number of ranks.
        rank: whose shards to count.
    """
    units = bucket.assign_params(model, bucket.find_blocks(model))
    lengths = [[param.numel() for _, param in params] for _, _, params in units]
    buckets = [
        [numels[position] for position in positions]
        for numels in lengths
        for positions in flat.plan_buckets(numels, bucket_numel)
    ]
    return Layout(
        world_size=world_size,
        padded_numel=sum(_shard_numel(sum(numels), world_size) for numels in buckets) * world_size,
        numel=sum(sum(numels) for numels in buckets),
        own_numel=sum(_own_numel(sum(numels), world_size, rank) for numels in buckets),
        num_params=sum(len(numels) for numels in buckets),
        num_pieces=sum(_num_pieces(numels, world_size) for numels in buckets),
    )


def state_bytes(stage: int, dtype: str, sizes: Layout) -> dict[str, int]:
    """Return the bytes of model states that one rank holds when its gradients are ready.

    With N ranks, 16-bit parameters, fp32 master weights and AdamW:

        stage   param   grad    master   optimizer
        0       2 P     2 P     4 P      8 E       + 4 a piece
        1       2 P     2 P     4 P/N    8 E own   + 4 a parameter
        2       2 P     2 P/N   4 P/N    8 E own   + 4 a parameter
        3       2 P/N   2 P/N   4 P/N    8 E own   + 4 a parameter

    Stage 1 reduces in place: its slice of the mean is a view into the full gradients, so these
    stay. In fp32 parameters and gradients take 4 bytes and there is no master.

    Args:
        stage: 0 to 3.
        dtype: "bf16", "fp16" or "fp32".
        sizes: the model's lengths.
    """
    _check(stage, dtype)
    width = PARAM_BYTES[dtype]
    full, shard = sizes.padded_numel, sizes.padded_numel // sizes.world_size
    stepped = sizes.numel if stage == 0 else sizes.own_numel
    num_segments = sizes.num_pieces if stage == 0 else sizes.num_params
    return {
        "param": width * (shard if stage >= 3 else full),
        "grad": width * (shard if stage >= 2 else full),
        "master": 0 if dtype == "fp32" else MASTER_BYTES * (shard if stage >= 1 else full),
        "optimizer": MOMENT_BYTES * stepped + STEP_BYTES * num_segments,
    }


def elements_moved(stage: int, padded_numel: int, accum_steps: int = 1) -> int:
    """Return the elements that one step's collectives carry, an all-reduce counted twice.

    A gather or a reduce-scatter of all parameters is 1 P; an all-reduce is both, so 2 P.
    Stages 0 and 1 reduce once a step, stages 2 and 3 after every micro-batch; stage 3 gathers
    twice a micro-batch, for forward and for backward, in place of once a step.

        stage 0: 2 P     stage 1: 2 P     stage 2: (G + 1) P     stage 3: 3 G P

    Args:
        stage: 0 to 3.
        padded_numel: P.
        accum_steps: G, micro-batches a step.
    """
    _check(stage, "bf16")
    times = {0: 2, 1: 2, 2: accum_steps + 1, 3: 3 * accum_steps}
    return times[stage] * padded_numel


def _check(stage: int, dtype: str) -> None:
    """Refuse what has no formula."""
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"stage {stage} is unknown; give 0, 1, 2 or 3")
    if dtype not in PARAM_BYTES:
        raise UsageError(f"dtype {dtype!r} is unknown; give {', '.join(PARAM_BYTES)}")


def _shard_numel(numel: int, world_size: int) -> int:
    """One rank's share of a bucket, padding included."""
    return -(-numel // world_size)


def _own_numel(numel: int, world_size: int, rank: int) -> int:
    """How much of a rank's share is no padding."""
    share = _shard_numel(numel, world_size)
    return max(0, min(share, numel - rank * share))


def _num_pieces(numels: list[int], world_size: int) -> int:
    """Count the pieces of a bucket cut at the ends of parameters and at those of shards."""
    if world_size == 1:
        return len(numels)
    share = _shard_numel(sum(numels), world_size)
    ends = set(accumulate(numels))
    borders = {share * rank for rank in range(1, world_size)}
    return len(ends | {border for border in borders if border < sum(numels)})
