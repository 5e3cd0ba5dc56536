"""Chapter 1: a schema for tables of TOML, whose errors name the place and the remedy.

Owns nothing. A schema maps each key to the type its value must have; a key that ends in "?" may
be left out. An unknown key is told with the one that was probably meant.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError

Schema = Mapping[str, type]
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
AS_TOML = {str: "a string", list: "a list", float: "a number", bool: "true", int: "a whole number"}


class Place:
    """Where in a bank something is wrong: file, question, table inside it."""

    def __init__(self, file: str, question: str = "", table: str = "") -> None:
        self.file, self.question, self.table = file, question, table

    def wrong(self, what: str) -> UsageError:
        """Return the error, in one line."""
        parts = [self.file, f"question {self.question}" if self.question else "", self.table]
        return UsageError(f"{', '.join(filter(None, parts))}: {what}")

    def at(self, table: str) -> "Place":
        """Return a place inside this question."""
        return Place(self.file, self.question, table)


def one_of(entry: Mapping[str, Any], key: str, known: Sequence[str], place: Place) -> str:
    """Return the value of a key that has few possible values."""
    if key not in entry:
        raise place.wrong(f"lacks the key {key!r}; add it")
    if entry[key] not in known:
        raise place.wrong(f"{key} {entry[key]!r} is unknown{_suggest(str(entry[key]), known)}")
    return entry[key]


def check_keys(table: Any, schema: Schema, place: Place) -> None:
    """Refuse unknown keys, missing keys, values of another type and empty ones."""
    if not isinstance(table, dict):
        raise place.wrong(f"is {table!r}; write a table with the keys {', '.join(schema)}")
    types = {key.rstrip("?"): kind for key, kind in schema.items()}
    for key, value in table.items():
        if key not in types:
            raise place.wrong(f"unknown key {key!r}{_suggest(key, list(types))}")
        wanted = types[key]
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise place.wrong(f"{key!r} is {value!r}; write {AS_TOML[wanted]}")
        if value in ("", []):
            raise place.wrong(f"{key!r} is empty; fill it in")
    missing = [key for key in schema if key not in table and not key.endswith("?")]
    if missing:
        raise place.wrong(f"lacks the key {missing[0]!r}; add it")
    slug = table.get("misconception", "none")
    if not SLUG.fullmatch(slug):
        raise place.wrong(f"misconception {slug!r} is no name; write it like 'counts-from-one'")


def _suggest(typed: str, known: Sequence[str]) -> str:
    """Say what was probably meant, or what there is."""
    near = difflib.get_close_matches(typed, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
