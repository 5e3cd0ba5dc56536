"""Chapter 6: how stage 3 learns that a unit's turn has come, without changing the model.

Owns the hooks on modules, on tensors between units and on the dictionaries of parameters, and
nothing else: what they see they tell the stage, to which they hold weak references.

    before and after a unit's forward      hooks of the module
    the first gradient reaches its output  a hook on the output tensor: backward enters the unit
    all its inputs have their gradients    a hook on the input tensors: backward has left it
    a parameter is read                    `module._parameters`, which is a dictionary that tells

There are no hooks on the module's backward: torch does not call them for modules that return
dictionaries, and they forbid operations in place.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from . import comm, sharded_param
from .bucket import Unit
from .errors import UsageError

Ref = Callable[[], Any]


def in_backward() -> bool:
    """Whether autograd is running backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether `torch.func.grad`, `jvp`, `vmap` or the like is running in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def refuse_mixed_levels() -> None:
    """Raise UsageError where ranks are threads and one of them is in forward-mode differentiation.

    Its levels belong to the process: while this rank waits, another one would close them.
    """
    inside = forward_ad._current_level >= 0
    if inside and comm.get_world() == "lockstep" and comm.get_world_size() > 1:
        raise UsageError(
            "forward-mode differentiation (jvp, dual_level) around a unit that is sharded cannot "
            "work where ranks are threads, since torch counts its levels for the process: run it "
            "with processes (world='process'), or at stage 0, 1 or 2"
        )


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave the transforms of `torch.func` for a moment, if one is running.

    Inside them each new tensor is wrapped, and to put a wrapped one into a parameter ends the
    process.
    """
    if not in_transform():
        return contextlib.nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()


def grad_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure that take part in backward."""
    return [leaf for leaf in tensors_in(tree) if leaf.requires_grad]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensors_of_outputs(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's outputs; if there are none, those its objects hold."""
    inside = [vars(leaf) for leaf in tree_leaves(outputs) if hasattr(leaf, "__dict__")]
    return tensors_in(outputs) or tensors_in(inside)


class Arrival:
    """What to do when the gradient of one tensor arrives: free first, then fetch.

    The tensor between two units is the output of one and the input of the other. Autograd calls
    hooks in the order of registration, which would fetch the one before freeing the other.
    """

    __slots__ = ("fetch", "free")

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self.free: list[Callable[[], None]] = []
        self.fetch: list[Callable[[], None]] = []

    @classmethod
    def of(cls, tensor: Any) -> "Arrival":
        """Return the tensor's own, registered with autograd when first asked for."""
        arrival = getattr(tensor, "zerolab_arrival", None)
        if arrival is None:
            arrival = tensor.zerolab_arrival = cls()
            tensor.register_hook(arrival)
        return arrival

    def __call__(self, grad: torch.Tensor) -> None:
        """Be the hook."""
        for action in (*self.free, *self.fetch):
            action()


class WatchedParameters(dict):
    """A module's dictionary of parameters that tells the stage when one is read."""

    def watch(self, stage_ref: Ref, unit_of: dict[int, Unit]) -> None:
        """Say whom to tell, and which units there are to tell of."""
        self._stage_ref = stage_ref
        self._unit_refs = {
            name: weakref.ref(unit_of[id(param)])
            for name, param in self.items()
            if id(param) in unit_of
        }

    def __getitem__(self, name: str) -> Any:
        """Return the parameter, whole if the model is running."""
        unit_ref = self._unit_refs.get(name)
        stage = self._stage_ref()
        if unit_ref is not None and stage is not None:
            stage.read_param(unit_ref())
        return super().__getitem__(name)

    def items(self) -> Any:
        """Return names and parameters, whole if the model is running (`self.parameters()`)."""
        stage = self._stage_ref()
        if stage is None or not stage.running:
            return super().items()
        return ((name, self[name]) for name in self)

    def __reduce__(self) -> tuple:
        """Copy and pickle as a plain dictionary: a copy of the model belongs to no stage."""
        for name, param in self.items():
            if param is not None and sharded_param.is_placeholder(param):
                raise UsageError(
                    f"a module was copied or pickled while its parameter {name!r} is sharded, so "
                    "the copy would hold NaN: do it inside `with zero.GatheredParameters("
                    "module.parameters()):` on every rank, or keep engine.module_state_dict()"
                )
        return (dict, (dict(self),))


class ModuleHook(partial):
    """A hook of the engine on a module. A copy of the module, or a pickled one, has an idle one."""

    def __deepcopy__(self, memo: Any) -> "ModuleHook":
        """Return a hook that does nothing: the copy belongs to no engine."""
        return ModuleHook(idle)

    def __reduce__(self) -> tuple:
        """Be pickled as a hook that does nothing."""
        return (ModuleHook, (idle,))


def idle(*_: Any) -> None:
    """Do nothing."""


# -- the hooks themselves: `partial` binds the first arguments -------------------------------


def before_forward(stage_ref: Ref, unit_ref: Ref, _: nn.Module, args: Any, kwargs: Any) -> None:
    """A unit's module is about to run."""
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.pre_forward(unit)
        stage.watch_inputs(unit, (args, kwargs))


def after_forward(stage_ref: Ref, unit_ref: Ref, _: nn.Module, args: Any, outputs: Any) -> None:
    """A unit's module has run, well or not."""
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.post_forward(unit)
        stage.watch_outputs(unit, outputs)


def first_grad(stage_ref: Ref, unit_ref: Ref) -> None:
    """Backward enters a unit."""
    stage, unit = stage_ref(), unit_ref()
    if stage is not None:
        stage.pre_backward(unit)


def input_grad(stage_ref: Ref, unit_ref: Ref, left: list[int]) -> None:
    """One of a unit's inputs has its gradient; with the last one, backward has left the unit."""
    stage, unit = stage_ref(), unit_ref()
    left[0] -= 1
    if stage is not None and left[0] == 0:
        stage.turns[unit].inputs_pending -= 1
        stage.post_backward_of(unit)
