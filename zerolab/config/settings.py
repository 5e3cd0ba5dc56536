"""Chapter 12: what the engine uses: a file's choices, resolved for one world size.

Data: `Config`, frozen and plain: numbers, dtypes and the blocks of the schema. Everything that a
file may leave open (the third number of the batch equation, the type in which gradients travel,
whether to overlap) is decided here and nowhere else.
"""

from dataclasses import dataclass
from typing import Any

import torch

from . import schema, schema_zero
from .triad import Triad

STAGES_THAT_SHARD_GRADS = (2, 3)


@dataclass(frozen=True)
class Config:
    """A configuration that can run.

    Attributes:
        world_size: the number of ranks it was resolved for.
        train_batch_size: samples in one optimizer step, over all ranks and micro-steps.
        micro_batch_size: samples in one forward on one rank.
        accum_steps: micro-steps in one optimizer step.
        stage: what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        zero: the `zero_optimization` block; sizes are counts of elements.
        param_dtype: the type of parameters in forward and backward.
        reduce_dtype: the type in which gradients travel.
        grad_accum_dtype: the type in which micro-steps are added up.
        fp16, bf16: their blocks.
        gradient_clipping: the largest global norm; 0.0 is off.
        optimizer, scheduler: type and params, or None when the script brings its own.
        activation_checkpointing: what `checkpointing.configure` reads.
        reduce_every_micro_step: reduce gradients at each micro-step, not only at the boundary.
        unit_modules: names of modules that stage 3 gathers as one; empty: found automatically.
        prefetch: stage 3 gathers the next unit while this one computes.
        reshard_after_forward: stage 3 frees a unit after its forward.
        dataloader_drop_last: drop the last, smaller batch of `training_data`.
        gradient_allreduce_op: "mean" or "sum" over the ranks.
        warnings: keys that have no effect, each with the reason.
        raw: the file as it was given.
    """

    world_size: int
    train_batch_size: int
    micro_batch_size: int
    accum_steps: int
    stage: int
    zero: schema_zero.Zero
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    grad_accum_dtype: torch.dtype
    fp16: schema.FP16
    bf16: schema.BF16
    gradient_clipping: float
    optimizer: schema.OptimizerBlock | None
    scheduler: schema.SchedulerBlock | None
    activation_checkpointing: schema.ActivationCheckpointing
    reduce_every_micro_step: bool
    unit_modules: tuple[str, ...]
    prefetch: bool
    reshard_after_forward: bool
    dataloader_drop_last: bool
    gradient_allreduce_op: str
    warnings: tuple[str, ...]
    raw: dict[str, Any]


def resolve(
    file: schema.File, triad: Triad, world_size: int, warnings: tuple[str, ...], raw: dict[str, Any]
) -> Config:
    """Decide everything that the file leaves open."""
    param_dtype = compute_dtype(file)
    grad_accum_dtype = file.data_types.grad_accum_dtype or param_dtype
    return Config(
        world_size=world_size,
        train_batch_size=triad.total,
        micro_batch_size=triad.micro,
        accum_steps=triad.accum,
        stage=file.zero_optimization.stage,
        zero=_resolved_zero(file.zero_optimization),
        param_dtype=param_dtype,
        reduce_dtype=file.communication_data_type or grad_accum_dtype,
        grad_accum_dtype=grad_accum_dtype,
        fp16=file.fp16,
        bf16=file.bf16,
        gradient_clipping=file.gradient_clipping,
        optimizer=file.optimizer,
        scheduler=file.scheduler,
        activation_checkpointing=file.activation_checkpointing,
        reduce_every_micro_step=_reduce_every_micro_step(file),
        unit_modules=tuple(file.zerolab.unit_modules),
        prefetch=file.zerolab.prefetch,
        reshard_after_forward=file.zerolab.reshard_after_forward,
        dataloader_drop_last=file.dataloader_drop_last,
        gradient_allreduce_op=file.gradient_allreduce_op,
        warnings=warnings,
        raw=raw,
    )


def compute_dtype(file: schema.File) -> torch.dtype:
    """The type of forward and backward: that of the precision block which is on."""
    if file.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if file.bf16.enabled else torch.float32


def _resolved_zero(zero: schema_zero.Zero) -> schema_zero.Zero:
    overlap = True if zero.overlap_comm is None else zero.overlap_comm
    return zero.model_copy(update={"overlap_comm": overlap})


def _reduce_every_micro_step(file: schema.File) -> bool:
    if file.zerolab.reduce is None:
        return file.zero_optimization.stage in STAGES_THAT_SHARD_GRADS
    return file.zerolab.reduce == "micro_step"
