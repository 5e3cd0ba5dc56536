"""Chapter 12: DeepSpeed's five learning-rate schedules, as formulas over the step's number.

Data: a schedule knows the optimizer's groups and one number, `last_batch_iteration`: -1 before the
first step, then 0, 1, ... Phases: on creation the groups get their first rate; each `step` (after
an optimizer step that was not skipped) counts on and sets the next.

They are no subclasses of torch's LRScheduler, as in DeepSpeed: a state dict is that one number.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

Rates = float | Sequence[float]


class HasGroups(Protocol):
    """What a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]


class Schedule(ABC):
    """Sets `lr` of every group from the number of the step.

    Attributes:
        optimizer: whose groups are set.
        last_batch_iteration: the number of the last step, -1 before the first.
    """

    def __init__(self, optimizer: HasGroups, last_batch_iteration: int = -1) -> None:
        """Remember the optimizer; a subclass sets its own numbers, then calls `_start`."""
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = []

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rates that belong to `last_batch_iteration`, one a group."""

    def get_last_lr(self) -> list[float]:
        """The rates that were set last, one a group."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count on, or jump to a number, and set the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """The number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after that step."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _start(self, rates: list[float]) -> None:
        if self.last_batch_iteration == -1:
            self._set(rates)

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates

    def _per_group(self, name: str, rates: Rates) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(rates, (int, float)):
            return [rates] * groups
        if isinstance(rates, str):
            raise ValueError(f"{name} {rates!r} must be a number, or a list of numbers")
        if len(rates) != groups:
            raise ValueError(f"{name} has {len(rates)} values for {groups} parameter groups")
        return list(rates)


def warmup(iteration: int, num_steps: int, kind: str) -> float:
    """The share of the way up at a step below `num_steps`: 0 at the first, below 1 at the last."""
    if kind == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


class WarmupLR(Schedule):
    """From `warmup_min_lr` up to `warmup_max_lr` in `warmup_num_steps`, then constant.

    Without `warmup_max_lr` it is the optimizer's rate: that of the first group, for all groups.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = float(optimizer.param_groups[0]["lr"])
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self._start(self.min_lrs)

    def get_lr(self) -> list[float]:
        """Between the two rates of each group."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        share = self._share()
        return [
            low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return self._after_warmup()

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Ratios of the optimizer's own rates: up from `warmup_min_ratio`, then half a cosine down."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._start([0.0] * len(self.org_lrs))

    def get_lr(self) -> list[float]:
        """Each group's own rate times one ratio."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The ratio that belongs to `last_batch_iteration`; 0 before the first step."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            share = warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / decay_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class LRRangeTest(Schedule):
    """Up from `lr_range_test_min_lr` by a constant amount: to find the largest rate that learns."""

    def __init__(
        self,
        optimizer: HasGroups,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start(self.min_lr)

    def get_lr(self) -> list[float]:
        """The first rates, times 1 + rate of the test x intervals gone by."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [rate * growth for rate in self.min_lr]


def _warmup_steps(num_steps: int) -> int:
    return max(2, _positive("warmup_num_steps", num_steps))


def _warmup_type(kind: str) -> str:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type {kind!r} is neither 'log' nor 'linear'")
    return kind


def _positive(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ValueError(f"{name} {number!r} must be a positive whole number")
    return number
