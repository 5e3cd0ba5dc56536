"""Chapter 3: the engine map: which function of which module is called at which of five moments.

Owns the synced state of one picture: the functions as plain data, and the one that the reader
chose. The data are what `lab.engine_map(stage=1)` returns, gathered from a real step; the
learner's own pieces are lit. static/engine_map.js draws a table, which a saved notebook shows too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from zerolab.errors import UsageError

from . import picture, scripts
from .bars import mib

# Rows from below to above: what a stage stands on comes first.
MODULES = (
    "comm comm.ring flat bucket sharded_param units optim precision reducing ddp zero1 zero2 turns "
    "watching unit_sharding zero3 gathering"
).split()
# What a reader needs first; the rest is a button away. What is the learner's is always shown.
HEART = set("comm comm.ring flat bucket optim reducing ddp zero1 zero2 turns zero3".split())
HELPERS = set(
    "adopt after_model before_backward before_model begin_backward end_micro_step "
    "grad_dtype kind_of_mean outgoing owned owned_range receive_all".split()
)
KEYS = {"module", "name", "moment", "does", "yours", "calls", "moved"}
Piece = Mapping[str, Any]


class EngineMap(picture.Picture):
    """The functions of the engine by module and moment, the learner's own lit.

    Args:
        run: what `lab.engine_map(stage=...)` returned, or the result of `lab.train`, which is
            asked for it; None for an empty map.

    Raises:
        UsageError: it is neither.
    """

    _esm = scripts.script("panel", "engine_map", entry="renderEngine")
    _css = scripts.style("panel", "engine_map")

    moments = traitlets.List().tag(sync=True)
    modules = traitlets.List().tag(sync=True)
    pieces = traitlets.List().tag(sync=True)  # one dict a function and moment, see `piece_state`
    helpers = traitlets.Bool(False).tag(sync=True)  # whether helpers are shown too
    selected = traitlets.Int(-1).tag(sync=True)  # position in `pieces`, -1 for none

    def __init__(self, run: Any = None) -> None:
        facts = facts_of(run)
        pieces = in_order(facts["pieces"], facts["moments"])
        super().__init__(
            moments=list(facts["moments"]),
            modules=list(dict.fromkeys(piece["module"] for piece in pieces)),
            pieces=[piece_state(piece) for piece in pieces],
            finding=finding(facts["stage"], pieces),
        )

    def to_html(self) -> str:
        """Return the map as a table; what is the learner's says so."""
        rows = [
            [module, *(self._cell(module, moment) for moment in self.moments)]
            for module in dict.fromkeys(p["module"] for p in self.pieces if not p["helper"])
        ]
        table = picture.table(["", *self.moments], rows) if rows else ""
        return picture.paragraph(self.finding) + table

    def _cell(self, module: str, moment: str) -> str:
        return ", ".join(
            f"{piece['short']} (yours)" if piece["yours"] else piece["short"]
            for piece in self.pieces
            if (piece["module"], piece["moment"]) == (module, moment) and not piece["helper"]
        )


def facts_of(run: Any) -> Mapping[str, Any]:
    """Return the data of a map, whatever a notebook has at hand.

    Raises:
        UsageError: there are none.
    """
    ask = getattr(run, "engine_map", None)
    facts: Any = ask() if callable(ask) else run
    if facts is None:
        return {"stage": None, "moments": [], "pieces": []}
    known = isinstance(facts, Mapping) and {"stage", "moments", "pieces"} <= set(facts)
    if not known or any(set(piece) < KEYS for piece in facts["pieces"]):
        raise UsageError(
            f"{type(run).__name__} is no map of the engine; give lab.engine_map(stage=1) or what "
            "lab.train returned"
        )
    return facts


def in_order(pieces: Sequence[Piece], moments: Sequence[str]) -> list[Piece]:
    """Return the pieces by module, those that stand on others last, then by moment.

    What makes an object is left out: it says nothing about a moment.
    """

    def place(piece: Piece) -> tuple[int, str, int]:
        module = piece["module"]
        row = MODULES.index(module) if module in MODULES else len(MODULES)
        return row, module, moments.index(piece["moment"])

    return sorted((p for p in pieces if not p["name"].endswith("__init__")), key=place)


def piece_state(piece: Piece) -> dict[str, Any]:
    """Return a piece as the script wants it."""
    return {
        "module": piece["module"],
        "moment": piece["moment"],
        "short": piece["name"].rpartition(".")[2],
        "yours": bool(piece["yours"]),
        "helper": is_helper(piece),
        "says": says(piece),
    }


def is_helper(piece: Piece) -> bool:
    """Tell whether a piece may stay out of the way: the package's own, and of small interest."""
    known = piece["module"] in HEART and piece["name"].rpartition(".")[2] not in HELPERS
    return not piece["yours"] and not known


def says(piece: Piece) -> str:
    """Return all about a piece in a few sentences."""
    yours = ", yours" if piece["yours"] else ""
    times = "once" if piece["calls"] == 1 else f"{piece['calls']} times"
    moved = f", moving {mib(piece['moved'])}" if piece["moved"] else ""
    does = f" {piece['does']}" if piece["does"] else ""
    called = f"Called {times} at {piece['moment']}{moved}."
    return f"{piece['module']}.{piece['name']}{yours}.{does} {called}"


def finding(stage: int | None, pieces: Sequence[Piece]) -> str:
    """Return in one sentence how much of the engine is the learner's."""
    if stage is None:
        return "No step has been traced; give lab.engine_map(stage=1)."
    names = dict.fromkeys((piece["module"], piece["name"]) for piece in pieces)
    yours = dict.fromkeys(
        f"{piece['module']}.{piece['name']}" for piece in pieces if piece["yours"]
    )
    text = f"Stage {stage}: a step calls {len(names)} functions of the engine, "
    if not yours:
        return f"{text}none of them yours so far."
    listed = ", ".join(list(yours)[:6]) + (f" and {len(yours) - 6} more" if len(yours) > 6 else "")
    return f"{text}{len(yours)} of them yours: {listed}."
