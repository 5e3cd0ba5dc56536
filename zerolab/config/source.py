"""Chapter 12: where a configuration comes from: a dict, a file, or base64 of JSON.

Data: a `Source`: its name for messages, the dict, and what was wrong with the text itself.
"""

import base64
import binascii
import copy
import json
import os
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from .problems import ConfigError, Problem, error


@dataclass
class Source:
    """A configuration as it was given: the dict, and problems of the text."""

    name: str
    raw: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)


def open_source(source: Any) -> Source:
    """Read a dict, the path of a JSON file, or base64 of JSON.

    Raises:
        ConfigError: it is none of them, or the file cannot be read.
    """
    if isinstance(source, dict):
        return Source("config", copy.deepcopy(source))
    if isinstance(source, (str, os.PathLike)):
        name, text = _text(source)
        raw = json.loads(text)
        return Source(name, raw)
    raise ConfigError([error((), f"{source!r} is no configuration", "give a dict or a path")])


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    path = FilePath(source)
    try:
        if path.is_file():
            return path.name, path.read_text(encoding="utf-8")
        return "config", base64.b64decode(os.fspath(source), validate=True).decode()
    except (OSError, ValueError, binascii.Error) as cause:
        message = f"{os.fspath(source)!r} is neither a readable file nor base64 of JSON"
        raise ConfigError([error((), message, "give a dict or the path of a file")]) from cause
