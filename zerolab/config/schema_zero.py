"""Chapter 12: the keys of `zero_optimization`, each with what it does here.

Data: `Zero` and its blocks. Names are the short ones (`prefetch_bucket_size`); a file may write
them with DeepSpeed's prefix (`stage3_prefetch_bucket_size`). Defaults that differ from DeepSpeed's
say so: its own keep small models whole at stage 3, so that nothing is left to see.
"""

import sys
from typing import Annotated, Any

from .keys import Block, always, cuda, detail, idle, later, refused, unheard, works
from .values import (
    Count,
    Flag,
    Params,
    PositiveCount,
    Share,
    Stage,
    Text,
    Texts,
    one_of,
)

STAGES_12 = (1, 2)
STAGE_3 = (3,)
Device = Annotated[str, one_of("none", "cpu", "nvme")]
NVME = "the NVMe tier belongs to the offload chapter"
HOST = "the host tier belongs to the offload chapter"


def _stage3(name: str, **more: Any) -> dict[str, Any]:
    return {"name": f"stage3_{name}", "other_names": (name,), "stages": STAGE_3, **more}


class OffloadParam(Block):
    """Where the sharded parameters of stage 3 rest between their uses."""

    device: Device = detail("none", "none, cpu or nvme")
    nvme_path: Text | None = detail(None, "directory of the NVMe files")
    buffer_count: PositiveCount = detail(5, "NVMe buffers")
    buffer_size: PositiveCount = detail(100_000_000, "elements of one NVMe buffer")
    max_in_cpu: Count = detail(1_000_000_000, "elements kept on the host with NVMe")
    pin_memory: Flag = detail(True, "page-locked host memory, so that copies overlap")


class OffloadOptimizer(Block):
    """Where master weights and optimizer states rest, and where the step runs."""

    device: Device = detail("none", "none, cpu or nvme")
    nvme_path: Text | None = detail(None, "directory of the NVMe files")
    buffer_count: PositiveCount = detail(4, "NVMe buffers")
    pin_memory: Flag = detail(True, "page-locked host memory, so that copies overlap")
    pipeline_read: Flag = detail(False, "read ahead from NVMe")
    pipeline_write: Flag = detail(False, "write behind to NVMe")
    pipeline: Flag = detail(False, "both of the above")
    fast_init: Flag = detail(False, "faster first write to NVMe")
    ratio: Share = detail(1.0, "share of the states that goes to the host (stage 3)")
    super_offload: Flag = detail(False, "DeepSpeed's SuperOffload")
    cpuadam_cores_perc: Share = detail(0.8, "share of the cores for SuperOffload")


class LeafModule(Block):
    """Modules that DeepSpeed gathers as one piece."""

    classes: Texts = detail([], "class names")
    names: Texts = detail([], "module names")
    name_suffixes: Texts = detail([], "ends of names")


