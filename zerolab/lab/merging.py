"""Chapter 0: merging, a learner's notebook and a newer edition of the course, cell by cell.

Owns the rule. Three notebooks meet: *base*, the edition that the learner was given, *own*, what
became of it, and *new*, today's edition. A cell is known by its id, and it counts as the
learner's once its text differs from base:

    own is base      the new text                     only own differs   own
    new is own       own, with its outputs            both differ        own, the new text below it
    not in own       left out if it was deleted, put in at its place if it is new
    not in new       dropped if untouched, kept if the learner wrote in it
    in own only      a cell of the learner's: stays below the cell it stood below

The new text of a conflict stands in a marked Markdown cell, so that it never runs. Merging twice
changes nothing, and so a merge that was cut short can simply be repeated.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Cell = dict[str, Any]
TAG = "course-update"
NOTE = (
    "> **The course has a newer text** for the cell above. You changed that cell, so yours was "
    "kept; the newer text is only shown here. Delete this cell when you are done with it."
)


class NotMergeable(ValueError):  # noqa: N818 - a verdict on a file, which stays as it is
    """A file is no notebook, or one whose cells have no ids."""


@dataclass(slots=True)
class Merged:
    """A merged notebook, and what happened to its cells, as ids."""

    notebook: dict[str, Any]
    updated: list[str] = field(default_factory=list)
    inserted: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # the learner's text, or a cell of their own
    conflicts: list[str] = field(default_factory=list)  # kept, and the new text below it


def parse(data: bytes) -> dict[str, Any]:
    """Return a notebook whose cells can be told apart.

    Raises:
        NotMergeable: it is damaged, or from before cells had ids.
    """
    try:
        notebook = json.loads(data)
        ids = [cell["id"] for cell in notebook["cells"]]
        for cell in notebook["cells"]:
            _content(cell)
    except (ValueError, KeyError, TypeError) as error:
        raise NotMergeable(f"no notebook with cell ids: {error!r}") from error
    if len(set(ids)) < len(ids):
        raise NotMergeable("two cells have the same id")
    return notebook


def to_bytes(notebook: dict[str, Any]) -> bytes:
    """Write a notebook as JupyterLab does."""
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def merge(base: dict[str, Any], own: dict[str, Any], new: dict[str, Any]) -> Merged:
    """Merge a newer edition into the learner's notebook; none of the three is changed."""
    bases, owns, news = _by_id(base), _by_id(own), _by_id(new)
    merged = Merged({**own, "cells": []})
    below = _followers(bases, owns, news, merged)
    cells = list(below[""])
    for name in _order(list(bases), list(owns), list(news)):
        cells += _course_cell(bases.get(name), owns.get(name), news[name], merged)
        cells += below.get(name, [])
    for name in merged.conflicts:
        note = conflict_note(news[name])
        if note["id"] not in owns:  # else it was put there when a merge was cut short
            at = next(i for i, cell in enumerate(cells) if cell["id"] == name)
            cells.insert(at + 1, note)
    merged.notebook["cells"] = cells
    return merged


def _by_id(notebook: dict[str, Any]) -> dict[str, Cell]:
    return {cell["id"]: cell for cell in notebook["cells"]}


def _content(cell: Cell) -> tuple[str, str]:
    """Return what makes a cell the same: its kind and its text."""
    source = cell["source"]
    text = source if isinstance(source, str) else "".join(source)
    return cell["cell_type"], text.rstrip()


def _followers(
    bases: dict[str, Cell], owns: dict[str, Cell], news: dict[str, Cell], merged: Merged
) -> dict[str, list[Cell]]:
    """Return the cells that are the learner's alone, by the course's cell that they stand below."""
    below: dict[str, list[Cell]] = {"": []}
    above = ""
    for name, cell in owns.items():
        if name in news:
            above = name
        elif name in bases and _content(cell) == _content(bases[name]):
            merged.removed.append(name)
        else:
            below.setdefault(above, []).append(cell)
            merged.kept.append(name)
    return below


def _order(bases: list[str], owns: list[str], news: list[str]) -> list[str]:
    """Return the new edition's ids in order: its own, or the learner's if they moved cells."""
    shared = {*bases} & {*owns} & {*news}
    if [name for name in owns if name in shared] == [name for name in bases if name in shared]:
        return news
    order = [name for name in owns if name in news]
    for before, name in zip(["", *news], news, strict=False):
        if name not in order:
            order.insert(order.index(before) + 1 if before else 0, name)
    return order


def _course_cell(base: Cell | None, own: Cell | None, new: Cell, merged: Merged) -> Iterable[Cell]:
    """Return what becomes of one cell of the new edition: one cell, or none."""
    if own is None:
        if base is not None:
            return []  # the learner deleted it
        merged.inserted.append(new["id"])
        return [new]
    if base is not None and _content(own) == _content(base):
        return [_refreshed(base, own, new, merged)]
    if _content(own) != _content(new):
        merged.kept.append(new["id"])
        if base is None or _content(new) != _content(base):
            merged.conflicts.append(new["id"])
    return [own]


def _refreshed(base: Cell, own: Cell, new: Cell, merged: Merged) -> Cell:
    """Return an untouched cell in its new edition; outputs stay while the text is the same."""
    if _content(new) != _content(base):
        merged.updated.append(new["id"])
        return new
    if new["metadata"] == base["metadata"]:
        return own
    return {**own, "metadata": new["metadata"]}


def conflict_note(new: Cell) -> Cell:
    """Return the marked cell that shows the new text of a cell which the learner changed."""
    kind, text = _content(new)
    if kind != "markdown":
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
        text = f"{fence}python\n{text}\n{fence}"
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return {
        "cell_type": "markdown",
        "id": f"{new['id'][:48]}-new-{mark}",
        "metadata": {"tags": [TAG]},
        "source": f"{NOTE}\n\n{text}".splitlines(keepends=True),
    }
