"""Chapter 12: the scheduler block: which schedule it names, and with what arguments.

Data: `KINDS`, DeepSpeed's five schedules and every class of torch whose arguments a file can hold;
`REFUSED`, the classes of torch that need an object or a number a file cannot give.
Phases: as for the optimizer block: find the class, check the names, try the values, build.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

from . import optimizers
from .keys import show
from .one_cycle import OneCycle
from .problems import ConfigError, Edit, Path, Problem, error, note
from .schedules import LRRangeTest, WarmupCosineLR, WarmupDecayLR, WarmupLR
from .schema import OptimizerBlock, SchedulerBlock
from .values import closest

BLOCK: Path = ("scheduler",)
Kind = Callable[..., Any]

OURS: dict[str, Kind] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
TORCH = (
    "ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR "
    "MultiStepLR OneCycleLR PolynomialLR StepLR"
).split()
_FUNCTION = "it is built from a Python function, which a file cannot hold"
_OBJECTS = "it is built from other schedulers, which a file cannot hold"
REFUSED = {
    "LambdaLR": _FUNCTION,
    "MultiplicativeLR": _FUNCTION,
    "ChainedScheduler": _OBJECTS,
    "SequentialLR": _OBJECTS,
    "ReduceLROnPlateau": "its step needs the validation loss, which the engine does not have",
}
KINDS: dict[str, Kind] = {**OURS, **{name: getattr(torch_schedulers, name) for name in TORCH}}
STEPS_TRIED = 3


def check(block: SchedulerBlock | None, optimizer: OptimizerBlock | None) -> Iterator[Problem]:
    """The problems of a scheduler block; `optimizer` is what it is tried on, if that is known."""
    if block is None:
        return
    name = _name(block)
    if name is None:
        yield _no_kind(block)
        return
    found = list(_name_problems(block, KINDS[name]))
    yield from found
    reason = "" if found else _refusal(block, KINDS[name], optimizer)
    if reason:
        yield _refused(block, name, optimizer, reason)
    elif not found:
        yield from _group_notes(block)


def _refused(
    block: SchedulerBlock, name: str, optimizer: OptimizerBlock | None, reason: str
) -> Problem:
    """The argument to blame: the only one without which the class is content; else all of them."""
    path = (*BLOCK, "params")
    healing = [
        argument
        for argument in block.params
        if not _refusal(_without(block, argument), KINDS[name], optimizer)
    ]
    if len(healing) == 1:
        where = (*path, healing[0])
        message = f"{show(block.params[healing[0]])} is refused by {name}: {reason}"
        fix = Edit(where, drop=True, fill_in=True)
        return error(where, message, "change it, or delete it for the default", fix)
    fix = Edit(BLOCK, drop=True)
    return error(path, f"are refused by {name}: {reason}", "change that argument", fix)


def _without(block: SchedulerBlock, argument: str) -> SchedulerBlock:
    rest = {name: value for name, value in block.params.items() if name != argument}
    return block.model_copy(update={"params": rest})


def _group_notes(block: SchedulerBlock) -> Iterator[Problem]:
    for argument, count in per_group(block).items():
        message = f"has {count} values, one for each parameter group that the script makes"
        remedy = f"give initialize {count} groups as model_parameters"
        yield note((*BLOCK, "params", argument), message, remedy)


def build(block: SchedulerBlock | None, optimizer: Any) -> Any:
    """The schedule of a block on an optimizer; None without a block.

    Raises:
        ConfigError: the class refuses its arguments.
    """
    if block is None:
        return None
    name = _name(block)
    if name is None:
        raise ConfigError([_no_kind(block)])
    try:
        return KINDS[name](optimizer, **block.params)
    except (TypeError, ValueError, ArithmeticError, LookupError) as cause:
        problem = error((*BLOCK, "params"), optimizers.words_of(cause), "change that argument")
        raise ConfigError([problem]) from cause


def _name(block: SchedulerBlock) -> str | None:
    return {name.lower(): name for name in KINDS}.get((block.type or "").lower())


def _no_kind(block: SchedulerBlock) -> Problem:
    path, drop = (*BLOCK, "type"), Edit(BLOCK, drop=True)
    if block.type is None:
        return error(path, "is missing", f"write one of {', '.join(OURS)}", drop)
    if block.type in REFUSED:
        remedy = "build it in the script and pass lr_scheduler="
        return error(path, f"{block.type} does not fit a file: {REFUSED[block.type]}", remedy, drop)
    meant = closest(block.type, KINDS)
    remedy = f"did you mean {meant!r}?" if meant else f"write one of {', '.join(OURS)}"
    fix = Edit(path, meant) if meant else drop
    return error(path, f"{block.type!r} is no schedule of DeepSpeed or torch", remedy, fix)


def _name_problems(block: SchedulerBlock, kind: Kind) -> Iterator[Problem]:
    signature = inspect.signature(kind).parameters
    known = [name for name in signature if name != "optimizer"]
    for name in block.params:
        if name not in known:
            path, meant = (*BLOCK, "params", name), closest(name, known)
            remedy = f"did you mean {meant!r}?" if meant else f"it takes {', '.join(known)}"
            fix = Edit(path, rename=meant) if meant else Edit(path, drop=True)
            yield error(path, f"is not an argument of {block.type}", remedy, fix)
    for name in known:
        if signature[name].default is inspect.Parameter.empty and name not in block.params:
            path = (*BLOCK, "params", name)
            fix = Edit(BLOCK, drop=True)
            yield error(path, f"is missing: {block.type} cannot guess it", "give it", fix)


def _refusal(block: SchedulerBlock, kind: Kind, optimizer: OptimizerBlock | None) -> str:
    """Build it and take a few steps; what the class says against its arguments, or ""."""
    count = max(per_group(block).values(), default=1)
    groups = [{"params": [optimizers.one_element()]} for _ in range(count)]
    trial = optimizers.build(optimizer, groups) if optimizer else torch.optim.AdamW(groups)
    try:
        schedule = kind(trial, **block.params)
        for _ in range(STEPS_TRIED):
            trial.step()
            schedule.step()
            _insist_on_numbers([float(group["lr"]) for group in trial.param_groups])
    except Exception as cause:  # whatever a class makes of odd values, the user needs its words
        return optimizers.words_of(cause)
    return ""


def per_group(block: SchedulerBlock) -> dict[str, int]:
    """The arguments that give each parameter group a value of its own: name -> how many."""
    lists = {name: value for name, value in block.params.items() if isinstance(value, list)}
    return {name: len(value) for name, value in lists.items() if name != "milestones" and value}


def _insist_on_numbers(rates: list[float]) -> None:
    if not all(rate == rate and abs(rate) != float("inf") for rate in rates):
        raise ValueError(f"the learning rate becomes {rates[0]}")
