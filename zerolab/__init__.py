"""zerolab: how large models are trained, as an engine that reads like a book.

Reading order is import order, and the number is the chapter:

    errors records          0   what can go wrong; what is written down
    device                  0   the virtual GPU: who holds which bytes, and when they run out
    comm                    0   ranks and their collectives; the only user of torch.distributed
    spec                    0   the whole idea, slowly, in one process: what every stage must equal
    two_layers              3   each idea by itself on two layers, over torch and comm alone
    gpt data                1   a small GPT and a real text
    elementwise             4   the optimizers that cannot step on shards, and why
    config                  12  ds_config.json: every key explained
    flat bucket             3   parameters laid end to end, cut into buckets
    homes sharded_param     6   where a parameter lives; one that is sharded from its birth
    optim                   4   a torch optimizer over this rank's segments
    buffers precision       7   what all ranks must agree on: buffers, norms, flags
    options                 3   what a stage is told about precision and traffic
    reducing                3   when a bucket is sent, and what becomes of the mean
    ddp zero1 zero2         3-5 the stages, each the difference to the one before
    absent                  6   what a parameter answers while its values lie in shards
    turns watching          6   one unit's turn, and how the stage learns that it has come
    unit_sharding zero3     6   who needs a unit when; stage 3, moment by moment
    units                   6   which modules are gathered as one
    gathering               6   looking at, and changing, parameters that lie in shards
    changes                 7   16-bit weights that a script writes to by itself
    zero utils              6   a model built sharded; the parts of a parameter, for scripts
    arguments building      12  what a script says; optimizer, schedule, loader, loss scale
    misuse                  12  errors of torch that come from how the engine is used
    measuring               1   the bytes of the model states, whoever counts them
    accumulation            12  which micro-step ends with an update
    questions               12  what a script asks an engine
    engine                  12  initialize, forward, backward, step
    checkpointing           8   activation checkpointing under DeepSpeed's names
    sim                     1   what a run will hold and move, said before it runs
    lab                     0   exercises, checks and runs for the notebooks
    cli                     12  the command line, which may import everything above

The names below are loaded when they are first used, so that `import zerolab.comm` costs no engine.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ESTIMATES = tuple(
    f"estimate_zero{stage}_model_states_mem_needs{ending}"
    for stage in (2, 3)
    for ending in ("", "_all_live", "_all_cold")
)
_HOME = {
    "run": ".comm",
    "initialize": ".engine",
    "add_config_arguments": ".arguments",
    "init_distributed": ".arguments",
    "VirtualGPU": ".device",
    "UsageError": ".errors",
    "DeadlockError": ".errors",
} | dict.fromkeys(_ESTIMATES, ".sim.deepspeed_estimators")
_MODULES = ("checkpointing", "comm", "device", "lab", "utils", "zero")
__all__ = [
    "DeadlockError",
    "UsageError",
    "VirtualGPU",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "run",
]


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of the package, when it is first asked for."""
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
