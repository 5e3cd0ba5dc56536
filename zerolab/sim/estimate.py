"""Chapter 1: where the memory goes, in closed form: multiply and add, run nothing.

Owns no data: this is the door to all formulas, so that `estimate.x` finds each of them, and the
two that put several together. Every one is held to the virtual GPU's ledger by a test, or to a
number that somebody published.

    layouts                units, buckets and padding, from lengths alone
    states                 parameters, gradients, master weights, optimizer states
    traffic                what the collectives of a step carry
    links                  how long a collective takes, on a ring, a tree and a star
    temporaries            buckets on their way, gathered units, scratch of the step
    activations            what forward leaves for backward
    hosts                  host memory and the bus, with offload
    deepspeed_estimators   DeepSpeed's own two, number for number

Sizes are bytes; GB is 1e9 of them, GiB 2**30.
"""

from ..records import KINDS
from .activations import (
    activation_bytes,
    attention_map_bytes,
    block_activation_bytes,
    paper_activation_bytes,
    stem_activation_bytes,
)
from .deepspeed_estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs,
    model_to_params,
)
from .hosts import bus_bytes, host_bytes, offload_states
from .layouts import BucketLayout, Layout, cut, layout, layout_of
from .links import (
    crossover_bytes,
    fitted,
    ring_seconds,
    ring_sent_elements,
    star_seconds,
    star_sent_elements,
    tree_depth,
    tree_seconds,
)
from .states import (
    MASTER_BYTES,
    OPTIMIZERS,
    PARAM_BYTES,
    STAGES,
    STATE_KINDS,
    bytes_per_param,
    gpus_needed,
    model_state_bytes,
    model_states,
    saving_factor,
    sharded_kinds,
    smallest_stage,
    state_bytes,
)
from .temporaries import (
    bucket_peak_bytes,
    bucket_peak_numel,
    gathered_peak_bytes,
    gathered_peak_numel,
    gpt_arrivals,
    step_scratch_bytes,
)
from .traffic import elements_moved, elements_moved_by, ring_factor, sent_bytes

__all__ = [
    "BUCKET_NUMEL",
    "GB",
    "GIB",
    "MASTER_BYTES",
    "OPTIMIZERS",
    "PARAM_BYTES",
    "STAGES",
    "STATE_KINDS",
    "BucketLayout",
    "Layout",
    "activation_bytes",
    "article_estimate",
    "attention_map_bytes",
    "block_activation_bytes",
    "bucket_peak_bytes",
    "bucket_peak_numel",
    "bus_bytes",
    "bytes_per_param",
    "crossover_bytes",
    "cut",
    "elements_moved",
    "elements_moved_by",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs",
    "fitted",
    "gathered_peak_bytes",
    "gathered_peak_numel",
    "gpt_arrivals",
    "gpus_needed",
    "host_bytes",
    "layout",
    "layout_of",
    "memory_breakdown",
    "model_state_bytes",
    "model_states",
    "model_to_params",
    "offload_states",
    "paper_activation_bytes",
    "ring_factor",
    "ring_seconds",
    "ring_sent_elements",
    "saving_factor",
    "sent_bytes",
    "sharded_kinds",
    "smallest_stage",
    "star_seconds",
    "star_sent_elements",
    "state_bytes",
    "stem_activation_bytes",
    "step_scratch_bytes",
    "tree_depth",
    "tree_seconds",
]

GB = 10**9
GIB = 2**30
BUCKET_NUMEL = 2**20  # our default of `reduce_bucket_size`, elements


def memory_breakdown(
    num_params: int,
    world_size: int,
    stage: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    bucket_numel: int = BUCKET_NUMEL,
    gathered_numel: int = 0,
    activation: int = 0,
) -> dict[str, int]:
    """Return the bytes of one rank by kind, every kind of `records.KINDS`, for a picture.

    Model states are the paper's; stages 2 and 3 add two buckets on their way, as long as they
    are not larger than the model. The kinds do not all peak at the same moment, so the sum is
    an upper bound of what the formulas cover, not a peak.

    Args:
        num_params: Psi, a count.
        world_size: N.
        stage: 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `OPTIMIZERS`.
        bucket_numel: elements of a bucket (`reduce_bucket_size`).
        gathered_numel: elements that stage 3 has whole at a time, see `gathered_peak_numel`.
        activation: bytes of activations, see `activation_bytes`.
    """
    states = model_states(num_params, world_size, stage, precision, optimizer)
    width = PARAM_BYTES[precision]
    others = {
        "gathered": width * gathered_numel if stage == 3 else 0,
        "bucket": width * min(2 * bucket_numel, num_params) if stage >= 2 else 0,
        "activation": activation,
    }
    return {kind: (states | others).get(kind, 0) for kind in KINDS}


def article_estimate(psi_billions: float, num_gpus: int, stage: int) -> float:
    """Return the "GB per GPU" of a popular article's estimator, as it stands there.

    Its arithmetic is the paper's, and for model states of mixed AdamW right. Find what is wrong:

    * it names the count of parameters `psi_bytes`: 7.5e9 of them are 15e9 bytes in bf16;
    * "the memory of a GPU" is model states alone: no activations, no bucket on its way, no unit
      gathered at stage 3 (with one rank stage 3 is said to cost what stage 0 does; it costs more);
    * 2, 2 and 12 are fixed: with SGD or Lion the 12 is less, in fp32 the 16 is 4 + 4 + 8;
    * no padding: N need not divide Psi;
    * its configuration has `train_batch_size` 16 and `gradient_accumulation_steps` 4, which no
      eight GPUs can run, and eight is its default: 16 / (4 * 8) is no whole sample;
    * "GB" is 1e9 bytes, while cards and DeepSpeed's own estimator mean 2**30.

    `model_states`, `memory_breakdown` and `zerolab estimate` put these right.

    Args:
        psi_billions: parameters, in billions.
        num_gpus: N.
        stage: 0 to 3; any other number is taken without complaint.
    """
    psi_bytes = psi_billions * 1e9
    opt = 12 * psi_bytes / num_gpus if stage >= 1 else 12 * psi_bytes
    grad = 2 * psi_bytes / num_gpus if stage >= 2 else 2 * psi_bytes
    params = 2 * psi_bytes / num_gpus if stage >= 3 else 2 * psi_bytes
    return (params + grad + opt) / 1e9
