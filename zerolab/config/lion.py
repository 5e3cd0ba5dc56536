"""Chapter 12: Lion, the one optimizer of DeepSpeed's list that torch lacks and ZeRO can shard.

Data: one running mean per element. Every element is updated from itself alone, so a shard may cut
a parameter anywhere.
"""

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The sign of a running mean (Chen et al. 2023), with decoupled weight decay.

        update = sign(beta1 * exp_avg + (1 - beta1) * grad)
        param  = param * (1 - lr * weight_decay) - lr * update
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    The defaults are DeepSpeed's; the paper uses lr 1e-4 and betas (0.9, 0.99).

    Raises:
        ValueError: a negative rate or decay, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """Keep the arguments as the defaults of every parameter group."""
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must not be negative")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be two numbers in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; the closure, if any, gives the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        exp_avg, (beta1, beta2) = state["exp_avg"], group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
        exp_avg.lerp_(grad, 1 - beta2)
