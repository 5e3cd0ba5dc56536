"""Chapter 12: from the names in a file to the schema, collecting every problem on the way.

Data: a `Reading`: the filled schema, which keys the file gave (and how it spelled them), and what
is wrong. Phases: `renamed` translates DeepSpeed's old spellings; `_walk` looks every name up
(aliases, removed names, misspellings, "auto"); `_fill` lets pydantic check the values, sets the bad
ones aside and fills the schema with the rest, so that the rules can still look at it.
"""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from . import renamed
from .keys import Block, Key, all_keys, keys_of, show
from .problems import Edit, Path, Problem, error, note
from .schema import File
from .source import Placeholder
from .triad import ACCUM, MICRO, TOTAL
from .values import closest

SILENT = ("activation_checkpointing", "flops_profiler", "aio", "checkpoint")  # read as plain dicts
TRAINER = '"auto" is filled in by the Hugging Face Trainer, and nothing fills it in here'


@dataclass
class Reading:
    """What a file says.

    Attributes:
        file: the schema, with defaults where the file is silent or wrong.
        given: canonical path of each key of the file -> the key.
        written: canonical path -> the path as the file spells it.
        wrong: canonical paths whose values were refused.
        silent: canonical paths where "auto" stands, so that the default counts.
        problems: what was found, in reading order.
    """

    file: File = field(default_factory=File)
    given: dict[Path, Key] = field(default_factory=dict)
    written: dict[Path, Path] = field(default_factory=dict)
    wrong: set[Path] = field(default_factory=set)
    silent: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def fine(self, *path: str) -> bool:
        """Whether the key has the value that the file wants: given and valid, or left out."""
        return not any(path[:depth] in self.wrong for depth in range(1, len(path) + 1))

    def spelled(self, *path: str) -> Path:
        """The path of a key as the file writes it, or as the schema does."""
        return self.written.get(path, path)


def read(raw: dict[str, Any]) -> Reading:
    """Read a file that is already a dict."""
    reading = Reading()
    modern = renamed.modernise(raw, reading.problems)
    values = _walk(File, modern, (), (), reading)
    _fill(values, reading)
    return reading


def _walk(
    block: type[Block], data: dict[str, Any], path: Path, above: Path, reading: Reading
) -> dict[str, Any]:
    keys = {name: key for key in keys_of(block, path) for name in (key.name, *key.other_names)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = keys.get(name) or _misspelt(name, (*above, name), keys, reading)
        if key is None:
            continue
        if key.path in reading.given:
            reading.problems.append(_twice((*above, name), reading.written[key.path][-1]))
        else:
            reading.given[key.path], reading.written[key.path] = key, (*above, name)
            _take(key, value, values, reading)
    return values


def _misspelt(name: str, spelled: Path, keys: dict[str, Key], reading: Reading) -> Key | None:
    """Report an unknown name; the key it most likely means, so that its value is read as well."""
    meant = "" if renamed.gone(spelled) else closest(name, keys)
    if not meant:
        reading.problems.append(_unknown(spelled))
        return None
    fix = Edit(spelled, rename=meant)
    reading.problems.append(_no_key(spelled, f"did you mean {meant!r}?", fix))
    return keys[meant]


def _unknown(spelled: Path) -> Problem:
    reason, drop = renamed.gone(spelled), Edit(spelled, drop=True)
    if reason:
        return error(spelled, reason, "delete the key", drop)
    name = spelled[-1]
    home = next((k for k in all_keys(File) if name in (k.name, *k.other_names)), None)
    there = f"it belongs in {'.'.join(home.path[:-1]) or 'the root'}" if home else "delete it"
    return _no_key(spelled, there, drop)


def _no_key(spelled: Path, remedy: str, edit: Edit) -> Problem:
    where = f"the block {spelled[-2]!r}" if spelled[1:] else "the root of the file"
    silent = not spelled[1:] or spelled[0] in SILENT
    there = "DeepSpeed ignores it without a word" if silent else "DeepSpeed stops at it too"
    return error(spelled, f"is not a key of {where}; {there}", remedy, edit)


def _twice(spelled: Path, first: str) -> Problem:
    drop = Edit(spelled, drop=True)
    return error(spelled, f"says again what {first!r} says", "keep one of them", drop)


def _take(key: Key, value: Any, values: dict[str, Any], reading: Reading) -> None:
    spelled = reading.written[key.path]
    if isinstance(value, Placeholder):
        reading.wrong.add(key.path)
        reading.problems.append(_placeholder(key, value, spelled))
    elif value == "auto" and key.default != "auto":
        _auto(key, spelled, reading)
    elif key.block is not None and isinstance(value, dict):
        values[key.field] = _walk(key.block, value, key.path, spelled, reading)
    elif key.name == "params" and isinstance(value, dict):
        values[key.field] = _arguments(value, spelled, reading)
    else:
        values[key.field] = value


def _arguments(params: dict[str, Any], spelled: Path, reading: Reading) -> dict[str, Any]:
    for name in [name for name, value in params.items() if value == "auto"]:
        reading.problems.append(note((*spelled, name), TRAINER, "the class's default is used"))
    return {name: value for name, value in params.items() if value != "auto"}


def _auto(key: Key, spelled: Path, reading: Reading) -> None:
    if key.name in (TOTAL, MICRO, ACCUM):
        reading.wrong.add(key.path)
        drop = Edit(spelled, drop=True)
        reading.problems.append(error(spelled, TRAINER, "write a number", drop))
    else:
        reading.silent.add(key.path)
        used = f"the default is used: {show(key.default)}"
        reading.problems.append(note(spelled, TRAINER, used))


def _placeholder(key: Key, value: Placeholder, spelled: Path) -> Problem:
    message = f"{value} is a manual's way to say `choose one`, not a value"
    default = show(key.default)
    return error(spelled, message, f"write {default}, the default", Edit(spelled, key.default))


def _fill(values: dict[str, Any], reading: Reading) -> None:
    """Fill the schema; each refused value is reported and left out of the next try."""
    while True:
        try:
            reading.file = File.model_validate(values)
            return
        except ValidationError as refused:
            for detail in refused.errors(include_url=False):
                _set_aside(values, detail, reading)


def _set_aside(values: dict[str, Any], detail: Any, reading: Reading) -> None:
    path = _pop(values, detail["loc"])
    if path in reading.wrong:
        return
    reading.wrong.add(path)
    spelled = reading.written[path]
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "model_type":
        text = "must be a block; write {...}"
    rule, _, remedy = text.partition("; ")
    fix = _fix(reading.given[path], spelled, detail.get("ctx", {}).get("error"))
    reading.problems.append(error(spelled, f"{show(detail['input'])} {rule}", remedy, fix))


def _fix(key: Key, spelled: Path, refusal: Any) -> Edit:
    """The nearest valid value; the default where the value says nothing; nothing for a block."""
    meant = getattr(refusal, "nearest", None)
    if meant is not None:
        return Edit(spelled, meant)
    if key.block is None and isinstance(key.default, bool | int | float | str | list):
        return Edit(spelled, key.default, fill_in=True)
    return Edit(spelled, drop=True, fill_in=True)


def _pop(values: dict[str, Any], loc: tuple[Any, ...]) -> Path:
    """Remove the value that pydantic points at; its canonical path."""
    block: type[Block] = File
    path: Path = ()
    for name in loc:
        key = next(k for k in keys_of(block, path) if k.field == name)
        path, value = key.path, values.get(key.field)
        if key.block is None or not isinstance(value, dict):
            values.pop(key.field, None)
            break
        block, values = key.block, value
    return path
