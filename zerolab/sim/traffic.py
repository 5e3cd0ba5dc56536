"""Chapter 1: what the collectives of one step carry.

Owns no data. An *element moved* is one of the full logical tensor of a collective, counted once
a call; an all-reduce is a reduce-scatter and an all-gather, so it counts twice. On a ring every
rank really sends (N - 1)/N of that, because the slice it already has need not travel to it.

Source: ZeRO (Rajbhandari et al. 2020), section 7; DeepSpeed keys `gradient_accumulation_steps`,
`zero_optimization.reduce_scatter`, `zero_optimization.stage`.
"""

from ..errors import UsageError
from .layouts import Layout
from .states import PARAM_BYTES, check_precision, check_stage


def elements_moved(
    stage: int,
    padded_numel: int,
    accum_steps: int = 1,
    *,
    every_micro_step: bool | None = None,
    all_reduce: bool = False,
    reshard_after_forward: bool = True,
) -> int:
    """Return the elements that one step's collectives carry, an all-reduce counted twice.

    A gather or a reduce-scatter of all parameters is 1 P; an all-reduce is both, so 2 P.
    Stages 0 and 1 reduce once a step, stages 2 and 3 after every micro-batch; stage 3 gathers
    twice a micro-batch, for forward and for backward, in place of once a step.

        stage 0: 2 P     stage 1: 2 P     stage 2: (G + 1) P     stage 3: 3 G P

    DeepSpeed's defaults receive the whole mean at stages 1 and 2 (`all_reduce=True` here): 3 P,
    and (2 G + 1) P at stage 2.

    Args:
        stage: 0 to 3.
        padded_numel: P.
        accum_steps: G, micro-batches a step (`gradient_accumulation_steps`).
        every_micro_step: reduce after every micro-batch; None for the stage's default.
        all_reduce: receive every slice of the mean and keep the own one (`reduce_scatter: false`).
        reshard_after_forward: False keeps stage 3's parameters from forward to backward, P less.
    """
    check_stage(stage)
    _check_accum_steps(accum_steps)
    gathers = _num_gathers(stage, accum_steps, reshard_after_forward)
    reductions = reduction_passes(stage, accum_steps, every_micro_step, all_reduce)
    return (reductions + gathers) * padded_numel


def reduction_passes(
    stage: int, accum_steps: int, every_micro_step: bool | None, all_reduce: bool
) -> int:
    """Return how often the reductions of one step move the model, an all-reduce counted twice.

    Stage 0 all-reduces, the others reduce-scatter. Stages 0 and 1 reduce once a step, the others
    after every micro-batch.

    Args:
        stage: 0 to 3.
        accum_steps: micro-batches a step, at least 1.
        every_micro_step: True or False if the user has decided; None for the stage's own way.
        all_reduce: whether a stage that would reduce-scatter all-reduces, as DeepSpeed's do.
    """
    every = stage >= 2 if every_micro_step is None else every_micro_step
    return (accum_steps if every else 1) * (2 if stage == 0 or all_reduce else 1)


def _check_accum_steps(accum_steps: int) -> None:
    if accum_steps < 1:
        raise UsageError(f"accum_steps {accum_steps} is below 1; give 1 or more")


def _num_gathers(stage: int, accum_steps: int, reshard_after_forward: bool) -> int:
    """Return how often the parameters of a step are gathered."""
    if stage == 3:
        return accum_steps * (2 if reshard_after_forward else 1)
    return 0 if stage == 0 else 1


def elements_moved_by(
    sizes: Layout,
    stage: int,
    accum_steps: int = 1,
    *,
    every_micro_step: bool | None = None,
    all_reduce: bool = False,
    reshard_after_forward: bool = True,
) -> int:
    """Return `elements_moved` for a model with frozen or persistent parameters.

    Frozen parameters are never reduced, but stage 3 gathers them. Persistent ones are not
    gathered for forward and backward; the trained among them are sent round after the step.

    Args:
        sizes: the model's lengths.
        stage: 0 to 3.
        accum_steps: G.
        every_micro_step: reduce after every micro-batch; None for the stage's default.
        all_reduce: receive every slice of the mean and keep the own one.
        reshard_after_forward: False keeps stage 3's parameters from forward to backward.
    """
    check_stage(stage)
    _check_accum_steps(accum_steps)
    passes = reduction_passes(stage, accum_steps, every_micro_step, all_reduce)
    gathers = _num_gathers(stage, accum_steps, reshard_after_forward)
    if stage < 3:
        return (passes + gathers) * sizes.padded_numel
    published = sum(each.padded_numel for each in sizes.trained if each.persistent)
    return passes * sizes.padded_numel + gathers * sizes.gathered_numel + published


def ring_factor(world_size: int) -> float:
    """Return (N - 1)/N: how much of what a collective moves one rank sends itself on a ring.

    Nearly constant in N: more ranks do not mean more bytes a rank, only more messages.
    """
    if world_size < 1:
        raise UsageError(f"world_size {world_size} is below 1; give 1 or more")
    return (world_size - 1) / world_size


def sent_bytes(elements: int, world_size: int, precision: str = "bf16") -> int:
    """Return the bytes that one rank sends on a ring for so many elements moved.

    Args:
        elements: as `elements_moved` counts them; a multiple of `world_size` is exact.
        world_size: N.
        precision: in which they travel.
    """
    check_precision(precision)
    ring_factor(world_size)
    return PARAM_BYTES[precision] * elements * (world_size - 1) // world_size
