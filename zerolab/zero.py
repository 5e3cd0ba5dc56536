"""Chapter 6: a model larger than one GPU, built sharded from its first layer on.

Owns the building sites: for every rank, the `Init` blocks that it is inside of and the modules
whose constructors are running. Phases of `with zero.Init(): model = Model()`:

    enter      every nn.Module class gets a constructor that reports when it has ended
    construct  the user's code runs as always, with the same random numbers, on every rank
    finish     the module is complete: its parameters are sharded, so that no more than one
               module is ever whole beside the shards
    exit       the constructors are put back

`initialize` later turns the slices into buckets, one bucket at a time, and nothing else changes:
the model is bit for bit the one that would have been built without `Init`.

Source: DeepSpeed, `zero.Init`, `zero.GatheredParameters`; ZeRO-Infinity (2021), section 7.2.
"""

import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import comm, homes, sharded_param
from . import config as config_
from .errors import UsageError
from .gathering import GatheredParameters

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]

log = logging.getLogger("zerolab")

LATER = {
    "param_swapper": "the NVMe tier belongs to the offload chapter",
    "mpu": "there is no model parallelism here",
    "data_parallel_group": "parameters are cut over all ranks",
    "zero_param_parallel_group": "parameters are cut over all ranks",
    "sequence_data_parallel_group": "parameters are cut over all ranks",
    "zero_quantized_weights": "the quantizers are CUDA code",
    "zero_quantized_nontrainable_weights": "the quantizers are CUDA code",
}
WITHOUT_EFFECT = ("mem_efficient_linear", "pin_memory")
DEVICES = (None, "none", "cuda")


class Init:
    """Build a model whose parameters are sharded as soon as each module's constructor has ended.

    All ranks build the same model together. Code that touches a sharded parameter (`nn.init`,
    `apply`, `load_state_dict`) gets it whole and needs no change, as long as every rank runs it.

    Args:
        module: a finished model to shard now, in place of a `with` block.
        config_dict_or_path: the configuration that training will use; at stages 0 to 2, where
            parameters are whole, the model is then built as without `Init`.
        config: the same, by its older name.
        remote_device: None; a host tier belongs to the offload chapter.
        enabled: False to do nothing.
        dtype: cast floating parameters to this when they are sharded. None keeps them exact, so
            that fp32 master weights begin where they would without `Init`, at no extra cost: the
            exact slices become the master weights.
        more: DeepSpeed's other arguments, which are refused with the reason.

    Raises:
        UsageError: an argument cannot work here.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        config_dict_or_path: Any = None,
        config: Any = None,
        remote_device: str | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> None:
        """Check the arguments; shard `module` if one is given."""
        _check(remote_device, dtype, more)
        self.dtype = dtype
        self.enabled = enabled
        if enabled:
            comm.init_process_group()
            given = config if config_dict_or_path is None else config_dict_or_path
            self.enabled = _is_stage3(given)
        if module is not None and self.enabled:
            self.finish(module)

    def __enter__(self) -> None:
        """Begin to shard what is built."""
        if self.enabled:
            _site.blocks.append(self)
            _patches.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop; what was touched and is still whole is sharded again."""
        if self.enabled:
            _patches.exit()
            _site.blocks.remove(self)
            if kind is None:
                sharded_param.settle()

    def finish(self, module: nn.Module) -> None:
        """Shard the parameters of a module whose constructor has ended, and of all inside it."""
        sharded_param.settle()
        for owner in module.modules():
            for param in owner._parameters.values():
                if type(param) is nn.Parameter and not param.is_meta:
                    self._shard(param, owner)

    def _shard(self, param: nn.Parameter, owner: nn.Module) -> None:
        """Shard one whole parameter, unless somebody holds its values or an engine has it."""
        if sharded_param.is_loose(param) or homes.find(param) is not None:
            return
        if self.dtype is not None and param.is_floating_point():
            param.data = param.data.to(self.dtype)
        sharded_param.shard(param, owner)


def _check(remote_device: str | None, dtype: Any, more: dict[str, Any]) -> None:
    """Refuse what cannot work here, with the reason."""
    if remote_device not in DEVICES:
        raise UsageError(
            f"zero.Init(remote_device={remote_device!r}): the host and NVMe tiers belong to the "
            "offload chapter; leave it out"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"zero.Init(dtype={dtype!r}): give a floating torch.dtype or None")
    for name, value in more.items():
        if name not in LATER and name not in WITHOUT_EFFECT:
            raise UsageError(f"zero.Init has no argument {name!r}; see help(zerolab.zero.Init)")
        if name in LATER and value:
            raise UsageError(f"zero.Init({name}=...): {LATER[name]}; leave it out")


def _is_stage3(config: Any) -> bool:
    """Whether the configuration, if there is one, shards parameters."""
    if config is None:
        return True
    stage = config_.load(config, comm.get_world_size()).stage
    if stage < 3 and comm.get_rank() == 0:
        log.warning(
            "zero.Init does nothing here: parameters are whole at stage %d; stage 3 shards them",
            stage,
        )
    return stage == 3


# -- constructors that report ---------------------------------------------------------------


class _Site(threading.local):
    """What one rank is building; in the lockstep world a rank is a thread."""

    def __init__(self) -> None:
        self.blocks: list[Init] = []
        self.open: set[int] = set()  # ids of modules whose constructors are running


_site = _Site()


class _Patches:
    """The changed constructors of all module classes, there while any rank is inside a block."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks = 0
        self.originals: dict[type[nn.Module], Callable] = {}

    def enter(self) -> None:
        """Change the constructors of the classes that there are, and of those that will be."""
        with self.lock:
            self.blocks += 1
            if self.blocks == 1:
                nn.Module.__init_subclass__ = _announce  # pyright: ignore[reportAttributeAccessIssue]
            self.change(nn.Module)

    def exit(self) -> None:
        """Put everything back when the last block ends."""
        with self.lock:
            self.blocks -= 1
            if self.blocks == 0:
                del nn.Module.__init_subclass__
                for cls, original in self.originals.items():
                    type.__setattr__(cls, "__init__", original)
                self.originals.clear()

    def change(self, cls: type[nn.Module]) -> None:
        """Change the constructor of a class and of all that derive from it."""
        if "__init__" in cls.__dict__ and cls is not nn.Module and cls not in self.originals:
            self.originals[cls] = cls.__dict__["__init__"]
            type.__setattr__(cls, "__init__", _reporting(self.originals[cls]))
        for derived in cls.__subclasses__():
            self.change(derived)


_patches = _Patches()


@classmethod
def _announce(cls: type[nn.Module], **options: Any) -> None:
    """Change the constructor of a class that is defined inside a block."""
    super(nn.Module, cls).__init_subclass__(**options)
    with _patches.lock:
        _patches.change(cls)


def _reporting(original: Callable) -> Callable:
    """Return a constructor that tells the innermost block when the outermost call has ended."""

    @functools.wraps(original)
    def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not _site.blocks or id(module) in _site.open:
            original(module, *args, **kwargs)
            return
        _site.open.add(id(module))
        try:
            original(module, *args, **kwargs)
        finally:
            _site.open.discard(id(module))
        _site.blocks[-1].finish(module)

    return construct


# -- parameters of other modules -------------------------------------------------------------


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module uses a parameter of another one. Not needed here, and harmless.

    A parameter that is read outside its unit's turn is noticed when it is read.
    """
    if not isinstance(parameter, nn.Parameter):
        kind = type(parameter).__name__
        raise UsageError(f"register_external_parameter needs an nn.Parameter, got {kind}")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`, which does nothing."""
    register_external_parameter(module, parameter)
