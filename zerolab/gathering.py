"""Chapter 6: looking at, and changing, parameters that lie in shards.

Owns, for as long as a `with` block lasts, what the values looked like at its start. Inside
`GatheredParameters` the given parameters are whole; whole buckets are, to be exact, since these
are what is gathered. Phases:

    enter   unshard, and remember what the values look like
    exit    with a `modifier_rank`, that rank's values become everybody's: into the shards, and
            into the master weights where the 16-bit value has changed
            without one, a change would be lost with the gathered copy: that is an error
    release shard again what was sharded before
"""

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import comm, homes, sharded_param, unit_sharding, watching
from .bucket import Bucket, Unit
from .errors import UsageError
from .sharded_param import ShardedParameter, Slice

if TYPE_CHECKING:
    from .engine import Engine

CHUNK = 2**17  # elements looked at in one go
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Look = list[tuple[int, int]]  # of every parameter: its version, and a checksum of its values

# What the buckets of stage 3 should look like, and after how many steps: nested blocks share it.
_looks: WeakKeyDictionary[Bucket, tuple[int, Look]] = WeakKeyDictionary()


class GatheredParameters:
    """Make parameters whole inside a `with` block. All ranks enter and leave it together.

    Works before `initialize` (parameters built under `zero.Init`) and after it, at every stage;
    where parameters are whole anyway, nothing is gathered but changes are honoured all the same.
    Blocks may be nested, also with the same parameters, and the model may run inside.

    Args:
        params: one parameter, several, or `module.parameters()`.
        modifier_rank: the rank whose changes count; they reach all ranks, shards and master
            weights at the end. None: nobody changes anything.
        fwd_module: accepted as in DeepSpeed; parameters used elsewhere are noticed without it.
        enabled: False to do nothing.

    Raises:
        UsageError: at the end, when a sharded parameter was changed without a `modifier_rank`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Remember the parameters; nothing is gathered yet."""
        self.params = homes.as_params(params) if enabled else []
        self.modifier_rank = modifier_rank
        self.slices: list[tuple[nn.Parameter, Slice, Look]] = []
        self.free: list[nn.Parameter] = []  # whole, and of no engine
        self.buckets: dict[Bucket, Engine] = {}
        self.held: dict[Unit, tuple[unit_sharding.UnitSharding, bool]] = {}
        world_size = comm.get_world_size()
        if modifier_rank is not None and not 0 <= modifier_rank < world_size:
            raise UsageError(
                f"modifier_rank {modifier_rank} is no rank: give 0 to {world_size - 1}"
            )

    def __enter__(self) -> None:
        """Make the parameters whole."""
        try:
            self._gather()
        except BaseException:
            self._release(keep=False)
            raise

    def _gather(self) -> None:
        sharded_param.settle()
        for param in self.params:
            home = homes.find(param)
            if isinstance(param, ShardedParameter):
                own = sharded_param.unshard(param)
                self.slices.append((param, own, look([param], [param.data])))
            elif home is None:
                self.free.append(_whole(param))
            else:
                self.buckets[home.bucket] = home.engine
        for bucket, engine in self.buckets.items():
            if isinstance(engine.sharding, unit_sharding.UnitSharding):
                self._hold(engine.sharding, bucket)
                if bucket not in _looks:
                    _looks[bucket] = (engine.global_steps, look_at(bucket))

    def _hold(self, stage: unit_sharding.UnitSharding, bucket: Bucket) -> None:
        """Keep the bucket's unit whole."""
        unit = stage.unit_of[bucket]
        if unit not in self.held:
            self.held[unit] = (stage, stage.hold(unit))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Send changes round, shard again. After an exception nothing is sent."""
        changed: list[str] = []
        if kind is None:
            changed = self._lost() if self.modifier_rank is None else []
            if not changed:
                self._honour()
        self._release(keep=kind is None and self.modifier_rank is not None)
        if changed:
            raise UsageError(
                f"{changed[0]} was changed inside GatheredParameters without a modifier_rank: "
                "the change would be lost when it is sharded again; pass modifier_rank=0 and "
                "change it on that rank"
            )

    def _lost(self) -> list[str]:
        """Name what was changed although nobody may."""
        names = [
            f"a parameter of shape {tuple(param.shape)}"
            for param, _, before in self.slices
            if look([param], [param.data]) != before
        ]
        for bucket, engine in self.buckets.items():
            steps, before = _looks.get(bucket, (-1, []))
            if steps == engine.global_steps:
                names += changed_since(bucket, before)
        return names

    @torch.no_grad()
    def _honour(self) -> None:
        """Bring changes to all ranks, and to the weights that the optimizer updates."""
        for param in self.free if self.modifier_rank is not None else []:
            whole = param.data.contiguous()
            comm.broadcast(whole, src=self.modifier_rank or 0, purpose="control")
            param.data.copy_(whole)
        for bucket, engine in self.buckets.items():
            take_assigned(bucket)
            if self.modifier_rank is not None:
                comm.broadcast(bucket.flat_param, src=self.modifier_rank, purpose="control")
            elif bucket in _looks:
                continue  # sharded, and not changed
            adopt(bucket)
            if bucket in _looks:
                _looks[bucket] = (engine.global_steps, look_at(bucket))

    def _release(self, keep: bool) -> None:
        """Shard again what was sharded; `keep` the changes or go back to the old slices."""
        for param, own, _ in self.slices:
            module = own.module()
            if keep and module is not None:
                sharded_param.shard(param, module, src=self.modifier_rank or 0)
            else:
                sharded_param.restore(param, own)
        for unit, (stage, was_sharded) in self.held.items():
            stage.release(unit, was_sharded)
            for bucket in unit.buckets if not stage.turns[unit].holds else []:
                _looks.pop(bucket, None)
        self.slices, self.free, self.held, self.buckets = [], [], {}, {}


def _whole(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter that no engine has; refuse one whose engine is gone."""
    if sharded_param.is_placeholder(param):
        raise UsageError(
            f"a parameter of shape {tuple(param.shape)} was sharded by an engine that is gone, and "
            "its values with it: keep the engine as long as the model"
        )
    return param


