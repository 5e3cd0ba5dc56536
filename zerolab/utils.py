"""Chapter 6: the parts of a parameter that a script asks for: weights, gradient, optimizer state.

Owns no data. Every part of a parameter lies in its *segments*: one a shard, views of what the
optimizer updates. Phases of a read: find the parameter's home, take the own segments' part, and,
for the whole, complete it with the parts of the other ranks. A write goes the other way.

    safe_get_full_*    the whole tensor, on every rank; all ranks call it together
    safe_get_local_*   what this rank updates, flat: its shard's part of the parameter, at
                       stage 0 all of it, perhaps nothing; no rank needs another one
    safe_set_*         the same for writing; every rank gives the same whole value

Values are fp32 copies. A getter returns None where there is nothing: a frozen parameter, one that
no engine trains, no gradient now, no optimizer state yet. A setter says so.

Gradients can be read between `engine.backward` and `engine.step`. They are the mean over ranks,
without the loss scale, before clipping. Where gradients are still local (accumulation before its
boundary at stages 0 and 1), the whole gradient is the mean of what the ranks have so far.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from . import comm, flat, homes, precision, units
from .bucket import GradState, Segment
from .errors import UsageError
from .homes import Home, ValueOf

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

logger = logging.getLogger("zerolab")

# -- weights --------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole fp32 weights of a trained parameter: the master copy, where there is one."""
    home = _trained(param)
    return None if home is None else homes.read_whole(home, _weights)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the part of a parameter's fp32 weights that this rank updates, flat."""
    home = _trained(param)
    return None if home is None else homes.read_local(home, _weights)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace a parameter everywhere: master weights, 16-bit weights, shards."""
    home = _needed(param)
    homes.write_whole(home, _weights, _checked(home, value))
    _round_and_publish(home)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the part of a parameter that this rank updates; all ranks call it together."""
    home = _needed(param)
    homes.write_local(home, _weights, value)
    _round_and_publish(home)


def _weights(segment: Segment) -> torch.Tensor:
    return segment.param.data


def _round_and_publish(home: Home) -> None:
    """Bring updated weights to where forward reads them, on every rank."""
    stage = home.engine.sharding
    with torch.no_grad():
        stage.write_back(home.bucket)
        work = stage.publish(home.bucket)
    if work is not None:
        work.wait()


# -- gradients ------------------------------------------------------------------------------


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient of a parameter, None if no rank has one now."""
    home = _trained(param)
    if home is None or not _flush(home):
        return None
    whole = homes.read_whole(home, _reduced_of(home)) if _is_reduced(home) else _mean_so_far(home)
    return None if whole is None else whole / home.engine.scaler.scale


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the part of the reduced gradient that this rank has, None before it is reduced."""
    home = _trained(param)
    if home is None or not _is_reduced(home) or home.position not in home.bucket.used:
        return None
    own = homes.read_local(home, _reduced_of(home))
    return None if own is None else own / home.engine.scaler.scale


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient of a parameter for the coming step."""
    home = _needed(param)
    scaled = _checked(home, value) * home.engine.scaler.scale
    _flush(home)
    bucket = home.bucket
    if _is_reduced(home):
        homes.write_whole(home, _reduced_of(home), scaled)
    elif bucket.fresh is not None:
        with torch.no_grad():
            bucket.fresh[slice(*home.slot.span)] = scaled.reshape(-1).to(bucket.fresh.dtype)
        bucket.filled.add(home.position)
    else:
        raise UsageError(_no_gradient(home))
    bucket.used.add(home.position)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the part of the reduced gradient that this rank has."""
    home = _needed(param)
    if not _is_reduced(home):
        raise UsageError(_no_gradient(home))
    homes.write_local(home, _reduced_of(home), value * home.engine.scaler.scale)
    home.bucket.used.add(home.position)


def _no_gradient(home: Home) -> str:
    return (
        f"{home.slot.name} has no reduced gradient now: set it after engine.backward and before "
        "engine.step, at the accumulation boundary"
    )


