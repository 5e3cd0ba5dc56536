"""Chapter 0: rebuild, what an engine says that was built before the learner's code changed.

Owns, for every living engine that saw a change, what it was built on. An engine lays out its
shards and makes its stage when it is built; a function that is plugged in later meets the old
layout. Such an engine asks to be built anew, once, when it is next used. What was changed and
changed back is no change.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from .. import comm, homes
from ..engine import Engine
from . import cards

Plugs = Mapping[str, Hashable]  # target -> what identifies the code that is plugged in for it

_watched: "WeakKeyDictionary[Engine, None]" = WeakKeyDictionary()


def watch(built_on: Plugs, now: Callable[[], Plugs]) -> None:
    """Let the engines that live now speak up, should they be used on other code than this.

    Args:
        built_on: what was plugged in until now.
        now: returns what is plugged in when an engine is used.
    """
    for engine in homes.engines():
        if engine not in _watched:
            _watched[engine] = None
            _Question(engine, dict(built_on), now)


class _Question:
    """A hook before an engine's forward, there until it has spoken."""

    def __init__(self, engine: Engine, built_on: Plugs, now: Callable[[], Plugs]) -> None:
        self.built_on, self.now = built_on, now
        self.handle = engine.register_forward_pre_hook(self)

    def __call__(self, engine: Any, args: Any) -> None:
        """Compare, and speak up on rank 0."""
        changed = difference(self.built_on, self.now())
        if changed and comm.get_rank() == 0:
            cards.show(card(changed))
        if changed:
            self.handle.remove()


def difference(before: Plugs, after: Plugs) -> list[str]:
    """Return the names of what is plugged in differently."""
    targets = sorted({*before, *after})
    return [t.partition(":")[2] for t in targets if before.get(t) != after.get(t)]


def card(changed: list[str]) -> cards.Card:
    """Return what the engine says."""
    return cards.Card(
        "--jp-warn-color1",
        f"This engine was built before {', '.join(changed)} changed",
        "What it laid out then is still as it was. Build it anew: run the cell with "
        "`zerolab.initialize` again.",
    )
