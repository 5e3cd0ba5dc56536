"""Chapter 1: what offload asks of host memory and of the bus to it.

Owns no data. Offloaded states leave the GPU and lie in the host's memory, which all ranks of a
node share; the bus carries what both sides need.

Source: ZeRO-Offload (Ren et al. 2021), section 4: 2 Psi on the GPU, 14 Psi on the host and 4 Psi
over the bus a step, mixed Adam on one GPU. DeepSpeed keys `offload_optimizer`, `offload_param`.
"""

from ..errors import UsageError
from .states import bytes_per_param, model_states


def offload_states(
    num_params: int,
    world_size: int = 1,
    stage: int = 2,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    offload_param: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of model states that one rank keeps on its GPU and on the host, by kind.

    `offload_optimizer` takes gradients, master weights and optimizer states away; with
    `offload_param` (stage 3) the shard of the parameters goes too.

    Args:
        num_params: Psi.
        world_size: N.
        stage: 1 to 3; at N = 1 they are alike.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `OPTIMIZERS`.
        offload_param: whether parameters leave too; stage 3 only.
    """
    if stage < (3 if offload_param else 1):
        needs = "offload_param needs stage 3" if offload_param else "offload needs stage 1 to 3"
        raise UsageError(f"{needs}, not {stage}: only what is sharded is offloaded")
    states = model_states(num_params, world_size, stage, precision, optimizer)
    gpu = {kind: n for kind, n in states.items() if kind == "param" and not offload_param}
    host = {kind: n for kind, n in states.items() if kind not in gpu}
    return gpu, host


def host_bytes(
    num_params: int,
    world_size: int = 1,
    ranks_per_node: int = 1,
    stage: int = 2,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    offload_param: bool = False,
) -> int:
    """Return the bytes of host memory that one node needs: its ranks share the host."""
    _, host = offload_states(
        num_params, world_size, stage, precision, optimizer, offload_param=offload_param
    )
    return ranks_per_node * sum(host.values())


def bus_bytes(num_params: int, world_size: int = 1, precision: str = "bf16") -> int:
    """Return the bytes one rank's bus carries a step: gradients down, updated parameters up."""
    each = bytes_per_param(precision)
    return (each["grad"] + each["param"]) * -(-num_params // world_size)
