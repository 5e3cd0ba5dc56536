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
from torch.utils.data import DataLoader, Dataset

from . import (
    arguments,
    buffers,
    building,
    changes,
    comm,
    ddp,
    device,
    gathering,
    homes,
    measuring,
    misuse,
    optim,
    options,
    precision,
    questions,
    sharded_param,
    zero1,
    zero2,
    zero3,
)
from . import bucket as buckets_
from . import config as config_
from . import units as units_
from .errors import UsageError

log = logging.getLogger("zerolab")


def stage_class(stage: int) -> type[ddp.DDP]:
    """Return the class of a stage, looked up in its module so that it can be replaced there."""
    return (ddp.DDP, zero1.Zero1, zero2.Zero2, zero3.Zero3)[stage]


class Engine(questions.Questions):
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
        self.global_steps = 0
        self.skipped_steps = 0
        self.last_norm = None
        self._step_applied = False
        self._state_bytes = {}
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
        self.sharding = stage_class(cfg.stage)(self.module, units, options.of(cfg))
        self._taken = {id(slot.param) for bucket in self.sharding.buckets for slot in bucket.slots}
        self.groups = optim.BucketGroups(self.optimizer, group_of)
        self.groups.adopt(self.sharding.trainable)
        self.sharding.boundary = self.is_gradient_accumulation_boundary()
        self.scaler = building.scaler(cfg)
        self.check_overflow = cfg.param_dtype != torch.bfloat16 or cfg.bf16.check_grad_overflow
        whole = [b for b in self.sharding.buckets if self.stage < 3 or b.persistent]
        self._changes = changes.Changes(whole)
        homes.register(self)
        if comm.get_rank() == 0:
            misuse.warn_of_untrained(self.sharding.buckets)
        self._watches = gathering.watch_states(self.module)

    # -- the training loop ------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: any arguments, any outputs."""
        misuse.refuse_other_ranks(self._ranks, comm.get_world_size())
        device.set_phase("forward")
        if self.stage == 3:  # what was put in place of a placeholder is gone when it is gathered
            misuse.refuse_replaced_data(self.sharding.buckets)
        self.sharding.before_model()
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            misuse.explain_dtype(error, (args, kwargs), self.config.param_dtype)
            raise
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
        misuse.refuse_loss(loss)
        device.set_phase("backward")
        with self.whole_or_nothing():
            self.sharding.before_backward()
            scaled = loss * (self.scaler.scale / self.gradient_accumulation_steps())
            scaled.backward(retain_graph=retain_graph)
            self.sharding.finish_backward()
        self.mark("backward_end")
        return loss

    def step(self) -> None:
        """End a micro-step; at the accumulation boundary, update the parameters."""
        if self.sharding.no_sync:
            raise UsageError("engine.step() was called inside no_sync(): leave the block first")
        self._step_applied = False
        misuse.refuse_other_ranks(self._ranks, comm.get_world_size())
        misuse.refuse_new_parameters(self.module, self._taken)
        misuse.refuse_replaced_data(self.sharding.buckets)
        with self.whole_or_nothing():
            self.sharding.end_micro_step()
            if self.is_gradient_accumulation_boundary():
                device.set_phase("step")
                self.mark("grads_ready")
                self._state_bytes = measuring.state_bytes(self.sharding.buckets, self.optimizer)
                self._update()
                self.mark("step_end")
        self.micro_steps += 1
        self.sharding.boundary = self.is_gradient_accumulation_boundary()
        device.set_phase("idle")

    def _update(self) -> None:
        """Take or skip the step, as all ranks agree, and count it."""
        misuse.refuse_rates(self.optimizer, self.lr_scheduler, self.global_steps)
        self._changes.adopt()
        try:
            agreed = self._run_step()
        except precision.LateGradientsError as error:
            self.sharding.send_again(error.buckets)
            agreed = self._run_step()
        self.last_norm = agreed.norm
        self._step_applied = not agreed.overflow
        if agreed.overflow:
            self.skipped_steps += 1
            if comm.get_rank() == 0 and not self.config.fp16.enabled:
                misuse.warn_of_skipped()
        self.buffers_.send(agreed.changed)
        self.global_steps += 1
        comm.end_step()
        if self.lr_scheduler is not None and not agreed.overflow:
            misuse.advance(self.lr_scheduler, self.global_steps)

    def _run_step(self) -> precision.Agreement:
        return precision.run_step(
            self.sharding,
            self.groups,
            self.scaler,
            self.config.gradient_clipping,
            self.check_overflow,
            self.buffers_.changed(),
        )

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Remove every hook; the model and its buckets can then be collected."""
        self.sharding.remove_hooks()
        self.groups.remove_hooks()
        for handle in self._watches:
            handle.remove()

    def mark(self, name: str) -> None:
        """Note the bytes held at this moment, if a virtual GPU is counting."""
        device.mark(name)


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
    **more: Any,
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
        more: DeepSpeed's other arguments; `config_params` is an old name of `config`.

    Returns:
        engine, optimizer, data loader (or None), learning-rate scheduler (or None).

    Raises:
        UsageError: a value cannot work; the message says which, why and what to do.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize needs model=, an nn.Module, got {type(model).__name__}")
    comm.init_process_group()
    cfg = config_.load(arguments.config_of(args, config, more), comm.get_world_size())
    for warning in cfg.warnings:
        if comm.get_rank() == 0:
            log.warning(warning)
    misuse.refuse_unfit_parameters(model)
    building.refuse_taken(model)
    built = building.optimizer(model, optimizer, model_parameters, cfg)
    building.refuse_strangers(model, built)
    scheduler = building.scheduler(built, lr_scheduler, cfg)
    engine = Engine(model, cfg, built, scheduler)
    loader = building.loader(training_data, collate_fn, cfg)
    return engine, built, loader, scheduler
