"""Chapter 12: where a configuration comes from: a dict, a JSON or HJSON file, base64 of JSON.

Data: a `Source`: its name for messages, the dict, and what is wrong with the text itself.
Phases: `_tidy` puts right what is not even HJSON but is found in articles and in Python code (the
choice `[true|false]`, `True`, a missing pair of outer braces); hjson reads the rest, comments and
all; `_settle` finds keys that stand twice in one object.
"""

import base64
import binascii
import codecs
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import hjson

from .keys import show
from .problems import ConfigError, Edit, Path, Problem, error

DEEPEST = 20  # blocks within blocks; a real file has four
LARGEST = 2**20  # bytes of a file; a real one has a few thousand
MARK = "\x00placeholder "
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
ENDLESS = ("NaN", "Infinity", "nan", "inf")  # what Python's json writes, and what it prints
_COMMENT = r"#[^\n]*|//[^\n]*|/\*.*?\*/"
# Strings and comments pass through unchanged; the named groups are what `_tidy` looks for. A bare
# word may end a line in HJSON; before a comma or a bracket it would swallow the rest of the line.
_TOKEN = re.compile(
    rf'"(?:\\.|[^"\\\n])*"|{_COMMENT}'
    r"|(?P<choice>\[\s*\w+(?:\s*\|\s*\w+)+\s*\])"
    r"|(?P<colon>:\s*)(?!(?:true|false|null)\b)(?P<word>-?[A-Za-z_][\w.]*)(?=\s*[,}\]])",
    re.DOTALL,
)
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")


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
    message = f"a value of type {type(given).__name__} is no configuration"
    raise ConfigError([error((), message, "give a dict or a path")])


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
    except (IndexError, RecursionError, ValueError, ArithmeticError) as cause:
        raise ConfigError([_unreadable(text, cause)], name) from cause
    if not isinstance(raw, _Pairs):
        shown = f"{show(raw)}, which is no object" if text.strip() else "nothing"
        raise ConfigError([error((), f"holds {shown}", 'write an object: {"key": value}')], name)
    return Source(name, _settle(raw, (), problems, name), problems)


def _unreadable(text: str, cause: Exception) -> Problem:
    """What stops the reader at a place that it does not name."""
    if isinstance(cause, RecursionError):
        return _too_deep()
    endless = (m[0] for m in _NUMBER.finditer(text) if math.isinf(float(m[0])))
    number = next(endless, "")
    if number:
        shown = number if len(number) <= 20 else number[:17] + "..."
        return error((), f"the number {shown} is too large for a number", "write a smaller one")
    return error((), f"a comment, text or block is not closed ({cause})", "close it")


def _too_deep() -> Problem:
    return error((), f"has blocks more than {DEEPEST} deep", "flatten it")


class _Pairs(list[tuple[str, Any]]):
    """An object as hjson reads it, with every key it has, twice if it stands twice."""


def _text(given: str) -> tuple[str, str]:
    path = FilePath(given)
    try:
        if path.is_file():
            _refuse_large(path)
            return path.name, _text_of(path)
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


def _text_of(path: FilePath) -> str:
    """The text of a file in UTF-8, or in UTF-16 as PowerShell's `>` writes it."""
    data = path.read_bytes()
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
    try:
        return data.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError as cause:
        message = f"is not text in UTF-8: byte {cause.start} is 0x{data[cause.start]:02x}"
        raise ConfigError([error((), message, "save it as UTF-8")], path.name) from cause


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
    if word.lstrip("-") in ENDLESS:
        message = f"{word} is no number of JSON"
        return error((), message, "write an ordinary number, or delete the key")
    if word in PYTHON_WORDS:
        return error((), f"{word} is Python, not JSON", f"write {PYTHON_WORDS[word]}")
    message = f"{word} has no quotes, and a file holds values, no variables"
    return error((), message, f'write "{word}", or the value you mean')


def _settle(data: Any, path: Path, problems: list[Problem], name: str = "config") -> Any:
    """A plain copy: dicts of dicts, duplicates reported, placeholders marked as such."""
    if len(path) > DEEPEST:
        raise ConfigError([_too_deep()], name)
    if isinstance(data, str):
        marked = data.startswith(MARK)
        return Placeholder(data.removeprefix(MARK)) if marked else _printable(data)
    if isinstance(data, (_Pairs, Mapping)):
        return _settle_object(data, path, problems, name)
    if isinstance(data, (list, tuple)):
        return [_settle(item, (*path, "[]"), problems, name) for item in data]
    return data.item() if getattr(data, "shape", None) == () else data  # a scalar of numpy or torch


def _settle_object(data: Any, path: Path, problems: list[Problem], name: str) -> dict[str, Any]:
    settled: dict[str, Any] = {}
    for given, value in data if isinstance(data, _Pairs) else data.items():
        key = _printable(str(given))
        here = (*path, key)
        if key in settled:
            message = "stands twice in this object, and readers disagree which one counts"
            kept = Edit(here, settled[key])
            problems.append(error(here, message, "keep one of the two", kept))
        else:
            settled[key] = _settle(value, here, problems, name)
    return settled


def _printable(text: str) -> str:
    """The text with a mark for each half of a character, which no screen or file can take."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
