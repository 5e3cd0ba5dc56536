"""Chapter 12: another batch size in the middle of a run, with the batch equation kept.

Data: none; both functions return a new `Config`. `train_batch_size` changes by way of the
accumulation steps, the micro-batch by way of the total, as in DeepSpeed.
"""

import dataclasses

from ..errors import UsageError
from .settings import Config


def with_train_batch_size(cfg: Config, total: int) -> Config:
    """Return a configuration for another total; the micro-batch stays, accumulation follows.

    Raises:
        UsageError: the total is no multiple of micro-batch times ranks.
    """
    unit = cfg.micro_batch_size * cfg.world_size
    if total < 1 or total % unit:
        below = max(unit, total // unit * unit)
        raise UsageError(
            f"train_batch_size {total} is no multiple of {unit} = {cfg.micro_batch_size} a "
            f"micro-step x {cfg.world_size} ranks; take {below} or {below + unit}"
        )
    return dataclasses.replace(cfg, train_batch_size=total, accum_steps=total // unit)


def with_micro_batch_size(cfg: Config, micro: int) -> Config:
    """Return a configuration for another micro-batch; accumulation stays, the total follows.

    Raises:
        UsageError: the size is not positive.
    """
    if micro < 1:
        raise UsageError(f"train_micro_batch_size_per_gpu {micro} must be 1 or more")
    total = micro * cfg.accum_steps * cfg.world_size
    return dataclasses.replace(cfg, train_batch_size=total, micro_batch_size=micro)
