"""Chapter 12: the engine: a model and a configuration become a training loop of four lines.

Owns the model, one stage (`ddp`, `zero1`, `zero2`, `zero3`), one torch optimizer over this
rank's segments, the loss scale, and the counters of steps.

    engine, optimizer, dataloader, lr_scheduler = zerolab.initialize(model=model, config=config)
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

Phases: init (cut the model into units and buckets, shard what the stage shards), then for
each micro-step forward and backward, and at the accumulation boundary the step. At the mark
`grads_ready` all gradients are reduced and nothing is updated yet; at `step_end` all is done.

Source: the names and the four values are those of DeepSpeed's `initialize`.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from . import bucket as buckets_
from . import (
    buffers,
    comm,
    ddp,
    device,
    homes,
    optim,
    precision,
    sharded_param,
    zero1,
    zero2,
    zero3,
)
from . import config as config_
from . import units as units_
from .errors import UsageError
from .records import Records

log = logging.getLogger("zerolab")

STATE_KINDS = ("param", "grad", "master", "optimizer")


def stage_class(stage: int) -> type[ddp.DDP]:
    """Return the class of a stage, looked up in its module so that it can be replaced there."""
    return (ddp.DDP, zero1.Zero1, zero2.Zero2, zero3.Zero3)[stage]


class Engine(nn.Module):
    """A model that trains on all ranks of the run; build it with `initialize`, on every rank.

    Attributes:
        module: the model as given; its parameters are now views of the engine's buckets.
        optimizer: the torch optimizer; its parameters are this rank's segments.
        config: the configuration, with every inferred value filled in.
        stage: 0 to 3.
        global_steps: optimizer steps so far, skipped ones included.
        skipped_steps: steps that an overflow on some rank cancelled on all.
        micro_steps: forward-backward pairs so far.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: config_.Config,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
    ) -> None:
        """Shard the model in place; see `initialize` for the arguments."""
        super().__init__()
        self.module = model
        self.config = cfg
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.stage = cfg.stage
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.last_norm: torch.Tensor | None = None
        self._state_bytes: dict[str, int] = {}
        self._ranks = comm.get_world_size()
        with device.in_phase("init"):
            self._build()
        self.mark("init_done")

    # -- construction -----------------------------------------------------------------------

    def _build(self) -> None:
        cfg = self.config
        group_of = _group_of(self.optimizer)
        trainable = {param for group in self.optimizer.param_groups for param in group["params"]}
        mixed = cfg.param_dtype != torch.float32
        for param in self.module.parameters():
            if not isinstance(param, sharded_param.ShardedParameter):
                device.set_kind(param, "param")
        self.buffers_ = buffers.Buffers(self.module, cfg.param_dtype if mixed else None)
        units = buckets_.build_units(
            self.module,
            trainable,
            limit=cfg.zero.reduce_bucket_size,
            dtype=cfg.param_dtype if mixed else None,
            world_size=comm.get_world_size(),
            rank=comm.get_rank(),
            blocks=units_.choose(self.module, cfg.unit_modules),
            persistent=units_.persistent(self.module, cfg),
        )
        self.sharding = stage_class(cfg.stage)(self.module, units, self._options(mixed))
        self.groups = optim.BucketGroups(self.optimizer, group_of)
        self.groups.adopt(self.sharding.trainable)
        self.sharding.boundary = self.is_gradient_accumulation_boundary()
        self.scaler = _build_scaler(cfg)
        self.check_overflow = cfg.param_dtype != torch.bfloat16 or cfg.bf16.check_grad_overflow
        homes.register(self)

    def _options(self, mixed: bool) -> ddp.StageOptions:
        cfg = self.config
        return ddp.StageOptions(
            mixed=mixed,
            grad_dtype=None if cfg.grad_accum_dtype == cfg.param_dtype else cfg.grad_accum_dtype,
            reduce_dtype=None if cfg.reduce_dtype == cfg.param_dtype else cfg.reduce_dtype,
            every_micro_step=cfg.reduce_every_micro_step,
            reduce_op="sum" if cfg.gradient_allreduce_op == "sum" else "avg",
            in_flight=1 if cfg.zero.overlap_comm else 0,
            all_reduce=not cfg.zero.reduce_scatter,
            prefetch=cfg.prefetch,
            prefetch_numel=cfg.zero.prefetch_bucket_size,
            reshard_after_forward=cfg.reshard_after_forward,
            max_live=cfg.zero.max_live_parameters,
            max_reuse=cfg.zero.max_reuse_distance,
        )

    # -- the training loop ------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: any arguments, any outputs."""
        device.set_phase("forward")
        self.sharding.before_model()
        try:
            return self.module(*args, **kwargs)
        finally:
            self.sharding.after_model()
            self.mark("forward_end")

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Run backward and reduce the gradients of this micro-step.

        The loss is divided by the accumulation steps (once) and multiplied with the loss
        scale; the mean over ranks is taken when gradients are reduced.

        Args:
            loss: 0-dim tensor that depends on trainable parameters.
            retain_graph: keep the graph for another backward through it.

        Returns:
            The loss as given.
        """
        _check_loss(loss)
        device.set_phase("backward")
        self.sharding.before_backward()
        scaled = loss * (self.scaler.scale / self.gradient_accumulation_steps())
        scaled.backward(retain_graph=retain_graph)
        self.sharding.finish_backward()
        self.mark("backward_end")
        return loss

    def step(self) -> None:
        """End a micro-step; at the accumulation boundary, update the parameters."""
        self.sharding.end_micro_step()
        if self.is_gradient_accumulation_boundary():
            device.set_phase("step")
            self.mark("grads_ready")
            self._state_bytes = self._measure_state()
            self._update()
            self.mark("step_end")
        self.micro_steps += 1
        self.sharding.boundary = self.is_gradient_accumulation_boundary()
        device.set_phase("idle")

    def _update(self) -> None:
        agreed = precision.agree(
            self.sharding.trainable, self.check_overflow, self.buffers_.changed()
        )
        overflow = agreed.overflow
        if overflow:
            self.sharding.drop_grads()
            self.skipped_steps += 1
            self.last_norm = None
        else:
            self.sharding.step(self.groups, agreed.unused, self._factor(agreed))
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.buffers_.send(agreed.changed)
        self.scaler.update(overflow)
        self.global_steps += 1

    def _factor(self, agreed: precision.Agreement) -> torch.Tensor | None:
        """Return what the gradients are multiplied with: unscaling and clipping in one number."""
        scale, max_norm = self.scaler.scale, self.config.gradient_clipping
        if max_norm == 0 and scale == 1:
            return None
        factor = torch.ones((), dtype=torch.float64)
        if max_norm > 0:
            self.last_norm = precision.global_norm(self.sharding.trainable, agreed.unused) / scale
            factor = precision.clip_factor(self.last_norm, max_norm)
        return (factor / scale).float()

    # -- what users ask ---------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        """Return how many micro-steps make a step."""
        return self.config.accum_steps

    def train_batch_size(self) -> int:
        """Return the samples that all ranks together use for one step."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples one rank uses in one micro-step."""
        return self.config.micro_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step ends with an update."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; None if not computed."""
        return (
            None if self.last_norm is None else float(precision.read(self.last_norm.reshape(1))[0])
        )

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, as in DeepSpeed: gradients are freed when they have been used."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of param, grad, master and optimizer at the last `grads_ready`."""
        return dict(self._state_bytes)

    def records(self) -> Records:
        """Return what this rank recorded: memory events, collectives, marks."""
        return comm.records()

    def close(self) -> None:
        """Remove every hook; the model and its buckets can then be collected."""
        self.sharding.remove_hooks()

    # -- measuring --------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Note the bytes held at this moment, if a virtual GPU is counting."""
        device.mark(name)

    def _measure_state(self) -> dict[str, int]:
        gpu = device.current()
        if gpu is not None:
            held = gpu.by_kind()
            return {kind: held.get(kind, 0) for kind in STATE_KINDS}
        return self._count_tensors()

    def _count_tensors(self) -> dict[str, int]:
        """Count the storages of the states themselves, where no virtual GPU does."""
        tensors: dict[str, list[torch.Tensor]] = {kind: [] for kind in STATE_KINDS}
        for bucket in self.sharding.buckets:
            tensors["param"] += [bucket.flat_param, bucket.shard]
            tensors["grad"] += [bucket.reduced] if bucket.reduced is not None else []
            tensors["master"] += [bucket.master] if bucket.master is not None else []
        for state in self.optimizer.state.values():
            tensors["optimizer"] += [v for v in state.values() if isinstance(v, torch.Tensor)]
        return {kind: _storage_bytes(found) for kind, found in tensors.items()}


