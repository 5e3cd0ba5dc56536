"""Chapter 12: every key a file may have, from the root down.

Data: `File`, one pydantic model of blocks; each key is declared with its default, its status and a
sentence (see `keys`). Reading a file fills it; `settings` turns it into what the engine uses.
"""

from typing import Annotated

import torch

from .keys import Block, detail, idle, later, refused, through_code, unheard, works
from .schema_around import (
    AIO,
    Checkpoint,
    Comet,
    CommsLogger,
    FlopsProfiler,
    Pipeline,
    Timers,
    WandB,
    Writer,
)
from .schema_zero import Zero
from .values import (
    DType,
    Flag,
    NonNegativeReal,
    Params,
    PositiveCount,
    PowerOfTwo,
    Real,
    Text,
    Texts,
    one_of,
)

MONITOR = "monitors come later: nothing is written"
LOGGING = "logging comes later: nothing is printed"
SAVING = "saving comes later"
CONFIGURE = (
    "it waits for checkpointing.configure(...) and for layers wrapped by "
    "checkpoint(...), which a later chapter brings"
)

CAST = "inputs are not cast: cast them in the data loader"

Moment = Annotated[str, one_of("micro_step", "boundary")]
ReduceOp = Annotated[str, one_of("mean", "sum")]


class FP16(Block):
    """Half precision with a loss scale."""

    enabled: Flag = works(False, "compute in fp16, update fp32 master weights")
    auto_cast: Flag = idle(False, "cast inputs to fp16", CAST)
    loss_scale: NonNegativeReal = works(0.0, "0: dynamic; otherwise this fixed scale")
    initial_scale_power: PowerOfTwo = works(16, "first dynamic scale, as a power of two")
    loss_scale_window: PositiveCount = works(1000, "steps without overflow before it doubles")
    hysteresis: PositiveCount = works(2, "overflows in a row before it halves")
    consecutive_hysteresis: Flag = works(False, "refill that budget at every good step")
    min_loss_scale: NonNegativeReal = works(1.0, "the dynamic scale never falls below")
    fp16_master_weights_and_grads: Flag = later(
        False, "master weights in fp16", "it needs the optimizer on the host"
    )

    @property
    def window(self) -> int:
        """The short name of `loss_scale_window`."""
        return self.loss_scale_window


class BF16(Block):
    """bfloat16: fp32's range, so no loss scale."""

    enabled: Flag = works(False, "compute in bf16, update fp32 master weights")
    immediate_grad_update: Flag = idle(
        False, "DeepSpeed: accumulate as gradients arrive", "buckets always do"
    )
    check_grad_overflow: Flag = works(True, "skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: Flag = later(
        False, "no fp32 master weights", "every 16-bit run keeps an fp32 master"
    )
    bf16_optimizer_states: Flag = later(
        False, "optimizer states in bf16", "states have the master weights' type"
    )


class DataTypes(Block):
    """Types of numbers beside the compute type."""

    grad_accum_dtype: DType | None = works(None, "type in which micro-steps are added up")
    param_dtype: DType | None = works(None, "must agree with fp16 or bf16; they decide")
    buffer_dtype: DType | None = refused(None, "type of buffers", "buffers keep the model's types")
    keep_in_fp32_modules: Texts | None = refused(
        None, "modules that stay fp32", "give those modules fp32 parameters instead"
    )


class Autocast(Block):
    """torch.autocast around the forward."""

    enabled: Flag = detail(False, "autocast the forward")
    dtype: DType = detail(torch.bfloat16, "its type")
    lower_precision_safe_modules: Texts | None = detail(None, "its modules")


class OptimizerBlock(Block):
    """The optimizer that the engine builds."""

    type: Text | None = works(None, "name of the class")
    params: Params = works({}, "its arguments")
    legacy_fusion: Flag = idle(False, "DeepSpeed: the older fused optimizer", "there is only one")


class SchedulerBlock(Block):
    """The learning-rate schedule that the engine builds."""

    type: Text | None = works(None, "name of the class")
    params: Params = works({}, "its arguments")


class ActivationCheckpointing(Block):
    """Settings of `checkpointing.configure`; alone it wraps no layer."""

    partition_activations: Flag = detail(
        False, "cut saved activations across the model-parallel ranks"
    )
    contiguous_memory_optimization: Flag = detail(
        False, "saved activations in one arena; needs the other two"
    )
    cpu_checkpointing: Flag = detail(False, "saved activations on the host")
    number_checkpoints: PositiveCount | None = detail(
        None, "slots of that arena, not a trade of memory against time"
    )
    synchronize_checkpoint_boundary: Flag = detail(False, "synchronize the device at each boundary")
    profile: Flag = detail(False, "time forward and backward")


