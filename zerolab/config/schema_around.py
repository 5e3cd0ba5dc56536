"""Chapter 12: the keys around the training: monitors, logs, profilers, files on disk.

Data: blocks whose settings all share the status of their block (see `detail`): a monitor that is
off has nothing to say about its directory.
"""

from typing import Annotated

from .keys import Block, detail
from .values import Count, Flag, Integer, NonNegativeReal, PositiveCount, Text, Texts, one_of

WriterKind = Annotated[str, one_of("FAST", "PYTHON", "MOCK")]
Writers = Annotated[str, one_of("replica", "socket", "machine")]
TagRule = Annotated[str, one_of("WARN", "IGNORE", "FAIL")]


class CommsLogger(Block):
    """Per-call communication log."""

    enabled: Flag = detail(False, "log every collective")
    verbose: Flag = detail(False, "print each one")
    prof_all: Flag = detail(True, "all operations")
    debug: Flag = detail(False, "with the caller's name")
    prof_ops: Texts = detail([], "only these operations")


class Writer(Block):
    """A monitor that writes files: TensorBoard or CSV."""

    enabled: Flag = detail(False, "write loss, learning rate and scale")
    output_path: Text = detail("", "directory")
    job_name: Text = detail("DeepSpeedJobName", "its subdirectory")


class WandB(Block):
    """Weights & Biases."""

    enabled: Flag = detail(False, "send to Weights & Biases")
    group: Text | None = detail(None, "group")
    team: Text | None = detail(None, "team")
    project: Text = detail("deepspeed", "project")


class Comet(Block):
    """Comet."""

    enabled: Flag = detail(False, "send to Comet")
    samples_log_interval: PositiveCount = detail(100, "samples between two points")
    project: Text | None = detail(None, "project")
    workspace: Text | None = detail(None, "workspace")
    api_key: Text | None = detail(None, "key")
    experiment_name: Text | None = detail(None, "name")
    experiment_key: Text | None = detail(None, "experiment to continue")
    online: Flag | None = detail(None, "online or offline")
    mode: Text | None = detail(None, "get, create or either")


class FlopsProfiler(Block):
    """DeepSpeed's FLOPS profiler."""

    enabled: Flag = detail(False, "profile one step")
    recompute_fwd_factor: NonNegativeReal = detail(0.0, "recomputed share")
    profile_step: PositiveCount = detail(1, "which step")
    module_depth: Integer = detail(-1, "depth of the table")
    top_modules: PositiveCount = detail(1, "rows a level")
    detailed: Flag = detail(True, "per module")
    output_file: Text | None = detail(None, "file")


class Throughput(Block):
    """The throughput timer."""

    enabled: Flag = detail(True, "time whole steps")
    synchronized: Flag = detail(True, "synchronize the device first")


class Timers(Block):
    """Timers."""

    throughput: Throughput = detail(Throughput, "samples a second")


class AIO(Block):
    """Asynchronous file access for the NVMe tier."""

    block_size: PositiveCount = detail(1_048_576, "bytes of a request")
    queue_depth: PositiveCount = detail(8, "requests under way")
    thread_count: PositiveCount = detail(1, "older name of intra_op_parallelism")
    intra_op_parallelism: PositiveCount = detail(1, "threads a request")
    single_submit: Flag = detail(False, "submit one by one")
    overlap_events: Flag = detail(True, "overlap submission and completion")
    use_gds: Flag = detail(False, "GPUDirect Storage")


class ParallelWrite(Block):
    """How DeepSpeed writes layers in parallel."""

    pipeline_stage: Flag = detail(False, "each pipeline stage writes")


class CheckpointWriter(Block):
    """DeepSpeed's file writer."""

    type: WriterKind = detail("FAST", "kind of writer")
    io_buffer_size: PositiveCount = detail(64 * 2**20, "bytes of its buffer")
    io_buffer_double: Flag = detail(True, "two buffers")
    show_statistics: Flag = detail(False, "print speeds")
    data_parallel: Writers | None = detail(None, "who writes")
    decoupled: Flag = detail(False, "write in the background")
    io_multiplier: PositiveCount = detail(1, "writers")


class Checkpoint(Block):
    """Saving the training to disk."""

    tag_validation: TagRule = detail("WARN", "ranks differ in the tag")
    load_universal: Flag = detail(False, "read universal files")
    use_node_local_storage: Flag = detail(False, "each node writes its own disk")
    parallel_write: ParallelWrite = detail(ParallelWrite, "parallel writing")
    checkpoint_serialization: Flag = detail(True, "pickle or raw tensors")
    writer: CheckpointWriter | None = detail(None, "the file writer")


class Pipeline(Block):
    """DeepSpeed's pipeline engine."""

    stages: Text | PositiveCount = detail("auto", "pipeline stages")
    partition: Text = detail("best", "how layers are dealt")
    seed_layers: Flag = detail(False, "seed each layer")
    activation_checkpoint_interval: Count = detail(0, "layers a block")
    pipe_partitioned: Flag = detail(True, "cut activations")
    grad_partitioned: Flag = detail(True, "cut their gradients")
