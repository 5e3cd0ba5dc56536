"""Chapter 12: what `initialize` makes for an engine, from what the user gave or the file says.

Owns no data. An optimizer over whole parameters (the engine puts segments in their place), a
schedule on it, the loss scale, and a loader over this rank's part of a dataset.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from . import comm, homes, optim, precision, sharded_param
from . import config as config_
from .errors import UsageError


def refuse_taken(model: nn.Module) -> None:
    """Raise UsageError for a model that another engine trains, or has left without values."""
    for name, param in model.named_parameters():
        if isinstance(param, sharded_param.ShardedParameter):
            continue
        home = homes.find(param)
        if home is not None and home.bucket.trainable and home.engine.sharding.handles:
            raise UsageError(
                f"parameter {name} is trained by another engine already: go on with that one, or "
                "end it with engine.close() first, or give initialize a new model"
            )
        if sharded_param.is_placeholder(param):
            raise UsageError(
                f"the values of parameter {name} lie in the shards of another engine: give "
                "initialize a new model, with the state of engine.module_state_dict() if need be"
            )


def refuse_strangers(model: nn.Module, built: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer with parameters that the model does not have."""
    known = set(model.parameters())
    for group in built.param_groups:
        for param in group["params"]:
            if param not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in "
                    "the model, so it would never be updated: make the optimizer from "
                    "model.parameters(), and a new one for every engine"
                )


def optimizer(
    model: nn.Module, given: Any, model_parameters: Any, cfg: config_.Config
) -> torch.optim.Optimizer:
    """Return the user's optimizer or the configuration's, over whole parameters for now."""
    if isinstance(given, torch.optim.Optimizer):
        optim.refuse_layout_dependent(type(given))
        return given
    if model_parameters is None:
        model_parameters = [param for param in model.parameters() if param.requires_grad]
        if not model_parameters:
            raise UsageError(
                "the model has no parameter to train (requires_grad is False for all, or there are "
                "none): set requires_grad_(True) on what shall be trained"
            )
    if callable(given):
        return optimizer(model, given(model_parameters), None, cfg)
    return config_.build_optimizer(cfg, list(model_parameters))


def scheduler(built: torch.optim.Optimizer, given: Any, cfg: config_.Config) -> Any:
    """Return the user's scheduler, made if it is a function, or the configuration's."""
    if given is None:
        return config_.build_scheduler(cfg, built)
    is_maker = isinstance(given, type) or not hasattr(given, "step")
    made = given(built) if callable(given) and is_maker else given
    if isinstance(made, ReduceLROnPlateau):
        raise UsageError(
            "lr_scheduler: ReduceLROnPlateau needs a measured value at each of its steps, which "
            "engine.step() does not have: leave it out of initialize, and call "
            "scheduler.step(value) in the script, with the same value on every rank"
        )
    return made


def loader(
    data: Dataset | None, collate_fn: Callable | None, cfg: config_.Config
) -> DataLoader | None:
    """Return a loader over this rank's part of a dataset."""
    if data is None:
        return None
    sampler = DistributedSampler(data, comm.get_world_size(), comm.get_rank())
    return DataLoader(
        data,
        batch_size=cfg.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=cfg.dataloader_drop_last,
    )


def scaler(cfg: config_.Config) -> precision.LossScaler:
    """Return the loss scale of the configuration: 1 for ever unless fp16 is on."""
    fp16 = cfg.fp16
    if not fp16.enabled:
        return precision.LossScaler()
    dynamic = fp16.loss_scale == 0
    return precision.LossScaler(
        scale=2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale,
        dynamic=dynamic,
        window=fp16.loss_scale_window,
        min_scale=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )
