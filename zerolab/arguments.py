"""Chapter 12: what a DeepSpeed script says before it builds its model: its arguments, its ranks.

Owns nothing. Phases: `add_config_arguments` on the script's parser, then `init_distributed`;
`zerolab.initialize(args=..., ...)` reads what the parser found.

Source: DeepSpeed's `add_config_arguments` and `init_distributed`, with their names.
"""

import argparse
import logging
from typing import Any

import torch

from . import comm
from .errors import UsageError

log = logging.getLogger("zerolab")

BACKENDS = (None, "gloo", "nccl")
INITIALIZE = {  # DeepSpeed's other arguments of `initialize`, and why they are refused if they are
    "config_params": "",
    "dist_init_required": "",
    "distributed_port": "",
    "mpu": "there is no model parallelism here",
    "mesh_param": "there is no sequence or tensor parallelism here",
}


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, and their old names, to a script's parser.

    Args:
        parser: the script's own.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations, run by zerolab")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="a flag for the script's own use; the engine does not look at it",
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="a ds_config.json")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument(
        "--deepscale_config", type=str, default=None, help="old name of --deepspeed_config"
    )
    return parser


def config_of(args: Any, config: Any, more: dict[str, Any]) -> Any:
    """Return the configuration that a call of `initialize` means.

    Args:
        args: the script's parsed arguments, or None.
        config: the argument of that name, which goes before what `args` names.
        more: further arguments of `initialize`, by DeepSpeed's names.

    Raises:
        UsageError: no configuration is named, or an argument is unknown or cannot work.
    """
    for name, value in more.items():
        if name not in INITIALIZE:
            raise UsageError(f"initialize has no argument {name!r}; see help(zerolab.initialize)")
        if value is not None and INITIALIZE[name]:
            raise UsageError(f"initialize({name}=...): {INITIALIZE[name]}; leave it out")
    named = [config, more.get("config_params"), *_named_by(args)]
    found = next((source for source in named if source is not None), None)
    if found is None:
        raise UsageError("initialize needs config=, a dict or the path of a ds_config.json")
    return found


def _named_by(args: Any) -> list[Any]:
    """Return what a script's arguments say, the new name first."""
    new, old = (getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale"))
    if old is not None and new is None:
        log.warning("--deepscale_config is the old name of --deepspeed_config")
    return [new, old]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    **more: Any,
) -> None:
    """Join the ranks that a launcher started; alone, and inside `zerolab.run`, do nothing.

    `initialize` and `zero.Init` do it too; call it earlier if the script asks for its rank.

    Args:
        dist_backend: "gloo", "nccl" or None. Where nccl has no GPUs, gloo is used and said.
        auto_mpi_discovery: accepted as in DeepSpeed; torchrun and `zerolab launch` set the ranks.
        distributed_port: accepted; the launcher sets MASTER_PORT.
        verbose: say which backend is used.
        more: DeepSpeed's other arguments; `rank`, `world_size` and `init_method` come from the
            environment and are refused here.

    Raises:
        UsageError: an unknown backend or argument, or a half set environment.
    """
    if dist_backend not in BACKENDS:
        raise UsageError(f"dist_backend {dist_backend!r} is unknown: give 'gloo', 'nccl' or None")
    _check(more)
    comm.init_process_group()
    world = comm.get_world()
    if comm.get_rank() == 0 and dist_backend not in (None, world) and world in ("gloo", "nccl"):
        reason = "" if torch.cuda.is_available() else ": there is no GPU here"
        log.warning("dist_backend is %s, but %s is used%s", dist_backend, world, reason)
    elif comm.get_rank() == 0 and verbose:
        log.info("%d ranks, %s", comm.get_world_size(), world)


def _check(more: dict[str, Any]) -> None:
    """Refuse what would contradict the launcher."""
    neutral = {
        "rank": (-1,),
        "world_size": (-1,),
        "init_method": (None, "env://"),
        "config": (None,),
    }
    for name, value in more.items():
        if name in ("timeout", "dist_init_required"):
            continue
        if name not in neutral:
            raise UsageError(f"init_distributed has no argument {name!r}")
        if value not in neutral[name]:
            raise UsageError(
                f"init_distributed({name}={value!r}): ranks come from the environment that a "
                "launcher sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); start with torchrun"
            )
