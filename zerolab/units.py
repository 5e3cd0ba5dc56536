"""Chapter 6: which modules are gathered as one, and which parameters never go.

Owns the modules that scripts have named as leaves. A unit is a module whose parameters stage 3
gathers and frees together. The choice, from the strongest wish to the default:

    leaves   `set_z3_leaf_modules` in the script
    names    `zerolab.unit_modules` in the configuration, paths or classes
    blocks   else the repeated blocks of the model

Parameters under the persistence threshold stay whole on every rank.
"""

from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from . import bucket as buckets_
from . import config as config_
from . import homes
from .config import problems, values
from .errors import UsageError

_leaves: WeakSet[nn.Module] = WeakSet()


def choose(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules that become units, by path, none inside another, in the model's order.

    Args:
        model: the whole model.
        names: the units that the configuration names; empty to take the repeated blocks.
    """
    blocks = named_blocks(model, names) if names else buckets_.find_blocks(model)
    return with_leaves(model, blocks)


def named_blocks(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the units that the configuration names, by path or by class.

    Raises:
        ConfigError: a name is in no part of the model; only here can that be seen.
    """
    found = [
        (path, module)
        for path, module in model.named_modules()
        if path and (path in names or type(module).__name__ in names)
    ]
    known = {path for path, _ in found} | {type(module).__name__ for _, module in found}
    missing = [name for name in names if name not in known]
    if missing:
        raise config_.ConfigError([_no_such_part(model, name) for name in missing])
    outer: list[tuple[str, nn.Module]] = []
    for path, module in found:
        if not any(_inside(path, taken) for taken, _ in outer):
            outer.append((path, module))
    return outer


def _no_such_part(model: nn.Module, name: str) -> config_.Problem:
    parts = {path: type(module).__name__ for path, module in model.named_modules() if path}
    meant = values.closest(name, [*parts.values(), *parts])
    example = next(iter(parts), "")
    remedy = f"did you mean {meant!r}?" if meant else f"name one such as {example!r}"
    if not parts:
        remedy = "leave the list empty, since the model has no parts"
    message = f"{name!r} is no part of the model, neither a path nor a class in it"
    return problems.error(("zerolab", "unit_modules"), message, remedy)


def persistent(model: nn.Module, cfg: config_.Config) -> set[nn.Parameter]:
    """Return the small parameters that stage 3 keeps whole, while the total allows it."""
    chosen: set[nn.Parameter] = set()
    room = cfg.zero.model_persistence_threshold
    for param in model.parameters():
        small = param.numel() <= cfg.zero.param_persistence_threshold
        if cfg.stage == 3 and small and 0 < param.numel() <= room:
            chosen.add(param)
            room -= param.numel()
    return chosen


# -- modules that scripts name --------------------------------------------------------------


def set_z3_leaf_modules(model: nn.Module, kinds: Sequence[type | str]) -> list[nn.Module]:
    """Make one unit of every module of these classes: gathered and freed as a whole.

    Needed where ranks go different ways inside a module (a mixture of experts): a part that only
    some ranks run must not be gathered by itself. Call it before `initialize`.

    Args:
        model: where to look.
        kinds: classes, or names of classes.

    Returns:
        The modules found.

    Raises:
        UsageError: none was found, or the model has its units already.
    """
    found = _of_kinds(model, kinds)
    for module in found:
        for param in module.parameters():
            home = homes.find(param)
            if home is not None and home.engine.stage == 3:
                raise UsageError(
                    "set_z3_leaf_modules was called after initialize, which cuts the units: "
                    "call it before"
                )
        _leaves.add(module)
    return found


def unset_z3_leaf_modules(model: nn.Module, kinds: Sequence[type | str]) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for modules of these classes, and return them."""
    found = _of_kinds(model, kinds)
    for module in found:
        _leaves.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `set_z3_leaf_modules` has chosen."""
    return [module for module in model.modules() if module in _leaves]


def _of_kinds(model: nn.Module, kinds: Sequence[type | str]) -> list[nn.Module]:
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}
    found = [m for m in model.modules() if isinstance(m, classes) or type(m).__name__ in names]
    if not found:
        wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
        raise UsageError(f"the model has no module of class {wanted}")
    return found


def with_leaves(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Let leaf modules take the place of blocks inside them; one inside a block changes nothing.

    Args:
        model: the whole model; it may be a leaf itself, and is then one unit.
        blocks: modules by path.
    """
    leaves = {path: module for path, module in model.named_modules() if module in _leaves}
    chosen = dict(blocks) | leaves
    outer: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path in chosen and not any(_inside(path, taken) for taken in outer):
            outer[path] = module
    return [(path, module) for path, module in outer.items() if path]


def _inside(path: str, outer: str) -> bool:
    """Whether a module is part of another one; "" is the whole model."""
    return outer == "" or path.startswith(f"{outer}.")
