"""Chapter 12: where a configuration comes from: a dict, a JSON or HJSON file, base64 of JSON.

Data: a `Source`: its name for messages, the dict, and what is wrong with the text itself.
Phases: `_tidy` puts right what is not even HJSON but is found in articles and in Python code (the
choice `[true|false]`, `True`, a missing pair of outer braces); hjson reads the rest, comments and
all; `_settle` finds keys that stand twice in one object.
"""

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import hjson

from .problems import ConfigError, Edit, Path, Problem, error

DEEPEST = 20  # blocks within blocks; a real file has four
LARGEST = 2**20  # bytes of a file; a real one has a few thousand
MARK = "\x00placeholder "
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_COMMENT = r"#[^\n]*|//[^\n]*|/\*.*?\*/"
# Strings and comments pass through unchanged; the named groups are what `_tidy` looks for. A bare
# word may end a line in HJSON; before a comma or a bracket it would swallow the rest of the line.
_TOKEN = re.compile(
    rf'"(?:\\.|[^"\\\n])*"|{_COMMENT}'
    r"|(?P<choice>\[\s*\w+(?:\s*\|\s*\w+)+\s*\])"
    r"|(?P<colon>:\s*)(?!(?:true|false|null)\b)(?P<word>[A-Za-z_][\w.]*)(?=\s*[,}\]])",
    re.DOTALL,
)


@dataclass(frozen=True)
class Placeholder:
    """A documentation's `[true|false]` where a value belongs."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Source:
    """A configuration as it was given: the dict, and the problems of the text."""

    name: str
    raw: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)


def open_source(given: Any) -> Source:
    """Read a dict, the path of a JSON or HJSON file, or base64 of JSON.

    Raises:
        ConfigError: it is none of them, or the text cannot be read at all.
    """
    if isinstance(given, Mapping):
        return Source("config", _settle(given, (), []))
    if isinstance(given, (str, os.PathLike)):
        name, text = _text(os.fspath(given))
        return parse(text, name)
    kind = type(given).__name__
    raise ConfigError([error((), f"a {kind} is no configuration", "give a dict or a path")])


def parse(text: str, name: str = "config") -> Source:
    """Read the text of a file.

    Raises:
        ConfigError: the text is no object, with line and column.
    """
    problems: list[Problem] = []
    try:
        raw = hjson.loads(_tidy(text, problems), object_pairs_hook=_Pairs)
    except hjson.HjsonDecodeError as cause:
        where = f"line {cause.lineno}, column {cause.colno}"
        message = f"{where}: {cause.msg[:1].lower()}{cause.msg[1:]}"
        remedy = "look for a missing quote, comma or brace there or just before"
        raise ConfigError([*problems, error((), message, remedy)], name) from cause
    except (IndexError, RecursionError, ValueError) as cause:
        message = f"cannot be read ({cause}): a comment, text or block is not closed"
        raise ConfigError([error((), message, "close it")], name) from cause
    if not isinstance(raw, _Pairs):
        shown = f"a {type(raw).__name__}" if text.strip() else "nothing"
        raise ConfigError([error((), f"holds {shown}", 'write an object: {"key": value}')], name)
    return Source(name, _settle(raw, (), problems), problems)


class _Pairs(list[tuple[str, Any]]):
    """An object as hjson reads it, with every key it has, twice if it stands twice."""


def _text(given: str) -> tuple[str, str]:
    path = FilePath(given)
    try:
        if path.is_file():
            _refuse_large(path)
            return path.name, path.read_text(encoding="utf-8-sig")
        return "config", base64.b64decode(given, validate=True).decode()
    except ConfigError:
        raise
    except (OSError, ValueError, binascii.Error) as cause:
        shown = given if len(given) < 100 else given[:97] + "..."
        message = f"{shown!r} is neither a readable file nor base64 of JSON"
        raise ConfigError([error((), message, "give a dict or the path of a file")]) from cause


def _refuse_large(path: FilePath) -> None:
    """Refuse what is no configuration before it is read: a data set, a checkpoint."""
    nbytes = path.stat().st_size
    if nbytes > LARGEST:
        message = f"has {nbytes} bytes; a configuration has at most {LARGEST}"
        raise ConfigError([error((), message, "give the path of the right file")], path.name)


def _tidy(text: str, problems: list[Problem]) -> str:
    words: dict[str, None] = {}

    def replace(match: re.Match[str]) -> str:
        if match["choice"]:
            return f'"\\u0000{MARK[1:]}{match["choice"]}"'
        word = match["word"]
        if not word:
            return match[0]
        words[word] = None
        return match["colon"] + PYTHON_WORDS.get(word, f'"{word}"')

    tidy = _TOKEN.sub(replace, text)
    problems.extend(map(_bare_word, words))
    bare = re.sub(_COMMENT, "", tidy, flags=re.DOTALL).strip()
    return tidy if bare.startswith(("{", "[")) or '"' not in bare else "{" + tidy + "\n}"


def _bare_word(word: str) -> Problem:
    if word in PYTHON_WORDS:
        return error((), f"{word} is Python, not JSON", f"write {PYTHON_WORDS[word]}")
    message = f"{word} has no quotes, and a file holds values, no variables"
    return error((), message, f'write "{word}", or the value you mean')


def _settle(data: Any, path: Path, problems: list[Problem]) -> Any:
    """A plain copy: dicts of dicts, duplicates reported, placeholders marked as such."""
    if len(path) > DEEPEST:
        raise ConfigError([error((), f"has blocks more than {DEEPEST} deep", "flatten it")])
    if isinstance(data, str) and data.startswith(MARK):
        return Placeholder(data.removeprefix(MARK))
    if isinstance(data, (_Pairs, Mapping)):
        return _settle_object(data, path, problems)
    if isinstance(data, (list, tuple)):
        return [_settle(item, (*path, "[]"), problems) for item in data]
    return data


def _settle_object(data: Any, path: Path, problems: list[Problem]) -> dict[str, Any]:
    settled: dict[str, Any] = {}
    for name, value in data if isinstance(data, _Pairs) else data.items():
        here = (*path, str(name))
        if str(name) in settled:
            message = "stands twice in this object, and readers disagree which one counts"
            kept = Edit(here, settled[str(name)])
            problems.append(error(here, message, "keep one of the two", kept))
        else:
            settled[str(name)] = _settle(value, here, problems)
    return settled
