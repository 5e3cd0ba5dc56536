"""Chapter 12: OneCycle, DeepSpeed's triangle of rate and momentum, then a decay.

Data: the shape (steps up, steps down, stairs), the two rates, the two momenta, the decay.
Phases: `scale` is the height of the triangle at a step; rates follow it, momenta oppose it; after
one cycle both decay.
"""

import math

from .schedules import HasGroups, Schedule

BETA2 = 0.99  # DeepSpeed sets Adam's second beta to this while the momentum cycles


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and back, then divided by a growing number.

    The rate falls as 1 / (1 + decay_lr_rate * intervals) of `decay_step_size` steps; a step size of
    0, the default, means no decay. With `cycle_momentum` the first beta moves the other way.
    """

    def __init__(  # noqa: PLR0913 - the names of DeepSpeed's block, one argument each
        self,
        optimizer: HasGroups,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr, self.max_lr, self.decay_lr_rate = cycle_min_lr, cycle_max_lr, decay_lr_rate
        self.first_size = _steps("cycle_first_step_size", cycle_first_step_size)
        second = self.first_size if cycle_second_step_size is None else cycle_second_step_size
        self.second_size = _steps("cycle_second_step_size", second)
        self.total_size = self.first_size + self.second_size
        self.first_stairs = cycle_first_stair_count
        second_stairs = cycle_second_stair_count
        self.second_stairs = self.first_stairs if second_stairs is None else second_stairs
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and all("betas" in g for g in optimizer.param_groups)
        self.min_mom, self.max_mom, self.decay_mom_rate = (
            cycle_min_mom,
            cycle_max_mom,
            decay_mom_rate,
        )
        self._start([cycle_min_lr] * len(optimizer.param_groups))
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum(cycle_min_mom)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count on and set the rates, and the momenta if they cycle."""
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._set_momentum(self.get_momentum())

    def get_lr(self) -> list[float]:
        """One rate for all groups."""
        if self.last_batch_iteration < self.total_size:
            rate = self.min_lr + (self.max_lr - self.min_lr) * self.scale()
        else:
            rate = self.min_lr / self._decay(self.decay_lr_rate)
        return [rate] * len(self.optimizer.param_groups)

    def get_momentum(self) -> float:
        """The first beta, for all groups."""
        if self.last_batch_iteration < self.total_size:
            return self.max_mom - (self.max_mom - self.min_mom) * self.scale()
        return self.max_mom * self._decay(self.decay_mom_rate)

    def scale(self) -> float:
        """The height of the triangle, 0 to 1, one step ahead of the counter as in DeepSpeed."""
        step = (self.last_batch_iteration + 1) % self.total_size
        rising = step <= self.first_size
        stairs = self.first_stairs if rising else self.second_stairs
        gone = step if rising else self.total_size - step
        size = self.first_size if rising else self.second_size
        return math.floor(gone * stairs / size) / stairs if stairs > 0 else gone / size

    def _decay(self, rate: float) -> float:
        """The number that rates are divided by, and momenta multiplied with, after the cycle."""
        if not self.decay_step_size or not rate:
            return 1.0
        intervals = (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
        return 1 + rate * intervals

    def _set_momentum(self, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = (momentum, BETA2)


def _steps(name: str, number: int) -> int:
    if isinstance(number, bool) or number != int(number) or number <= 0:
        raise ValueError(f"{name} {number!r} must be a positive whole number")
    return int(number)
