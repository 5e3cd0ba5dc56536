"""Chapter 6: the check of the first moment: one unit's states, step by step.

Owns nothing. A unit of two buckets is asked after every call, then stage 3 trains on the class.
"""

from collections.abc import Iterator

import torch

from ... import comm, flat, turns
from ...records import CollectiveEvent
from .. import evidence
from . import c06_judging as judging
from . import unit_runs
from .unit_runs import Plan

# 6.5 Turn


def check_turn(answer: judging.Answer) -> Iterator[str]:
    """One unit's states step by step; then stage 3, whose units all use the class."""
    for rank, facts in enumerate(evidence.run(_on_rank_turn, judging.RANKS)):
        judging.judge(facts, "Turn: fetch, unshard, reshard", rank)
    yield "sharded, in flight, unsharded, sharded: one gather a time round"
    yield "a gather that nobody used is waited for, then freed"
    yield "the next time round brings the newest shards"
    for rank, facts in enumerate(evidence.run(_on_rank_bare, 2)):
        judging.judge(facts, "Turn of a unit that has nothing to gather", rank)
    yield "a unit whose buckets are all persistent goes through the same states"
    yield judging.trains("Turn")
    plan = Plan(3, 2, "tied", accum_steps=2)
    yield unit_runs.same_weights(plan, judging.trained(plan, "Turn"), "Turn")


class _Round:
    """One unit of two buckets on the calling rank, asked after every call of its `Turn`."""

    def __init__(self) -> None:
        self.bench = unit_runs.bench(bucket_numel=16)  # a weight of 16, a bias of 4
        unit = self.bench.units[2]
        self.turn, self.buckets = self.bench.stage.turns[unit], unit.buckets
        self.nbytes = 4 * sum(bucket.padded_numel for bucket in unit.buckets)
        self.facts: judging.Facts = {}

    def after(self, what: str, state: turns.ShardState, times: int, whole: bool) -> None:
        """Note what must be and what is: the state, gathers so far, and bytes."""
        found = getattr(self.turn.state, "value", self.turn.state)
        gathers = len(self.buckets) * times
        expected = f"{state.value}, {gathers} gathers so far, {whole * self.nbytes} bytes"
        observed = f"{found}, {len(self.gathers())} gathers so far, {self.bench.gathered()} bytes"
        message = f"After {what} the unit of {len(self.buckets)} buckets is {observed} whole."
        self.facts[what] = (expected, observed, message)

    def gathers(self) -> list[CollectiveEvent]:
        """Return all gathers so far."""
        return [e for e in comm.records().collectives if e.op == "all_gather"]

    def started(self, what: str) -> None:
        """Note whether gathers have been waited for already."""
        ended = [event.label for event in self.gathers() if event.ended > 0]
        self.facts[f"{what}, started"] = (
            "all on their way",
            f"over: {', '.join(ended)}" if ended else "all on their way",
            f"After {what} the gathers of {', '.join(ended)} are over: whoever fetches ahead wants "
            "to compute meanwhile, and waited.",
        )

    def values(self, what: str) -> None:
        """Note whether the gather has ended, and the parameters are views of the buffer."""
        self.waited(what)
        places = [pair for b in self.buckets for pair in zip(b.slots, b.views, strict=True)]
        lost = [slot.name for slot, view in places if slot.param.data_ptr() != view.data_ptr()]
        self.facts[f"{what}, views"] = (
            "views of the buckets",
            f"no views: {', '.join(lost)}" if lost else "views of the buckets",
            f"After {what} parameters are no views of their bucket: {', '.join(lost)} still hold "
            "NaN.",
        )

    def waited(self, what: str) -> None:
        """Note whether all gathers have ended, and none is kept for later."""
        flying = [event.label for event in self.gathers() if not event.ended > 0]
        self.facts[f"{what}, waited"] = (
            "all waited for",
            f"on their way: {', '.join(flying)}" if flying else "all waited for",
            f"After {what} nobody has waited for the gathers of {', '.join(flying)}.",
        )
        self.facts[f"{what}, works"] = (
            0,
            len(self.turn.works),
            f"After {what} `works` still lists gathers that have ended.",
        )


def _on_rank_turn() -> judging.Facts:
    one = _Round()
    turn, sharded = one.turn, turns.ShardState.SHARDED
    flying, whole = turns.ShardState.IN_FLIGHT, turns.ShardState.UNSHARDED
    turn.fetch()
    one.after("fetch", flying, 1, True)
    one.started("fetch")
    turn.fetch()
    one.after("a second fetch", flying, 1, True)
    turn.unshard()
    one.after("unshard", whole, 1, True)
    one.values("unshard")
    turn.unshard()
    one.after("a second unshard", whole, 1, True)
    turn.reshard()
    one.after("reshard", sharded, 1, False)
    turn.fetch()
    turn.reshard()
    one.after("fetch and reshard", sharded, 2, False)
    one.waited("fetch and reshard")
    for bucket in one.buckets:
        bucket.shard.add_(1)
    turn.unshard()
    one.after("unshard of new shards", whole, 3, True)
    if any(expected != observed for expected, observed, _ in one.facts.values()):
        return one.facts
    for bucket in one.buckets:
        start, stop = flat.shard_bounds(bucket.numel, judging.RANKS, comm.get_rank())
        one.facts[f"new {bucket.name}"] = (
            True,
            torch.equal(bucket.flat_param[start:stop], bucket.shard),
            f"After the shards had changed the parameters of {bucket.name} have their old values.",
        )
    return one.facts


def _on_rank_bare() -> judging.Facts:
    """Go round with a unit that has no sharded bucket."""
    bench = unit_runs.bench("tied", persistent=6)
    turn = next(bench.stage.turns[unit] for unit in bench.units if unit.name == "blocks.0")
    facts: judging.Facts = {}
    for call, state in (("fetch", "in flight"), ("unshard", "unsharded"), ("reshard", "sharded")):
        getattr(turn, call)()
        found = getattr(turn.state, "value", turn.state)
        message = f"A unit that has nothing to gather is {found} after {call}, and not {state}."
        facts[call] = (state, found, message)
    return facts
