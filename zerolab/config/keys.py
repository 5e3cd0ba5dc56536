"""Chapter 12: what may be said about a key, and how each of those sentences is treated.

Data: a `Status` for every key. The schema declares a key once, by `works(...)`, `idle(...)`,
`later(...)` and so on: default, status, what it does and why not. When a later chapter makes a key
work, that one declaration changes and nothing else.

The policy, in one place:

    status     if a file asks   meaning
    works      nothing          the engine does what the key says
    always     warning          the engine does the default, whatever the file says
    idle       warning          nothing reads it here, and often nothing in DeepSpeed either
    code       warning          acts only when the script calls something as well
    unheard    warning          not yet in this version; the training is the same without it
    later      error            not yet in this version; the run would not be the one asked for
    cuda       error            needs CUDA kernels that zerolab does not have
    refused    error            outside what zerolab does
    detail     nothing          a setting of the block above, and as good as that block
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from .problems import Path


class Status(StrEnum):
    """What this version does with a key: see the table at the top of the module."""

    WORKS = "works"
    ALWAYS = "always"
    IDLE = "idle"
    CODE = "code"
    UNHEARD = "unheard"
    LATER = "later"
    CUDA = "cuda"
    REFUSED = "refused"
    DETAIL = "detail"


STOPS = frozenset({Status.LATER, Status.CUDA, Status.REFUSED})
SAYS = {
    Status.WORKS: "",
    Status.ALWAYS: "has no choice here",
    Status.IDLE: "has no effect",
    Status.CODE: "does nothing by itself",
    Status.UNHEARD: "is not yet heard in this version",
    Status.LATER: "is not yet in this version",
    Status.CUDA: "needs CUDA kernels that zerolab does not have",
    Status.REFUSED: "is refused",
    Status.DETAIL: "",
}


class Block(BaseModel):
    """One object of the file; unknown names are found by the reader, with a suggestion."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    def asked(self) -> bool:
        """Whether the block wants anything: it is switched on, or differs from its defaults."""
        enabled = getattr(self, "enabled", None)
        return self != type(self)() if enabled is None else bool(enabled)


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        path: names from the root, as a file writes them.
        field: the attribute's name in its block.
        status, does, why: see `Status`; what it does; why the status is not `works`.
        default, deepspeed: the value when the file is silent, here and in DeepSpeed 0.19.8.
        stages: the ZeRO stages at which it acts.
        other_names: accepted spellings beside the last name of `path`.
        block: the schema of its value, when that is a block.
    """

    path: Path
    field: str
    status: Status
    does: str
    why: str
    default: Any
    deepspeed: Any
    stages: tuple[int, ...]
    other_names: tuple[str, ...]
    block: type[Block] | None

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path[-1]


def _key(status: Status, default: Any, does: str, why: str = "", **more: Any) -> Any:
    extra = {"status": status, "does": does, "why": why, **more}
    if isinstance(default, type) and issubclass(default, Block):
        return Field(default_factory=default, json_schema_extra=extra)
    return Field(default=default, json_schema_extra=extra)


def works(default: Any, does: str, **more: Any) -> Any:
    """A key that acts. `more`: deepspeed, stages, name, other_names."""
    return _key(Status.WORKS, default, does, **more)


def always(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key whose default is what the engine does in every case."""
    return _key(Status.ALWAYS, default, does, why, **more)


def idle(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key that nothing reads."""
    return _key(Status.IDLE, default, does, why, **more)


def through_code(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key that waits for a call of the script."""
    return _key(Status.CODE, default, does, why, **more)


def unheard(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key of a later chapter; leaving it out changes no result."""
    return _key(Status.UNHEARD, default, does, why, **more)


def later(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key of a later chapter that a run may depend on."""
    return _key(Status.LATER, default, does, why, **more)


def cuda(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key that needs CUDA kernels."""
    return _key(Status.CUDA, default, does, why, **more)


def refused(default: Any, does: str, why: str, **more: Any) -> Any:
    """A key whose default is the only value that runs."""
    return _key(Status.REFUSED, default, does, why, **more)


def detail(default: Any, does: str, **more: Any) -> Any:
    """A key that shares the status of its block."""
    return _key(Status.DETAIL, default, does, **more)


@functools.cache
def keys_of(block: type[Block], above: Path = ()) -> tuple[Key, ...]:
    """The keys of one block, in the order of the schema."""
    return tuple(_read(name, field, above) for name, field in block.model_fields.items())


def all_keys(block: type[Block], above: Path = ()) -> Iterator[Key]:
    """Every key below a block, depth first."""
    for key in keys_of(block, above):
        yield key
        if key.block is not None:
            yield from all_keys(key.block, key.path)


def _read(field_name: str, field: FieldInfo, above: Path) -> Key:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), f"{field_name} is declared without a status"
    said: dict[str, Any] = dict(extra)
    default = field.get_default(call_default_factory=True, validated_data={})
    return Key(
        path=(*above, said.get("name", field_name)),
        field=field_name,
        status=said["status"],
        does=said["does"],
        why=said["why"],
        default=default,
        deepspeed=said.get("deepspeed", default),
        stages=said.get("stages", (0, 1, 2, 3)),
        other_names=said.get("other_names", ()),
        block=_block_in(field.annotation),
    )


def _block_in(annotation: Any) -> type[Block] | None:
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((b for b in map(_block_in, get_args(annotation)) if b is not None), None)
    return None


def show(value: Any, width: int = 60) -> str:
    """A value as a JSON file would write it, in at most `width` characters."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= width else text[: width - 3] + "..."
