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

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
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
    misuse,
    optim,
    precision,
    sharded_param,
    zero1,
    zero2,
    zero3,
)
from . import bucket as buckets_
from . import config as config_
from . import units as units_
from .config import resizing
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
        self._window_start = 0  # micro-steps before the present accumulation began
        self._step_applied = False
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

    def _options(self, mixed: bool) -> ddp.StageOptions:
        cfg = self.config
        return ddp.StageOptions(
            mixed=mixed,
            grad_dtype=None if cfg.grad_accum_dtype == cfg.param_dtype else cfg.grad_accum_dtype,
            reduce_dtype=None if cfg.reduce_dtype == cfg.grad_accum_dtype else cfg.reduce_dtype,
            every_micro_step=cfg.reduce_every_micro_step,
            reduce_op="sum" if cfg.gradient_allreduce_op == "sum" else "avg",
            in_flight=self._in_flight(),
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
        with self._whole_or_nothing():
            self.sharding.before_backward()
            scaled = loss * (self.scaler.scale / self.gradient_accumulation_steps())
            scaled.backward(retain_graph=retain_graph)
            self.sharding.finish_backward()
        self.mark("backward_end")
        return loss

    def _in_flight(self) -> int:
        """Return how many reductions may run at once.

        At stage 0 all of them, whatever the configuration says: waiting would free no buffer.
        """
        if self.config.stage == 0:
            return sys.maxsize
        return int(bool(self.config.zero.overlap_comm))

    def step(self) -> None:
        """End a micro-step; at the accumulation boundary, update the parameters."""
        if self.sharding.no_sync:
            raise UsageError("engine.step() was called inside no_sync(): leave the block first")
        self._step_applied = False
        misuse.refuse_other_ranks(self._ranks, comm.get_world_size())
        misuse.refuse_new_parameters(self.module, self._taken)
        misuse.refuse_replaced_data(self.sharding.buckets)
        with self._whole_or_nothing():
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

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """After an exception, begin the step anew: a part of its gradients would be wrong.

        Those of earlier micro-steps go too, since they are added up with the broken ones.
        """
        try:
            yield
        except BaseException:
            self.sharding.abandon()
            self._window_start = self.micro_steps
            self.sharding.boundary = self.is_gradient_accumulation_boundary()
            device.set_phase("idle")
            raise

    def _update(self) -> None:
        """Take or skip the step, as all ranks agree, and count it."""
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
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.buffers_.send(agreed.changed)
        self.global_steps += 1
        comm.end_step()

    def _run_step(self) -> precision.Agreement:
        return precision.run_step(
            self.sharding,
            self.groups,
            self.scaler,
            self.config.gradient_clipping,
            self.check_overflow,
            self.buffers_.changed(),
        )

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
        done = self.micro_steps - self._window_start + 1
        return done % self.gradient_accumulation_steps() == 0

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples a step by changing the accumulation steps, between two steps."""
        self._resize(resizing.with_train_batch_size(self.config, train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples a micro-step; the total follows."""
        self._resize(resizing.with_micro_batch_size(self.config, micro_batch_size))

    def _resize(self, cfg: config_.Config) -> None:
        done = (self.micro_steps - self._window_start) % self.gradient_accumulation_steps()
        if done:
            raise UsageError(
                f"{done} of {self.gradient_accumulation_steps()} micro-steps are done: change the "
                "batch size after the step that ends them"
            )
        self.config, self._window_start = cfg, self.micro_steps
        self.sharding.boundary = self.is_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank inside the block: nothing is reduced.

        Stages 0 and 1 only. The first backward after the block reduces the sum of all.
        """
        if self.stage > 1:
            raise UsageError(
                f"no_sync() cannot work at stage {self.stage}: gradients are sharded, so none of "
                "them may stay behind; use stage 0 or 1, or gradient_accumulation_steps"
            )
        if self.sharding.no_sync:
            raise UsageError("no_sync() was entered inside no_sync(): one block is enough")
        self.sharding.no_sync = True
        try:
            yield
        finally:
            self.sharding.no_sync = False

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

    def close(self) -> None:
        """Remove every hook; the model and its buckets can then be collected."""
        self.sharding.remove_hooks()
        self.groups.handle.remove()
        for handle in self._watches:
            handle.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's buckets would be nobody's."""
        raise UsageError(
            "an engine cannot be copied or pickled: keep its state, engine.module_state_dict()"
        )

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


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


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
