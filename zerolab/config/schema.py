"""Chapter 12: every key a file may have, from the root down.

Data: `File`, one pydantic model of blocks; each key is declared with its default, its status and a
sentence (see `keys`). Reading a file fills it; `settings` turns it into what the engine uses.
"""

from typing import Annotated

import torch

from .keys import Block, idle, later, refused, through_code, unheard, works
from .schema_zero import Zero
from .values import (
    Count,
    DType,
    Flag,
    Integer,
    NonNegativeReal,
    Params,
    PositiveCount,
    Real,
    Text,
    Texts,
    one_of,
)

MONITOR = "monitors come later: nothing is written"
LOGGING = "logging comes later: nothing is printed"
SAVING = "saving comes later"
CONFIGURE = "it waits for checkpointing.configure(...) and for layers wrapped by checkpoint(...)"

CAST = "inputs are not cast: cast them in the data loader"

WriterKind = Annotated[str, one_of("FAST", "PYTHON", "MOCK")]
Writers = Annotated[str, one_of("replica", "socket", "machine")]
TagRule = Annotated[str, one_of("WARN", "IGNORE", "FAIL")]
Moment = Annotated[str, one_of("micro_step", "boundary")]
ReduceOp = Annotated[str, one_of("mean", "sum")]


class FP16(Block):
    """Half precision with a loss scale."""

    enabled: Flag = works(False, "compute in fp16, update fp32 master weights")
    auto_cast: Flag = idle(False, "cast inputs to fp16", CAST)
    loss_scale: NonNegativeReal = works(0.0, "0: dynamic; otherwise this fixed scale")
    initial_scale_power: Count = works(16, "first dynamic scale, as a power of two")
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

    enabled: Flag = refused(
        False, "autocast the forward", "write `with torch.autocast(...)` in the script, or bf16"
    )
    dtype: DType = idle(torch.bfloat16, "its type", "see torch_autocast.enabled")
    lower_precision_safe_modules: Texts | None = idle(None, "its modules", "see enabled")


class Named(Block):
    """An optimizer or a scheduler: a type and its parameters."""

    type: Text | None = works(None, "name of the class")
    params: Params = works({}, "arguments of the class")
    legacy_fusion: Flag = idle(False, "DeepSpeed: the older fused optimizer", "there is only one")


class ActivationCheckpointing(Block):
    """Settings of `checkpointing.configure`; alone it wraps no layer."""

    partition_activations: Flag = through_code(
        False, "cut saved activations across the model-parallel ranks", CONFIGURE
    )
    contiguous_memory_optimization: Flag = through_code(
        False, "saved activations in one arena; needs the other two", CONFIGURE
    )
    cpu_checkpointing: Flag = through_code(False, "saved activations on the host", CONFIGURE)
    number_checkpoints: PositiveCount | None = through_code(
        None, "slots of that arena, not a trade of memory against time", CONFIGURE
    )
    synchronize_checkpoint_boundary: Flag = through_code(
        False, "synchronize the device at each boundary", CONFIGURE
    )
    profile: Flag = through_code(False, "time forward and backward", CONFIGURE)


class CommsLogger(Block):
    """Per-call communication log."""

    enabled: Flag = unheard(False, "log every collective", "engine.records() always has them")
    verbose: Flag = idle(False, "print each one", "see comms_logger.enabled")
    prof_all: Flag = idle(True, "all operations", "see comms_logger.enabled")
    debug: Flag = idle(False, "with the caller's name", "see comms_logger.enabled")
    prof_ops: Texts = idle([], "only these operations", "see comms_logger.enabled")


class Writer(Block):
    """A monitor that writes files: TensorBoard or CSV."""

    enabled: Flag = unheard(False, "write loss, learning rate and scale", MONITOR)
    output_path: Text = idle("", "directory", MONITOR)
    job_name: Text = idle("DeepSpeedJobName", "its subdirectory", MONITOR)


class WandB(Block):
    """Weights & Biases."""

    enabled: Flag = unheard(False, "send to Weights & Biases", MONITOR)
    group: Text | None = idle(None, "group", MONITOR)
    team: Text | None = idle(None, "team", MONITOR)
    project: Text = idle("deepspeed", "project", MONITOR)


class Comet(Block):
    """Comet."""

    enabled: Flag = unheard(False, "send to Comet", MONITOR)
    samples_log_interval: PositiveCount = idle(100, "samples between two points", MONITOR)
    project: Text | None = idle(None, "project", MONITOR)
    workspace: Text | None = idle(None, "workspace", MONITOR)
    api_key: Text | None = idle(None, "key", MONITOR)
    experiment_name: Text | None = idle(None, "name", MONITOR)
    experiment_key: Text | None = idle(None, "experiment to continue", MONITOR)
    online: Flag | None = idle(None, "online or offline", MONITOR)
    mode: Text | None = idle(None, "get, create or either", MONITOR)


