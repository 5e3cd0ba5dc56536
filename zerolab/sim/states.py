"""Chapter 1: model states: parameters, gradients and what the optimizer keeps.

Owns two tables, the bytes of an element in every precision and with every optimizer, and two
formulas over them. `model_states` is the paper's: one number of parameters, one padding at most.
`state_bytes` is the engine's: a `Layout`, exact to the byte at the mark `grads_ready`.
Mixed precision with AdamW is 2 + 2 + 4 + 8 = 16 bytes a parameter; so is fp32, 4 + 4 + 0 + 8.

Source: ZeRO (Rajbhandari et al. 2020), sections 3.1 and 5, figure 1. DeepSpeed keys
`zero_optimization.stage`, `bf16`, `fp16`, `optimizer.type`.
"""

from dataclasses import dataclass

from ..errors import UsageError
from .layouts import Layout

STAGES = (0, 1, 2, 3)
STATE_KINDS = ("param", "grad", "master", "optimizer")
MASTER_BYTES = 4  # an fp32 copy
PARAM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer remembers, in fp32.

    Attributes:
        bytes_per_param: bytes for every element that it updates.
        bytes_per_segment: bytes for every tensor that it updates: AdamW's count of steps.
    """

    bytes_per_param: int
    bytes_per_segment: int


OPTIMIZERS = {
    "adamw": OptimizerState(8, 4),  # two moments
    "adam": OptimizerState(8, 4),
    "adagrad": OptimizerState(4, 4),  # a sum of squares
    "lion": OptimizerState(4, 0),  # one moment
    "momentum": OptimizerState(4, 0),  # SGD with momentum
    "sgd": OptimizerState(0, 0),
}


def state_of(optimizer: str) -> OptimizerState:
    """Look up what an optimizer remembers, by its lower-case name; SGD's momentum is a name too."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is unknown; give {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def bytes_per_param(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """Return the bytes that one parameter costs without sharding, as a dict.

    Its keys are "param", "grad", "master" (the fp32 copy that the optimizer updates; 0 where
    there is none) and "optimizer" (what the optimizer remembers from step to step).

    Args:
        precision: "bf16", "fp16" (both with fp32 master weights) or "fp32".
        optimizer: a name in `OPTIMIZERS`.
    """
    check_precision(precision)
    width = PARAM_BYTES[precision]
    return {
        "param": width,
        "grad": width,
        "master": 0 if precision == "fp32" else MASTER_BYTES,
        "optimizer": state_of(optimizer).bytes_per_param,
    }


def sharded_kinds(stage: int) -> tuple[str, ...]:
    """Return which of "param", "grad", "master" and "optimizer" a stage divides among ranks."""
    check_stage(stage)
    optimizer = ("master", "optimizer")
    return ((), optimizer, (*optimizer, "grad"), (*optimizer, "grad", "param"))[stage]


def model_states(
    num_params: int,
    world_size: int = 1,
    stage: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> dict[str, int]:
    """Return the bytes of model states on one rank, by kind: the paper's table.

        stage 0: 16 Psi      stage 1: 4 Psi + 12 Psi/N
        stage 3: 16 Psi/N    stage 2: 2 Psi + 14 Psi/N      (bf16 or fp16, AdamW)

    A shard is Psi/N rounded up, as if the model were one bucket.

    Args:
        num_params: Psi, a count.
        world_size: N.
        stage: 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `OPTIMIZERS`.
    """
    if num_params < 1 or world_size < 1:
        small = f"num_params {num_params}" if num_params < 1 else f"world_size {world_size}"
        raise UsageError(f"{small} is below 1; give 1 or more")
    sharded, shard_numel = sharded_kinds(stage), -(-num_params // world_size)
    return {
        kind: each * (shard_numel if kind in sharded else num_params)
        for kind, each in bytes_per_param(precision, optimizer).items()
    }


def model_state_bytes(
    num_params: int,
    world_size: int = 1,
    stage: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> int:
    """Return the bytes of all model states on one rank: the sum of `model_states`."""
    return sum(model_states(num_params, world_size, stage, precision, optimizer).values())


def saving_factor(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """Return how many times smaller a stage's model states are than stage 0's.

    Padding is left out. On one rank it is 1.0 at every stage.

    Args:
        stage: 0 to 3.
        world_size: N.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `OPTIMIZERS`.
    """
    each, sharded = bytes_per_param(precision, optimizer), sharded_kinds(stage)
    left = sum(n / world_size if kind in sharded else n for kind, n in each.items())
    return sum(each.values()) / left


def gpus_needed(
    num_params: int,
    memory_bytes: int,
    stage: int = 3,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> int | None:
    """Return the fewest ranks whose memory holds the model states; None if no number does.

    Args:
        num_params: Psi.
        memory_bytes: of one GPU.
        stage: 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `OPTIMIZERS`.
    """
    each, sharded = bytes_per_param(precision, optimizer), sharded_kinds(stage)
    whole = num_params * sum(n for kind, n in each.items() if kind not in sharded)
    shared = sum(n for kind, n in each.items() if kind in sharded)
    if not shared:
        return 1 if whole <= memory_bytes else None
    shard_numel = (memory_bytes - whole) // shared
    return -(-num_params // shard_numel) if shard_numel >= 1 else None


def smallest_stage(
    num_params: int,
    world_size: int,
    memory_bytes: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> int | None:
    """Return the lowest stage whose model states fit; None if none does.

    The lowest is the cheapest: stages 1 and 2 move what stage 0 moves, 2 Psi a step, but with
    accumulation stage 2 moves more, and stage 3 always does.
    """
    for stage in STAGES:
        states = model_state_bytes(num_params, world_size, stage, precision, optimizer)
        if states <= memory_bytes:
            return stage
    return None


def state_bytes(
    stage: int,
    dtype: str,
    sizes: Layout,
    *,
    optimizer: str = "adamw",
    grad_dtype: str | None = None,
) -> dict[str, int]:
    """Return the bytes of model states that one rank holds when its gradients are ready.

    From the second step on. With N ranks, 16-bit parameters and AdamW, P elements with padding
    and E without (padding lies in buffers and is sent, but the optimizer never touches it):

        stage   param   grad    master   optimizer
        0       2 P     2 P     4 P      8 E       + 4 a piece
        1       2 P     2 P     4 P/N    8 E own   + 4 a parameter
        2       2 P     2 P/N   4 P/N    8 E own   + 4 a parameter
        3       2 P/N   2 P/N   4 P/N    8 E own   + 4 a parameter

    Stage 1 reduces in place: its slice of the mean is a view into the full gradients, so these
    stay. In fp32 parameters and gradients take 4 bytes and there is no master. Frozen parameters
    cost their own bytes only; stage 3 shards them too, but not persistent ones.

    Args:
        stage: 0 to 3.
        dtype: "bf16", "fp16" or "fp32".
        sizes: the model's lengths.
        optimizer: a name in `OPTIMIZERS`.
        grad_dtype: in which gradients wait (`data_types.grad_accum_dtype`); None for `dtype`.
    """
    check_stage(stage)
    check_precision(dtype)
    check_precision(grad_dtype or dtype)
    remembered = state_of(optimizer)
    world_size = sizes.world_size
    full, shard = sizes.padded_numel, sizes.padded_numel // world_size
    gathered, persistent = sizes.gathered_numel, sizes.persistent_numel
    stepped = sizes.numel if stage == 0 else sizes.own_numel
    num_segments = sizes.num_pieces if stage == 0 else sizes.num_params
    return {
        "param": PARAM_BYTES[dtype]
        * (persistent + (gathered // world_size if stage >= 3 else gathered)),
        "grad": PARAM_BYTES[grad_dtype or dtype] * (shard if stage >= 2 else full),
        "master": 0 if dtype == "fp32" else MASTER_BYTES * (shard if stage >= 1 else full),
        "optimizer": remembered.bytes_per_param * stepped
        + remembered.bytes_per_segment * num_segments,
    }


def check_stage(stage: int) -> None:
    """Refuse a stage that does not exist."""
    if stage not in STAGES:
        raise UsageError(f"stage {stage} is unknown; give 0, 1, 2 or 3")


def check_precision(precision: str) -> None:
    """Refuse a precision that has no formula."""
    if precision not in PARAM_BYTES:
        raise UsageError(f"dtype {precision!r} is unknown; give {', '.join(PARAM_BYTES)}")
