"""Chapter 12: what a script asks an engine, under DeepSpeed's names.

Owns nothing: each answer is read from the configuration, the optimizer, the loss scale or the
ranks. Phases: none; a script may ask at any time. `engine.Engine` derives from it and trains.
"""

from typing import Any

import torch
from torch import nn

from . import accumulation, comm, gathering, precision
from .errors import UsageError
from .records import Records


class Questions(accumulation.Accumulation):
    """The part of an engine that answers."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: precision.LossScaler
    last_norm: torch.Tensor | None
    _step_applied: bool
    _state_bytes: dict[str, int]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters: a boundary, and no overflow."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; None if not computed."""
        return (
            None if self.last_norm is None else float(precision.read(self.last_norm.reshape(1))[0])
        )

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @property
    def cur_scale(self) -> float:
        """The loss scale in use; 1 without fp16."""
        return self.scaler.scale

    def loss_scale(self) -> float:
        """Return the loss scale in use; 1 without fp16."""
        return self.scaler.scale

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self.stage

    @property
    def global_rank(self) -> int:
        """This rank."""
        return comm.get_rank()

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return comm.get_world_size()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.sharding.buckets[0].device if self.sharding.buckets else torch.device("cpu")

    def module_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with whole parameters, on every rank; all call it."""
        return gathering.whole_state_dict(self.module)

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load whole parameters, at every stage; all ranks call it and rank 0's values win.

        Masters follow, moments stay. Returns the missing and unexpected keys, as torch does.
        """
        return gathering.load_state_dict(self.module, state_dict, strict)

    def __getattr__(self, name: str) -> Any:
        """Look in the model for what the engine does not have, as in DeepSpeed."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, as in DeepSpeed: gradients are freed when they have been used."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of param, grad, master and optimizer at the last `grads_ready`."""
        return dict(self._state_bytes)

    def records(self) -> Records:
        """Return what this rank recorded: memory events, collectives, marks."""
        return comm.records()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's buckets would be nobody's."""
        raise UsageError(
            "an engine cannot be copied or pickled: keep its state, engine.module_state_dict()"
        )
