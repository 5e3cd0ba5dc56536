"""Chapter 12: from the names in a file to the schema, collecting every problem on the way.

Data: a `Reading`: the filled schema, which keys the file gave (and how it spelled them), and what
is wrong. Phases: `_rename` replaces DeepSpeed's old spellings; `_walk` looks every name up
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
from .triad import ACCUM, MICRO, TOTAL
from .values import closest

PLACEHOLDER = object()  # stands for a value that could not be read; the reader has said so


@dataclass
class Reading:
    """What a file says.

    Attributes:
        file: the schema, with defaults where the file is silent or wrong.
        given: canonical path of each key of the file -> the key.
        written: canonical path -> the path as the file spells it.
        wrong: canonical paths whose values were refused.
        problems: what was found, in reading order.
    """

    file: File = field(default_factory=File)
    given: dict[Path, Key] = field(default_factory=dict)
    written: dict[Path, Path] = field(default_factory=dict)
    wrong: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def says(self, *path: str) -> bool:
        """Whether the file gives a readable value for this key."""
        return path in self.given and path not in self.wrong


def read(raw: dict[str, Any]) -> Reading:
    """Read a file that is already a dict."""
    reading = Reading()
    modern = renamed.modernise(raw, reading.problems)
    values = _walk(File, modern, (), (), reading)
    _fill(values, reading)
    return reading


def _walk(
    block: type[Block], data: dict[str, Any], path: Path, written: Path, reading: Reading
) -> dict[str, Any]:
    keys = {name: key for key in keys_of(block, path) for name in (key.name, *key.other_names)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        spelled = (*written, str(name))
        key = keys.get(name)
        if key is None:
            reading.problems.append(_unknown(spelled, name, keys))
        elif key.path in reading.given:
            first = reading.written[key.path][-1]
            reading.problems.append(_twice(spelled, first))
        else:
            reading.given[key.path], reading.written[key.path] = key, spelled
            _take(key, value, spelled, values, reading)
    return values


def _take(key: Key, value: Any, spelled: Path, values: dict[str, Any], reading: Reading) -> None:
    if value is PLACEHOLDER:
        reading.wrong.add(key.path)
    elif value == "auto" and key.default != "auto":
        reading.wrong.add(key.path)
        reading.problems.append(_auto(key, spelled))
    elif key.block is not None and isinstance(value, dict):
        values[key.field] = _walk(key.block, value, key.path, spelled, reading)
    else:
        values[key.field] = _without_auto(value, spelled, reading) if key.name == "params" else value


def _without_auto(params: Any, spelled: Path, reading: Reading) -> Any:
    if not isinstance(params, dict):
        return params
    for name in [name for name, value in params.items() if value == "auto"]:
        reading.problems.append(
            note((*spelled, str(name)), '"auto" is for the Hugging Face Trainer', "the default is used")
        )
    return {name: value for name, value in params.items() if value != "auto"}


def _unknown(spelled: Path, name: Any, keys: dict[str, Key]) -> Problem:
    gone = renamed.gone(spelled)
    if gone:
        return error(spelled, gone, "delete the key", Edit(spelled, drop=True))
    meant = closest(str(name), keys)
    if meant:
        fix = Edit(spelled, rename=meant)
        return error(spelled, "is not a key of this block", f"did you mean {meant!r}?", fix)
    home = next((k for k in all_keys(File) if name in (k.name, *k.other_names)), None)
    where = f"it belongs to {'.'.join(home.path[:-1]) or 'the root'}" if home else "delete it"
    return error(spelled, "is not a key of this block", where, Edit(spelled, drop=True))


def _twice(spelled: Path, first: str) -> Problem:
    remedy = f"keep {first!r}, delete this one"
    return error(spelled, f"is given a second time, as {first!r} before", remedy, Edit(spelled, drop=True))


def _auto(key: Key, spelled: Path) -> Problem:
    message = '"auto" is filled in by the Hugging Face Trainer, and nothing fills it in here'
    if key.name in (TOTAL, MICRO, ACCUM):
        return error(spelled, message, "write a number", Edit(spelled, drop=True))
    return note(spelled, message, f"the default is used: {show(key.default)}")


def _fill(values: dict[str, Any], reading: Reading) -> None:
    """Fill the schema; every refused value is reported once and left out of the next try."""
    while True:
        try:
            reading.file = File.model_validate(values)
            return
        except ValidationError as refused:
            for detail in refused.errors(include_url=False):
                _set_aside(values, detail, reading)


def _set_aside(values: dict[str, Any], detail: Any, reading: Reading) -> None:
    fields = [part for part in detail["loc"] if isinstance(part, str)]
    block, holder, path = File, values, ()
    for name in fields:
        key = next((k for k in keys_of(block, path) if k.field == name), None)
        if key is None:
            break
        path = key.path
        if key.block is None or not isinstance(holder.get(name), dict):
            holder.pop(name, None)
            break
        block, holder = key.block, holder[name]
    if path not in reading.wrong:
        reading.wrong.add(path)
        reading.problems.append(_refused(reading.written[path], detail))


def _refused(spelled: Path, detail: Any) -> Problem:
    value, text = detail["input"], detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "model_type":
        text = "must be a block; write {...}"
    rule, _, remedy = text.partition("; ")
    return error(spelled, f"{show(value)} {rule}", remedy, Edit(spelled, drop=True))