def _build_scaler(cfg: config_.Config) -> precision.LossScaler:
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


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _check_loss(loss: Any) -> None:
    """Refuse what backward cannot start from."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
        raise UsageError(f"backward needs a loss of one element, got {what}; take .mean() of it")
    if not loss.requires_grad:
        raise UsageError(
            "this loss depends on no trainable parameter (requires_grad is False); was it "
            "computed under torch.no_grad(), detached, or from a frozen model?"
        )


def _group_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the parameter group of every parameter, by id."""
    return {
        id(param): number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Any = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    config: Any = None,
    collate_fn: Callable | None = None,
) -> tuple[Engine, torch.optim.Optimizer, DataLoader | None, Any]:
    """Make a model train on all ranks of the run. Every rank calls it with an equal model.

    Args:
        args: parsed arguments of a script; `args.deepspeed_config` is used without `config`.
        model: any `nn.Module`. Rank 0's weights win everywhere. It is sharded in place.
        optimizer: an elementwise torch optimizer over the model's parameters, or a function
            that makes one from them; None to build the configuration's.
        model_parameters: parameters or parameter groups to train, for an optimizer from the
            configuration; all that require gradients when None.
        training_data: a dataset; every rank gets a loader over its own part.
        lr_scheduler: a torch scheduler of `optimizer`, or a function that makes one from it.
        config: a dict or the path of a JSON file in DeepSpeed's format.
        collate_fn: how the loader makes a batch.

    Returns:
        engine, optimizer, data loader (or None), learning-rate scheduler (or None).

    Raises:
        UsageError: a value cannot work; the message says which, why and what to do.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize needs model=, an nn.Module, got {type(model).__name__}")
    comm.init_process_group()
    cfg = config_.load(_config_source(args, config), comm.get_world_size())
    for warning in cfg.warnings:
        if comm.get_rank() == 0:
            log.warning(warning)
    built = _build_optimizer(model, optimizer, model_parameters, cfg)
    scheduler = _build_scheduler(built, lr_scheduler, cfg)
    engine = Engine(model, cfg, built, scheduler)
    loader = _build_loader(training_data, collate_fn, cfg)
    return engine, built, loader, scheduler


def _config_source(args: Any, config: Any) -> Any:
    """Return the configuration given, or the one that the script's arguments name."""
    source = config if config is not None else getattr(args, "deepspeed_config", None)
    if source is None:
        raise UsageError("initialize needs config=, a dict or the path of a ds_config.json")
    return source


def _build_optimizer(
    model: nn.Module, given: Any, model_parameters: Any, cfg: config_.Config
) -> torch.optim.Optimizer:
    """Return the user's optimizer or the configuration's, over whole parameters for now."""
    if isinstance(given, torch.optim.Optimizer):
        optim.refuse_layout_dependent(type(given))
        return given
    if model_parameters is None:
        model_parameters = [param for param in model.parameters() if param.requires_grad]
    if callable(given):
        return _build_optimizer(model, given(model_parameters), None, cfg)
    return config_.build_optimizer(cfg, list(model_parameters))


def _build_scheduler(optimizer: torch.optim.Optimizer, given: Any, cfg: config_.Config) -> Any:
    """Return the user's scheduler, made if it is a function, or the configuration's."""
    if given is None:
        return config_.build_scheduler(cfg, optimizer)
    return given(optimizer) if callable(given) and not hasattr(given, "step") else given


def _build_loader(
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
