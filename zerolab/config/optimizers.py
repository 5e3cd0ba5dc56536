"""Chapter 12: the optimizer block: which class it names, with which arguments.

Data: `ELEMENTWISE`, the classes that ZeRO can shard; `zerolab.elementwise` lists those whose result
depends on where a parameter is cut.
Phases: `check` looks the class up, compares the arguments with its signature and tries them on one
element; `build` makes the optimizer.

ZeRO steps on *segments*: the piece of a parameter that lies in this rank's shard. That is right
only for an elementwise optimizer: an element's new value depends on that element alone.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..elementwise import LAYOUT_DEPENDENT
from .keys import show
from .lion import Lion
from .problems import ConfigError, Edit, Path, Problem, Severity, error
from .schema import OptimizerBlock
from .values import closest, is_finite, number_in

BLOCK: Path = ("optimizer",)
DEFAULT_BLOCK = {"type": "AdamW", "params": {"lr": 1e-4}}
_ASSERTS = "shard; DeepSpeed stops with an AssertionError"
DEEPSPEED_WITHOUT = {
    0: "step",
    1: _ASSERTS,
    2: _ASSERTS,
    3: "step; DeepSpeed builds an inference engine without a word, and its backward fails",
}

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
# Arguments of DeepSpeed's Adam that choose among its implementations: here there is one.
ADAM_ONLY = (
    "adam_w_mode",
    "torch_adam",
    "bias_correction",
    "set_grad_none",
    "fp32_optimizer_states",
)


def missing(stage: int) -> Problem:
    """What to say when neither the file nor the script brings an optimizer."""
    return Problem(
        BLOCK,
        Severity.NEEDS,
        f"there is no optimizer block, and stage {stage} has nothing to {DEEPSPEED_WITHOUT[stage]}",
        f"add {show({'optimizer': DEFAULT_BLOCK}, 80)[1:-1]}, or pass optimizer= to initialize",
        (Edit(BLOCK, DEFAULT_BLOCK),),
    )


def check(block: OptimizerBlock | None) -> Iterator[Problem]:
    """The problems of an optimizer block, its type first, then its arguments."""
    if block is None:
        return
    problem = _type_problem(block.type)
    if problem is not None:
        yield problem
        return
    found = list(_name_problems(block))
    yield from found
    if not found:
        yield from _value_problems(block)


def build(
    block: OptimizerBlock | None, params: Iterable[Any], stage: int = 0
) -> torch.optim.Optimizer:
    """The optimizer of a block over tensors or parameter groups.

    AdamW and Adam are fused where torch can: one kernel, no temporaries. `stage` is only named in
    the message.

    Raises:
        ConfigError: there is no block, or the class refuses its arguments.
    """
    problems = [missing(stage)] if block is None else list(check(block))
    if block is None or problems:
        raise ConfigError(problems)
    groups = list(params)
    kind, arguments = _resolve(block)
    if _fusible(kind, arguments, groups):
        arguments["fused"] = True
    try:
        return kind(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(
            [error((*BLOCK, "params"), str(cause), "change that argument")]
        ) from cause


def class_of(block: OptimizerBlock) -> type[torch.optim.Optimizer]:
    """The class that a valid block names."""
    return _resolve(block)[0]


def _resolve(block: OptimizerBlock) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name = _plain(block.type)
    arguments = {k: v for k, v in block.params.items() if k not in ADAM_ONLY}
    if name == "adam" and block.params.get("adam_w_mode", True):
        name = "adamw"  # DeepSpeed's Adam decays weights as AdamW does
    if name == "adamw":
        arguments.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's is 0.01
    return ELEMENTWISE[name], arguments


def _plain(name: str | None) -> str:
    return (name or "").removeprefix("torch.optim.").lower()


def _type_problem(name: str | None) -> Problem | None:
    path, plain = (*BLOCK, "type"), _plain(name)
    if plain in ELEMENTWISE:
        return None
    if plain in LAYOUT_DEPENDENT:
        fix = Edit(path, "AdamW")  # what it does not take of the arguments goes afterwards
        return error(path, f"{name} cannot be sharded: {LAYOUT_DEPENDENT[plain]}", "use AdamW", fix)
    if name is None:
        return error(path, "is missing", 'write "type": "AdamW"', Edit(path, "AdamW"))
    names = [kind.__name__ for kind in ELEMENTWISE.values()]
    meant = closest(name, names)
    remedy = f"did you mean {meant!r}?" if meant else f"take one of {', '.join(names)}"
    return error(path, f"{name!r} is no optimizer of torch", remedy, Edit(path, meant or "AdamW"))


def _name_problems(block: OptimizerBlock) -> Iterator[Problem]:
    known = _arguments(block)
    for name in block.params:
        path = (*BLOCK, "params", str(name))
        drop = Edit(path, drop=True)
        if name == "max_grad_norm":
            norm = Edit(("gradient_clipping",), block.params[name])
            remedy = "write gradient_clipping at the root of the file"
            yield error(path, "is not an argument of the optimizer", remedy, drop, norm)
        elif name not in known:
            meant = closest(str(name), known)
            remedy = f"did you mean {meant!r}?" if meant else f"it takes {', '.join(sorted(known))}"
            fix = Edit(path, rename=meant) if meant else drop
            yield error(path, f"is not an argument of {block.type}", remedy, fix)


def _arguments(block: OptimizerBlock) -> set[str]:
    kind = class_of(block)
    names = set(inspect.signature(kind.__init__).parameters) - {"self", "params"}
    return names | set(ADAM_ONLY) if _plain(block.type) in ("adam", "adamw") else names


def _value_problems(block: OptimizerBlock) -> Iterator[Problem]:
    path = (*BLOCK, "params")
    if block.params.get("bias_correction", True) is not True:
        where = (*path, "bias_correction")
        message = "must be true: torch's Adam always corrects the bias"
        yield error(where, message, "delete it", Edit(where, drop=True))
    if _plain(block.type) == "adamw" and block.params.get("adam_w_mode", True) is not True:
        where = (*path, "adam_w_mode")
        fix = Edit((*BLOCK, "type"), "Adam")
        yield error(where, "is false under AdamW", 'write "type": "Adam" for coupled decay', fix)
    yield from _tried(block, path)


def _tried(block: OptimizerBlock, path: Path) -> Iterator[Problem]:
    """Let the class itself judge the arguments in a step on one element, then find the guilty."""
    kind, arguments = _resolve(block)
    together = _refusal(kind, arguments)
    if not together:
        return
    blamed = _to_blame(kind, arguments)
    for name, reason in blamed.items():
        where = (*path, name)
        message = f"{show(arguments[name])} is refused by {kind.__name__}: {reason}"
        fix = _nearest(kind, name, arguments[name], where)
        yield error(where, message, "change it, or delete it for the default", fix)
    if not blamed:
        drops = [Edit((*path, name), drop=True) for name in _contradicting(kind, arguments)]
        yield error(path, f"are refused by {kind.__name__}: {together}", "change them", *drops)


def _to_blame(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> dict[str, str]:
    """The arguments that are refused alone and beside the others: name -> the reason."""
    alone = {n: why for n, value in arguments.items() if (why := _refusal(kind, {n: value}))}
    fine = {name: value for name, value in arguments.items() if name not in alone}
    return {n: why for n, why in alone.items() if _refusal(kind, {**fine, n: arguments[n]})}


def _contradicting(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> list[str]:
    """The arguments that do not go with those that stand before them."""
    kept: dict[str, Any] = {}
    for name, value in arguments.items():
        if not _refusal(kind, {**kept, name: value}):
            kept[name] = value
    return [name for name in arguments if name not in kept]


def _nearest(kind: type[torch.optim.Optimizer], name: str, value: Any, where: Path) -> Edit:
    """The number that a text consists of, else the default, which the user has to look at."""
    number = number_in(value)
    if number is not None and not _refusal(kind, {name: number}):
        return Edit(where, number)
    default = inspect.signature(kind.__init__).parameters[name].default
    plain = list(default) if isinstance(default, tuple) else default
    if isinstance(plain, bool | int | float | list) and not _refusal(kind, {name: plain}):
        return Edit(where, plain, fill_in=True)
    return Edit(where, drop=True, fill_in=True)


def _refusal(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> str:
    wrong = _wrong_kind(kind, arguments)
    if wrong:
        return wrong
    graph = arguments.get("capturable") and torch.cuda.is_available()  # only of a GPU's work
    try:
        kind([one_element("cuda" if graph else "cpu")], **arguments).step()
    except Exception as cause:  # whatever a class makes of odd values, the user needs its words
        return words_of(cause)
    return ""


def one_element(device: str = "cpu") -> torch.Tensor:
    """A parameter with a gradient, for a step that nobody needs."""
    param = torch.zeros(1, device=device, requires_grad=True)
    param.grad = torch.zeros(1, device=device)
    return param


def words_of(cause: Exception) -> str:
    """What an exception says, on one line."""
    return " ".join(str(cause.args[0] if cause.args else "").split()) or type(cause).__name__


def _wrong_kind(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> str:
    """Texts and blocks where the default is a number or a switch: torch finds out too late."""
    defaults = inspect.signature(kind.__init__).parameters
    for name, value in arguments.items():
        default = defaults[name].default
        if not _alike(value, default):
            return f"{name} should look like {show(default)}"
    return ""


def _alike(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or isinstance(value, bool)
    if isinstance(default, (list, tuple)):
        same_length = isinstance(value, (list, tuple)) and len(value) == len(default)
        return same_length and all(map(_alike, value, default))
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float)) and is_finite(value)


def _fusible(kind: type, arguments: dict[str, Any], groups: list[Any]) -> bool:
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    if any(arguments.get(name) is not None for name in ("fused", "foreach")):
        return False
    tensors = [tensor for group in groups for tensor in _tensors(group)]
    return not arguments.get("differentiable") and all(map(_has_fused_kernel, tensors))


def _tensors(group: Any) -> list[Any]:
    """The tensors of a group dict, of a (name, tensor) pair, or the tensor itself."""
    if isinstance(group, dict):
        if not isinstance(group["params"], torch.Tensor):
            group["params"] = list(group["params"])  # a generator can be read only once
            return [tensor for item in group["params"] for tensor in _tensors(item)]
        return [group["params"]]
    return [group[1]] if isinstance(group, tuple) else [group]


def _has_fused_kernel(tensor: Any) -> bool:
    return tensor.is_floating_point() and tensor.device.type in ("cpu", "cuda", "mps", "xpu")