class FlopsProfiler(Block):
    """DeepSpeed's FLOPS profiler."""

    enabled: Flag = unheard(False, "profile one step", LOGGING)
    recompute_fwd_factor: NonNegativeReal = idle(0.0, "recomputed share", LOGGING)
    profile_step: PositiveCount = idle(1, "which step", LOGGING)
    module_depth: Integer = idle(-1, "depth of the table", LOGGING)
    top_modules: PositiveCount = idle(1, "rows a level", LOGGING)
    detailed: Flag = idle(True, "per module", LOGGING)
    output_file: Text | None = idle(None, "file", LOGGING)


class Throughput(Block):
    """The throughput timer."""

    enabled: Flag = unheard(True, "time whole steps", LOGGING)
    synchronized: Flag = idle(True, "synchronize the device first", LOGGING)


class Timers(Block):
    """Timers."""

    throughput: Throughput = unheard(Throughput, "samples a second", LOGGING)


class AIO(Block):
    """Asynchronous file access for the NVMe tier."""

    block_size: PositiveCount = idle(1_048_576, "bytes of a request", "no NVMe tier yet")
    queue_depth: PositiveCount = idle(8, "requests under way", "no NVMe tier yet")
    thread_count: PositiveCount = idle(1, "older name of intra_op_parallelism", "no NVMe tier yet")
    intra_op_parallelism: PositiveCount = idle(1, "threads a request", "no NVMe tier yet")
    single_submit: Flag = idle(False, "submit one by one", "no NVMe tier yet")
    overlap_events: Flag = idle(True, "overlap submission and completion", "no NVMe tier yet")
    use_gds: Flag = idle(False, "GPUDirect Storage", "no NVMe tier yet")


class ParallelWrite(Block):
    """How DeepSpeed writes layers in parallel."""

    pipeline_stage: Flag = idle(False, "each pipeline stage writes", "no pipeline engine here")


class CheckpointWriter(Block):
    """DeepSpeed's file writer."""

    type: WriterKind = unheard("FAST", "kind of writer", SAVING)
    io_buffer_size: PositiveCount = idle(64 * 2**20, "bytes of its buffer", SAVING)
    io_buffer_double: Flag = idle(True, "two buffers", SAVING)
    show_statistics: Flag = idle(False, "print speeds", SAVING)
    data_parallel: Writers | None = idle(None, "who writes", SAVING)
    decoupled: Flag = idle(False, "write in the background", SAVING)
    io_multiplier: PositiveCount = idle(1, "writers", SAVING)


class Checkpoint(Block):
    """Saving the training to disk."""

    tag_validation: TagRule = unheard("WARN", "ranks differ in the tag", SAVING)
    load_universal: Flag = unheard(False, "read universal files", SAVING)
    use_node_local_storage: Flag = unheard(False, "each node writes its own disk", SAVING)
    parallel_write: ParallelWrite = unheard(ParallelWrite, "parallel writing", SAVING)
    checkpoint_serialization: Flag = unheard(True, "pickle or raw tensors", SAVING)
    writer: CheckpointWriter | None = unheard(None, "the file writer", SAVING)


class Pipeline(Block):
    """DeepSpeed's pipeline engine."""

    stages: Text | PositiveCount = idle("auto", "pipeline stages", "no pipeline engine here")
    partition: Text = idle("best", "how layers are dealt", "no pipeline engine here")
    seed_layers: Flag = idle(False, "seed each layer", "no pipeline engine here")
    activation_checkpoint_interval: Count = idle(0, "layers a block", "no pipeline engine here")
    pipe_partitioned: Flag = idle(True, "cut activations", "no pipeline engine here")
    grad_partitioned: Flag = idle(True, "cut their gradients", "no pipeline engine here")


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
    optimizer: Named | None = works(None, "the optimizer the engine builds")
    scheduler: Named | None = works(None, "the learning-rate schedule the engine builds")
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
    gradient_allreduce_op: ReduceOp = later(
        "mean", "average the ranks' gradients, or add them", "gradients are averaged"
    )
    activation_checkpointing: ActivationCheckpointing = through_code(
        ActivationCheckpointing, "recompute activations in backward", CONFIGURE
    )
    zerolab: ZeroLab = works(ZeroLab, "keys of zerolab alone")
    steps_per_print: PositiveCount | None = unheard(None, "steps between two log lines", LOGGING)
    wall_clock_breakdown: Flag = unheard(False, "print the time of each phase", LOGGING)
    memory_breakdown: Flag = unheard(False, "print memory", "engine.records() has it")
    dump_state: Flag = unheard(False, "print the state at the start", "zerolab config check does")
    dataloader_drop_last: Flag = works(False, "drop the last, smaller batch of training_data")
    disable_python_gc: Flag = idle(False, "no garbage collection in a step", "left to Python")
    disable_allgather: Flag = idle(False, "nothing", "dead: DeepSpeed parses it and reads it nowhere")
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
