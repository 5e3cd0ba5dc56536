"""Chapter 1: DeepSpeed's memory estimators, with its formulas and its names.

Owns no data. Psi is the number of parameters, each storage counted once; L those of the largest
layer; n GPUs a node, K nodes, T = n K GPUs; f a factor for buffers, 1.5. They say less than
`estimate`: no stage 1, no activations, no buckets, 18 bytes a parameter where ZeRO's own count
is 16. They are here because scripts and articles quote them.

Source: DeepSpeed 0.19.8, `estimate_zero2_model_states_mem_needs` and its five relatives.
"""

from torch import nn

from ..errors import UsageError

GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of model states a node's host memory and one GPU need at stage 2.

    Args:
        total_params: Psi.
        num_gpus_per_node: n.
        num_nodes: K.
        cpu_offload: the optimizer is on the host.
        additional_buffer_factor: f.

    Returns:
        Host bytes, GPU bytes.
    """
    _check(total_params, num_gpus_per_node, num_nodes)
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        gpu = 2 * total_params
        host = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        gpu = 2 * total_params + int(18 * total_params / total_gpus)
        host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of model states a node's host memory and one GPU need at stage 3.

    Args:
        total_params: Psi.
        largest_layer_params: L.
        num_gpus_per_node: n.
        num_nodes: K.
        cpu_offload: the optimizer is on the host.
        cpu_offload_params: so are the parameters.
        zero_init: the model is built under `zero.Init`.
        additional_buffer_factor: f.

    Returns:
        Host bytes, GPU bytes, and the GPU bytes of the largest layer among them.
    """
    _check(total_params, num_gpus_per_node, num_nodes)
    total_gpus = num_nodes * num_gpus_per_node
    layer = 4 * largest_layer_params
    if not cpu_offload:
        gpu = layer + int(18 * total_params / total_gpus)
        held = largest_layer_params if zero_init else total_params
        return int(held * 4 * num_gpus_per_node * additional_buffer_factor), gpu, layer
    gpu = layer + (0 if cpu_offload_params else int(2 * total_params / total_gpus))
    a_node, states = 1 / num_nodes, 18 if cpu_offload_params else 16
    if zero_init:  # factors in DeepSpeed's order: floats round, and then are cut to integers
        return int(total_params * states * a_node * additional_buffer_factor), gpu, layer
    per_param = max(4 * num_gpus_per_node, states * a_node)
    return int(total_params * per_param * additional_buffer_factor), gpu, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 2 for a model, with and without offload."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 2 for a number of parameters, with and without offload."""
    _print_head(num_nodes, num_gpus_per_node, f"{int(total_params / 1e6)}M total params")
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, gpu, f"offload_optimizer={_device(offload)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for a model, for every choice of offload and zero.Init."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for every choice of offload and zero.Init."""
    what = (
        f"{int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params"
    )
    _print_head(num_nodes, num_gpus_per_node, what)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            choices = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
            _print_row(host, gpu, f"{choices}, zero_init={int(zero_init)}")


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model, each storage once, and those of its largest layer.

    A tensor without memory of its own (on the meta device, or sharded) counts by itself.
    """
    counted: dict[tuple[int, int], int] = {}
    for param in model.parameters():
        has_memory = not param.is_meta and type(param) is nn.Parameter
        key = (param.data_ptr() if has_memory else 0, 0 if has_memory else id(param))
        counted[key] = param.numel()
    layers = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    return sum(counted.values()), max(layers)


def _check(total_params: int, num_gpus_per_node: int, num_nodes: int) -> None:
    """Refuse machines and models that do not exist."""
    if total_params < 0 or num_gpus_per_node < 1 or num_nodes < 1:
        raise UsageError(
            f"{total_params} parameters on {num_nodes} nodes of {num_gpus_per_node} GPUs cannot "
            "be: give at least 0, 1 and 1"
        )


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _print_head(num_nodes: int, num_gpus_per_node: int, what: str) -> None:
    nodes = "nodes" if num_nodes > 1 else "node"
    gpus = "GPUs" if num_gpus_per_node > 1 else "GPU"
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.\n"
        f"SW: Model with {what}.\n"
        "  per CPU   |  per GPU  |   Options"
    )


def _print_row(host: int, gpu: int, options: str) -> None:
    print(f" {host / GIB:7.2f}GiB | {gpu / GIB:6.2f}GiB | {options}")
