"""Chapter 8: activation checkpointing under DeepSpeed's names.

Owns what `configure` was told. `checkpoint(function, *args)` runs a part of the forward without
keeping its activations and runs it again in backward, with the random numbers of the first time,
so that dropout repeats itself. Everything else that DeepSpeed's block can ask for moves or cuts
the saved inputs, and is refused with the reason until it exists.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); torch.utils.checkpoint.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from . import comm
from . import config as config_
from .errors import UsageError

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

WHY_NOT = {
    "partition_activations": "saved activations are cut across model-parallel ranks, and there "
    "are none: data-parallel ranks have different activations",
    "contiguous_memory_optimization": "the arena of saved activations comes with a later chapter",
    "cpu_checkpointing": "saved activations on the host come with the offload chapter",
    "synchronize_checkpoint_boundary": "there is one stream, so there is nothing to synchronize",
    "profile": "timers come with a later chapter",
}

# The arguments of `configure` and the keys of the block that they overrule.
ARGUMENTS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}

_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    **more: bool | None,
) -> None:
    """Set activation checkpointing up; scripts call it once, before they use `checkpoint`.

    Args:
        mpu_: a model-parallel unit; there is no model parallelism here, so None.
        deepspeed_config: a configuration whose `activation_checkpointing` block counts.
        partition_activations: overrules the block's key of that name.
        contiguous_checkpointing: overrules `contiguous_memory_optimization`.
        num_checkpoints: slots of the arena; without an arena it has no effect.
        more: `checkpoint_in_cpu`, `synchronize`, `profile`.

    Raises:
        UsageError: something is asked for that does not exist here, with the reason.
    """
    global _configured
    if mpu_ is not None:
        raise UsageError("configure(mpu_=...): there is no model parallelism here; give None")
    more = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
    } | more
    wanted = _wanted(deepspeed_config, more)
    for key, asked in wanted.items():
        if asked:
            raise UsageError(
                f"activation_checkpointing.{key}: {WHY_NOT[key]}; leave it out, plain "
                "recomputation works"
            )
    _configured = True


def _wanted(deepspeed_config: Any, given: dict[str, bool | None]) -> dict[str, bool]:
    """Return what is asked for, by the names of the block."""
    unknown = [name for name in given if name not in ARGUMENTS]
    if unknown:
        raise UsageError(f"configure has no argument {unknown[0]!r}")
    wanted = {}
    if deepspeed_config is not None:
        block = config_.load(deepspeed_config, comm.get_world_size()).activation_checkpointing
        wanted = {key: bool(getattr(block, key)) for key in WHY_NOT}
    for name, value in given.items():
        if value is not None:
            wanted[ARGUMENTS[name]] = value
    return wanted


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Forget what belongs to one forward; there is nothing here, since no arena is kept."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` now and once more in backward, in place of keeping its activations.

    The outputs and gradients are those of `function(*args)`, also with dropout.

    Args:
        function: part of a model's forward; must do the same each time it is called.
        args: its inputs, which are kept.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)
