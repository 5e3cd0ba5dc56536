"""Chapter 12: errors of torch whose cause lies in how the engine is used, said in its words.

Owns nothing. Phases: the engine catches an error of forward and asks here whether it can be
explained; if not, the error goes on as it is. Before a step it asks for what torch would not
even notice.
"""

import logging
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from . import absent, sharded_param
from .bucket import Bucket
from .errors import UsageError

log = logging.getLogger("zerolab")

_LARGEST = torch.finfo(torch.float32).max


def explain_dtype(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Raise UsageError when a 16-bit model was given floating inputs of another dtype.

    Args:
        error: what the model's forward raised.
        inputs: its arguments, nested as they are.
        dtype: dtype of the engine's parameters.
    """
    found = {
        leaf.dtype
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
    }
    if dtype == torch.float32 or not found or "dtype" not in str(error):
        return
    given = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
    ours = str(dtype).removeprefix("torch.")
    raise UsageError(
        f"the model computes in {ours}, as the configuration says, and an input is {given}: cast "
        f"floating inputs, as in engine(x.to(torch.{ours})); the engine does not touch your data"
    ) from error


def refuse_loss(loss: Any) -> None:
    """Raise UsageError for what backward cannot start from, or would start from in vain."""
    problem = _problem_of(loss)
    if problem:
        raise UsageError(f"engine.backward needs a one-element loss made from the {problem}")


def _problem_of(loss: Any) -> str:
    """Say what is wrong with a loss and what to do, "" if nothing is."""
    if not isinstance(loss, torch.Tensor):
        return (
            f"model's output, got {type(loss).__name__}: give it the tensor, such as outputs.loss"
        )
    if loss.numel() != 1:
        return f"model's output, got shape {tuple(loss.shape)}: take .mean() or .sum() of it"
    if loss.device.type == "meta":
        return "model's output; this one is on the meta device, where tensors have no values"
    if loss.is_complex():
        return f"model's output, got {loss.dtype}: take .real or .abs() of it"
    if not loss.requires_grad or (loss.is_leaf and not isinstance(loss, nn.Parameter)):
        return (
            "trainable parameters; this one depends on no trainable parameter: was it computed "
            "under torch.no_grad(), detached, made with torch.tensor(...), or is the model frozen?"
        )
    return ""


def refuse_new_parameters(module: nn.Module, known: Set[int]) -> None:
    """Raise UsageError for a parameter that is in the model now and was not at `initialize`.

    No bucket has a place for it: it would be trained by nobody, and every rank's gradient would
    stay its own.

    Args:
        module: the model.
        known: ids of the parameters that the engine took.
    """
    for part in module.modules():  # each step: `named_parameters` would take three times as long
        for param in part._parameters.values():
            if param is not None and param.requires_grad and id(param) not in known:
                name = next(name for name, one in module.named_parameters() if one is param)
                raise UsageError(
                    f"parameter {name!r} was added or replaced after initialize, so the "
                    "engine would not train it: change the model first and then call initialize, "
                    "or freeze it with requires_grad_(False)"
                )


def refuse_unfit_parameters(module: nn.Module) -> None:
    """Raise UsageError for parameters that cannot be trained: lazy, of inference mode, complex."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "initialize was called under torch.inference_mode(), and what is made there takes no "
            "part in backward: call it outside"
        )
    for name, param in module.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} is lazy and has no shape yet: run the model once on a batch "
                "before initialize"
            )
        if param.is_inference():
            raise UsageError(
                f"parameter {name!r} was made under torch.inference_mode() and takes no part in "
                "backward: build the model outside"
            )
        if param.is_complex():
            raise UsageError(
                f"parameter {name!r} is {param.dtype}, and gradients are averaged in real numbers: "
                "keep nn.Parameter(torch.view_as_real(value)) and use torch.view_as_complex of it"
            )


def refuse_other_ranks(made: int, here: int) -> None:
    """Raise UsageError where an engine is called outside the run that it was made in."""
    if made != here:
        raise UsageError(
            f"the engine was made on {made} ranks and is called where the world size is {here}: "
            "call it in the run and, as a rank of the lockstep world is a thread, in the thread "
            "that made it"
        )


def refuse_replaced_data(buckets: Iterable[Bucket]) -> None:
    """Raise UsageError where a parameter lies neither in its bucket nor in shards.

    What is trained is the bucket: the model would go on with values that nobody updates.
    """
    for bucket in buckets:
        if all(type(slot.param) is absent.AbsentParameter for slot in bucket.slots):
            continue
        here = [slot.param.data_ptr() for slot in bucket.slots]
        home = [view.data_ptr() for view in bucket.views]
        away = sharded_param.placeholder_address(bucket.dtype, bucket.device)
        if here == home or all(address == away for address in here):
            continue
        for slot, address, right in zip(bucket.slots, here, home, strict=True):
            if address not in (right, away):
                raise UsageError(
                    f"the data of parameter {slot.name!r} was replaced after initialize, by "
                    "`param.data = ...` or by model.to(...), .half() and the like: convert the "
                    "model before, and set values with `with zero.GatheredParameters(param, "
                    "modifier_rank=0): param.copy_(...)`"
                )


def advance(schedule: Any, steps: int) -> None:
    """Let a schedule set the rate of the next step; after its last one, say so in our words.

    Args:
        schedule: what has a `step()`.
        steps: of the optimizer that were taken, this one included.
    """
    try:
        schedule.step()
    except Exception as error:
        raise UsageError(
            f"the schedule {type(schedule).__name__} has no learning rate for step {steps + 1} "
            f"({error}), and step {steps} is done: give the schedule as many steps as the run "
            "takes, or end the run here"
        ) from error


def refuse_rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    """Raise UsageError for a learning rate that fp32 cannot hold, before it reaches a weight."""
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr", 0.0)
        if isinstance(rate, float) and not abs(rate) <= _LARGEST:
            source = "set_lr" if schedule is None else f"the schedule {type(schedule).__name__}"
            raise UsageError(
                f"the learning rate of parameter group {number} is {rate:g} at step {steps + 1}, "
                f"set by {source} or by the script, and fp32 ends at {_LARGEST:g}: look at the "
                "factor by which it grows, and bound it"
            )


def warn_of_untrained(buckets: Iterable[Bucket]) -> None:
    """Log which parameters want a gradient although the engine's optimizer does not have them."""
    names = [s.name for b in buckets if not b.trainable for s in b.slots if s.param.requires_grad]
    if names:
        log.warning(
            "%d parameters require gradients and are not in the optimizer (%s, ...): the engine "
            "neither trains them nor averages their gradients over ranks, so a second optimizer "
            "over them would let the ranks drift apart; freeze them with requires_grad_(False), or "
            "give them to the optimizer, in a parameter group of their own if need be",
            len(names),
            names[0],
        )


def warn_of_skipped() -> None:
    """Log that a step was skipped although there is no loss scale that could be too high."""
    log.warning(
        "step skipped: a gradient is infinite or NaN; look at the loss of every rank and at the "
        "data behind it, or lower the learning rate"
    )