class Zero(Block):
    """The `zero_optimization` block."""

    stage: Stage = works(
        0, "what is sharded: 1 optimizer state, 2 also gradients, 3 also parameters"
    )
    contiguous_gradients: Flag = always(
        True,
        "gradients land in a flat bucket",
        "a bucket is always one flat tensor",
        stages=(1, 2, 3),
    )
    reduce_scatter: Flag = works(
        True,
        "true: each rank receives only its slice; false: all of it, twice the traffic",
        stages=(1, 2, 3),
    )
    reduce_bucket_size: PositiveCount = works(
        2**20, "elements in one bucket: memory against number of calls", deepspeed=500_000_000
    )
    use_multi_rank_bucket_allreduce: Flag = idle(
        True,
        "DeepSpeed: one all-reduce a bucket, then copy the slice",
        "zerolab really reduce-scatters, so there is nothing to choose",
        stages=STAGES_12,
    )
    allgather_partitions: Flag = idle(
        True,
        "DeepSpeed: all-gather or broadcasts after the step",
        "dead: DeepSpeed parses it and reads it nowhere, and a bucket is always all-gathered",
        stages=STAGES_12,
    )
    allgather_bucket_size: PositiveCount = idle(
        500_000_000,
        "DeepSpeed: elements gathered at once after the step",
        "a bucket is gathered whole; DeepSpeed ignores it too since all_gather_into_tensor",
        stages=STAGES_12,
    )
    overlap_comm: Flag | None = works(
        True,
        "reduce a bucket while backward fills the next; false: wait for each",
        deepspeed="true at stage 3",
        stages=(1, 2, 3),
    )
    compute_grad_norm: Flag = always(
        True,
        "DeepSpeed: false skips the norm",
        "the engine always computes it",
        stages=STAGES_12,
    )
    load_from_fp32_weights: Flag = unheard(
        True, "restore master weights from fp32 files", "saving comes later", stages=STAGES_12
    )
    elastic_checkpoint: Flag = idle(
        False,
        "DeepSpeed: files that load on another world size (raises at stage 3)",
        "zerolab's files do not depend on the world size",
    )
    offload_param: OffloadParam | None = later(None, "parameters on the host", HOST, stages=STAGE_3)
    offload_optimizer: OffloadOptimizer | None = later(
        None, "optimizer states on the host", HOST, stages=(1, 2, 3)
    )
    zenflow: Params | None = refused(None, "ZenFlow's delayed host updates", "not part of zerolab")
    sub_group_size: PositiveCount = idle(
        1_000_000_000,
        "DeepSpeed: elements stepped at once at stage 3",
        "the step goes bucket by bucket: reduce_bucket_size says how much at once",
        stages=STAGE_3,
    )
    prefetch_bucket_size: Count | None = works(
        None,
        "gather as many units ahead as fit in this many elements; unset: one, whatever its size",
        **_stage3("prefetch_bucket_size", deepspeed=50_000_000),
    )
    param_persistence_threshold: Count = works(
        0,
        "parameters of at most this many elements stay whole",
        **_stage3("param_persistence_threshold", deepspeed=100_000),
    )
    model_persistence_threshold: Count = works(
        sys.maxsize,
        "at most this many elements stay whole in all",
        **_stage3("model_persistence_threshold"),
    )
    max_live_parameters: Count = works(
        0,
        "most elements that may stay gathered between forward and backward",
        **_stage3("max_live_parameters", deepspeed=1_000_000_000),
    )
    max_reuse_distance: Count = works(
        0,
        "keep a unit gathered when backward uses it again within this many elements",
        **_stage3("max_reuse_distance", deepspeed=1_000_000_000),
    )
    gather_16bit_weights_on_model_save: Flag = unheard(
        False,
        "save_16bit_model gathers the weights",
        "saving comes later",
        **_stage3("gather_16bit_weights_on_model_save"),
    )
    module_granularity_threshold: Count = idle(
        0,
        "DeepSpeed: gather small modules together",
        "units are repeated blocks, or those in zerolab.unit_modules",
        **_stage3("module_granularity_threshold"),
    )
    use_all_reduce_for_fetch_params: Flag = idle(
        False,
        "DeepSpeed: gather by an all-reduce of zeros",
        "it moves twice the bytes; zerolab gathers",
        **_stage3("use_all_reduce_for_fetch_params"),
    )
    allgather_sequential: Flag = idle(
        False,
        "DeepSpeed: gather one parameter after the other",
        "a unit is gathered bucket by bucket",
        **_stage3("allgather_sequential"),
    )
    ignore_unused_parameters: Flag = always(
        True,
        "a parameter without a gradient is no error",
        "unused parameters are found by a bitmap each step and skipped",
        stages=STAGES_12,
    )
    legacy_stage1: Flag = refused(False, "the first ZeRO-1", "DeepSpeed raises too", stages=(1,))
    round_robin_gradients: Flag = idle(
        False,
        "DeepSpeed: deal gradients to the ranks in turn",
        "every rank owns an equal slice of every bucket, so no rank is the slow one",
        stages=STAGES_12,
    )
    parameter_alignment: Flag = idle(
        False, "DeepSpeed: 16-byte starts", "segments start where the bucket cuts them"
    )
    zero_hpz_partition_size: PositiveCount = refused(
        1, "ZeRO++: a second shard inside the node", "not part of zerolab", stages=STAGE_3
    )
    zero_quantized_weights: Flag = cuda(
        False, "ZeRO++: int8 gathers", "the quantizers are CUDA code", stages=STAGE_3
    )
    zero_quantized_nontrainable_weights: Flag = cuda(
        False, "ZeRO++: int8 frozen weights", "the quantizers are CUDA code", stages=STAGE_3
    )
    zero_quantized_gradients: Flag = cuda(
        False, "ZeRO++: int4 gradients", "the quantizers are CUDA code", stages=STAGE_3
    )
    memory_efficient_linear: Flag = idle(
        True,
        "DeepSpeed: a Linear that saves no weight",
        "no layer is replaced here",
        stages=STAGE_3,
    )
    pipeline_loading_checkpoint: Flag = idle(
        False, "DeepSpeed: overlap loading", "files are read bucket by bucket", stages=STAGE_3
    )
    override_module_apply: Flag = idle(
        True, "DeepSpeed: gather in Module.apply", "use zero.GatheredParameters", stages=STAGE_3
    )
    log_trace_cache_warnings: Flag = idle(
        False, "DeepSpeed: report changes of its trace", "there is no trace to miss"
    )
    enable_sanity_checks: Flag = always(
        False, "DeepSpeed: extra assertions", "zerolab checks shapes and order in every collective"
    )
    save_muon_momentum_buffer_in_memory: Flag = idle(
        False, "DeepSpeed: for Muon", "Muon depends on the layout and is refused"
    )
    leaf_module: LeafModule | None = idle(
        None, "DeepSpeed: modules gathered as one", "name units with zerolab.unit_modules"
    )