def _flush(home: Home) -> bool:
    """Finish reductions under way (after a plain `loss.backward()`); tell if any rank used it."""
    stage, bucket = home.engine.sharding, home.bucket
    late = bucket.state is GradState.FILLING
    facts = [not stage.flushed, home.position in bucket.used, late]
    unfinished, used, late = precision.any_rank(facts, bucket.device)
    if unfinished:
        stage.finish_backward()
    if late and bucket.reduced is not None:
        stage.send_again(precision.late_anywhere([bucket]))
    return used


def _is_reduced(home: Home) -> bool:
    bucket = home.bucket
    done = home.engine.sharding.flushed and bucket.state is not GradState.IN_FLIGHT
    return done and bucket.reduced is not None


def _reduced_of(home: Home) -> ValueOf:
    """Return where a segment's part of the reduced gradient is."""

    def value(segment: Segment) -> torch.Tensor | None:
        reduced = home.bucket.reduced
        stop = segment.start + segment.param.numel()
        return None if reduced is None else reduced[segment.start : stop]

    return value


def _mean_so_far(home: Home) -> torch.Tensor:
    """Return the mean over ranks of gradients that have not been reduced; they stay as they are."""
    bucket, slot = home.bucket, home.slot
    mean = torch.zeros(slot.shape, device=bucket.device)
    if bucket.fresh is not None and home.position in bucket.filled:
        mean.copy_(flat.view(bucket.fresh, slot.offset, slot.shape))
    comm.all_reduce(mean, "avg", purpose="control")
    return mean


# -- optimizer states -----------------------------------------------------------------------


def safe_get_full_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return a whole optimizer state, such as "exp_avg"; None before the first step.

    A state that is one number for the parameter ("step") is returned as that.
    """
    home = _trained(param)
    return None if home is None else homes.read_whole(home, _state_of(home, key))


def safe_get_local_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return the part of an optimizer state that this rank has, flat."""
    home = _trained(param)
    return None if home is None else homes.read_local(home, _state_of(home, key))


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace an optimizer state; the optimizer must have stepped once."""
    home = _needed(param)
    state = _present_state(home, key)
    homes.write_whole(home, state, value if value.numel() == 1 else _checked(home, value))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace the part of an optimizer state that this rank has."""
    home = _needed(param)
    homes.write_local(home, _present_state(home, key), value)


def _state_of(home: Home, key: str) -> ValueOf:
    """Return where a segment's state is; None before the first step."""
    optimizer = home.engine.optimizer

    def value(segment: Segment) -> torch.Tensor | None:
        state = optimizer.state.get(segment.param)
        if not state:
            return None
        if key not in state:
            raise UsageError(f"optimizer state {key!r} is unknown; there is {', '.join(state)}")
        return state[key]

    return value


def _present_state(home: Home, key: str) -> ValueOf:
    state = _state_of(home, key)
    if any(state(segment) is None for segment in home.segments):
        raise UsageError(f"{home.slot.name} has no optimizer state yet: step once before")
    return state


# -- whose parameter it is ------------------------------------------------------------------


def _trained(param: torch.Tensor) -> Home | None:
    home = homes.find(param)
    return home if home is not None and home.bucket.trainable else None


def _needed(param: torch.Tensor) -> Home:
    """Return the home of a parameter that is about to be written to."""
    home = _trained(param)
    if home is None:
        raise UsageError(
            f"a tensor of shape {tuple(param.shape)} is trained by no engine (frozen, or not part "
            "of the model that was given to initialize), so it has neither master weights nor state"
        )
    return home


def _checked(home: Home, value: torch.Tensor) -> torch.Tensor:
    """Refuse a value of another shape."""
    if value.shape != home.slot.shape:
        raise UsageError(
            f"{home.slot.name} has shape {tuple(home.slot.shape)}, the value {tuple(value.shape)}"
        )
    return value.detach().float()


# -- what scripts import beside -------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """Find the functions about leaf modules, which DeepSpeed has here."""
    if name.endswith("_z3_leaf_modules"):
        return getattr(units, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the given ranks; None or [-1]: on all."""
    chosen = [-1] if ranks is None else list(ranks)
    if -1 in chosen or comm.get_rank() in chosen:
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)


class RepeatingLoader:
    """A data loader that begins again when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Remember the loader."""
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, of the next epoch if this one is over."""
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)