def look(params: Iterable[nn.Parameter], values: Iterable[torch.Tensor]) -> Look:
    """Describe parameters so that a change is seen, also one made through `.data`."""
    return [(p._version, _checksum(value)) for p, value in zip(params, values, strict=True)]


def _checksum(values: torch.Tensor) -> int:
    kind = _INTEGER.get(values.element_size(), torch.int64)
    bits = values.detach().reshape(-1).view(kind)
    return sum(int(chunk.sum()) for chunk in bits.split(CHUNK))


def look_at(bucket: Bucket) -> Look:
    """Describe the parameters of a bucket."""
    return look([slot.param for slot in bucket.slots], bucket.views)


def changed_since(bucket: Bucket, before: Look) -> list[str]:
    """Name the parameters of a bucket that no longer look as they did."""
    assigned = take_assigned(bucket)
    seen = zip(bucket.slots, before, look_at(bucket), strict=True)
    changed = {slot.name for slot, then, now in seen if then != now}
    return [f"parameter {s.name!r}" for s in bucket.slots if s.name in changed | assigned]


@torch.no_grad()
def take_assigned(bucket: Bucket) -> set[str]:
    """Bring home what was set with `param.data = ...`; return the names of such parameters."""
    found: set[str] = set()
    for slot, view in zip(bucket.slots, bucket.views, strict=True):
        if slot.param.data_ptr() != view.data_ptr():
            view.copy_(slot.param.data)
            slot.param.data = view
            found.add(slot.name)
    return found


@torch.no_grad()
def adopt(bucket: Bucket) -> None:
    """Take a whole bucket's values into the own shard and the master weights.

    A master weight says more than its 16-bit copy: it is replaced only where the copy is no
    longer what it rounds to.
    """
    bucket.shard.copy_(bucket.flat_param[slice(*bucket.bounds)])
    if bucket.master is None:
        return
    start = bucket.bounds[0] if bucket.master.numel() == bucket.shard_numel else 0
    own = bucket.flat_param[start : start + bucket.master.numel()]
    changed = own != bucket.master.to(own.dtype)
    bucket.master[changed] = own[changed].to(bucket.master.dtype)


def whole_state_dict(module: nn.Module, **more: Any) -> dict[str, Any]:
    """Return `module.state_dict()` with whole parameters, as copies, on every rank."""
    with GatheredParameters(module.parameters()):
        state = module.state_dict(**more)
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def load_state_dict(module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> Any:
    """Load whole parameters, the same on every rank, wherever they lie; rank 0's values win."""
    with GatheredParameters(module.parameters(), modifier_rank=0):
        return module.load_state_dict(state_dict, strict)


def watch_states(module: nn.Module) -> list[Any]:
    """Let torch's own `state_dict` and `load_state_dict` end well or in words, on every part.

    Where parameters are sharded there is nothing to save, nor to load into: that is an error.
    Elsewhere the loaded values go into the master weights too, or the next step would undo them.

    Returns:
        Handles that take the watch away.
    """
    handles = []
    for part in module.modules():
        homes_of = [homes.find(param) for param in part.parameters(recurse=False)]
        buckets = weakref.WeakSet(home.bucket for home in homes_of if home is not None)
        if buckets:
            adopt_all = watching.ModuleHook(_adopt_all, buckets)
            handles.append(part.register_state_dict_pre_hook(_refuse_to_save))
            handles.append(part.register_load_state_dict_pre_hook(_refuse_to_load))
            handles.append(part.register_load_state_dict_post_hook(adopt_all))
    return handles


def _refuse_to_save(module: nn.Module, *_: Any) -> None:
    """Before a module's state is read: its parameters must be here."""
    if _is_sharded(module):
        raise UsageError(
            f"state_dict: the parameters of {type(module).__name__} are sharded, so it would hold "
            "NaN: call engine.module_state_dict() on every rank, or read it inside "
            "zero.GatheredParameters(module.parameters())"
        )


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    """Before a module is loaded: its parameters must be here."""
    if _is_sharded(module):
        raise UsageError(
            f"load_state_dict: the parameters of {type(module).__name__} are sharded: call "
            "engine.load_module_state_dict(state_dict) on every rank, or load inside "
            "zero.GatheredParameters(module.parameters(), modifier_rank=0)"
        )


def _is_sharded(module: nn.Module) -> bool:
    return any(sharded_param.is_placeholder(param) for param in module.parameters(recurse=False))


def _adopt_all(buckets: "weakref.WeakSet[Bucket]", *_: Any) -> None:
    """After a module was loaded: the optimizer goes on from the new values."""
    for bucket in buckets:
        if bucket not in _looks:  # inside `GatheredParameters` the end of the block does it
            adopt(bucket)