class ZeroLab(Block):
    """What DeepSpeed has no key for."""

    reduce: Moment | None = works(None, "when gradients are reduced")
    unit_modules: Texts = works([], "stage 3: modules that are gathered as one")
    prefetch: Flag = works(True, "stage 3: gather the next unit while this one computes")
    reshard_after_forward: Flag = works(True, "stage 3: free a unit after its forward")


class File(Block):
    """A whole configuration file."""

    train_batch_size: PositiveCount | None = works(None, "samples in one optimizer step, all GPUs")
    train_micro_batch_size_per_gpu: PositiveCount | None = works(
        None, "samples in one forward on one GPU"
    )
    gradient_accumulation_steps: PositiveCount | None = works(None, "micro-steps in one step")
    managed_gradient_accumulation: Flag = later(
        True, "the engine finds the accumulation boundary", "the engine always does"
    )
    zero_optimization: Zero = works(Zero, "what each rank keeps")
    fp16: FP16 = works(FP16, "half precision")
    bf16: BF16 = works(BF16, "bfloat16", other_names=("bfloat16",))
    data_types: DataTypes = works(DataTypes, "types of numbers")
    torch_autocast: Autocast = refused(Autocast, "torch.autocast", "see enabled")
    optimizer: OptimizerBlock | None = works(None, "the optimizer the engine builds")
    scheduler: SchedulerBlock | None = works(None, "the learning-rate schedule the engine builds")
    gradient_clipping: NonNegativeReal = works(
        0.0, "largest global norm of the gradients; 0: off", deepspeed=1.0
    )
    communication_data_type: DType | None = works(None, "type in which gradients travel")
    seq_parallel_communication_data_type: DType = idle(
        torch.float32, "type for sequence parallelism", "there is none here"
    )
    prescale_gradients: Flag = idle(
        False, "divide before the sum", "sums are in fp32, so nothing overflows before the division"
    )
    gradient_predivide_factor: Real = idle(
        1.0, "divide by this before the sum", "sums are in fp32, so nothing overflows"
    )
    gradient_allreduce_op: ReduceOp = works("mean", "average the ranks' gradients, or add them")
    activation_checkpointing: ActivationCheckpointing = through_code(
        ActivationCheckpointing, "recompute activations in backward", CONFIGURE
    )
    zerolab: ZeroLab = works(ZeroLab, "keys of zerolab alone")
    steps_per_print: PositiveCount | None = unheard(None, "steps between two log lines", LOGGING)
    log_level: Text | None = unheard(None, "how much DeepSpeed says", LOGGING)
    wall_clock_breakdown: Flag = unheard(False, "print the time of each phase", LOGGING)
    memory_breakdown: Flag = unheard(False, "print memory", "engine.records() has it")
    dump_state: Flag = unheard(False, "print the state at the start", "zerolab config check does")
    dataloader_drop_last: Flag = works(False, "drop the last, smaller batch of training_data")
    disable_python_gc: Flag = idle(False, "no garbage collection in a step", "left to Python")
    disable_allgather: Flag = idle(
        False, "nothing", "dead: DeepSpeed parses it and reads it nowhere"
    )
    vocabulary_size: PositiveCount | None = works(None, "only checked: a multiple of 8 is faster")
    zero_allow_untested_optimizer: Flag = idle(
        False,
        "DeepSpeed: let an optimizer object outside its list pass",
        "every elementwise torch optimizer is tested here, AdamW too",
    )
    zero_force_ds_cpu_optimizer: Flag = idle(
        True, "DeepSpeed: insist on its CPU Adam", "there is one step, wherever it runs"
    )
    comms_logger: CommsLogger = unheard(CommsLogger, "log of collectives", LOGGING)
    tensorboard: Writer = unheard(Writer, "TensorBoard files", MONITOR)
    csv_monitor: Writer = unheard(Writer, "CSV files", MONITOR)
    wandb: WandB = unheard(WandB, "Weights & Biases", MONITOR)
    comet: Comet = unheard(Comet, "Comet", MONITOR)
    flops_profiler: FlopsProfiler = unheard(FlopsProfiler, "FLOPS", LOGGING)
    timers: Timers = unheard(Timers, "timers", LOGGING)
    aio: AIO = idle(AIO, "file access of the NVMe tier", "no NVMe tier yet")
    checkpoint: Checkpoint = unheard(Checkpoint, "saving", SAVING)
    pipeline: Pipeline = idle(Pipeline, "pipeline engine", "no pipeline engine here")
