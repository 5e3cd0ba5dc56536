"""Chapter 6: the checks of its parts: buckets that come and go, parameters' homes, who is next.

Owns lists written out by hand. Functions that run on ranks are `_on_rank_...`; they find the answer
where the engine looks it up, and hand back facts, which are judged here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import bucket as buckets_
from ... import comm, turns
from ...errors import UsageError
from .. import evidence
from ..outcome import Wrong
from . import c06_judging as judging
from . import unit_runs
from .unit_runs import Plan

# 6.2 unshard_bucket


def check_unshard_bucket(answer: judging.Answer) -> Iterator[str]:
    """One unit by itself on three ranks, then stage 3."""
    for rank, facts in enumerate(evidence.run(_on_rank_unshard, judging.RANKS)):
        judging.judge(facts, "unshard_bucket(blocks.0)", rank)
    yield "the bucket's own memory is back: 21 elements, 7 from each of 3 ranks"
    yield "the gather was started, under the bucket's name, and not waited for"
    yield judging.trains()


def _on_rank_unshard() -> judging.Facts:
    bench = unit_runs.bench()
    bucket = bench.units[1].buckets[0]
    whole = bucket.shard.new_empty(bucket.padded_numel)
    comm.all_gather(whole, bucket.shard, purpose="control")
    before, first = bench.gathered(), len(comm.records().collectives)
    try:
        work = turns.unshard_bucket(bucket)
        ended = any(event.ended > 0 for event in comm.records().collectives[first:])
        if isinstance(work, comm.Work):
            work.wait()
    except judging.NOT_A_VERDICT:
        raise
    except (RuntimeError, UsageError) as error:
        what = f"The gather was refused: {judging.first_line(error)}"
        return {"error": ("a gather", "an error", what)}
    events = comm.records().collectives[first:]
    calls = [(event.op, event.elements) for event in events]
    shown = [view.data_ptr() == bucket.flat_param.data_ptr() for view in bucket.views[:1]]
    return {
        "work": (
            "a Work",
            "a Work" if isinstance(work, comm.Work) else type(work).__name__,
            "It must return the work of the gather, for whoever will wait.",
        ),
        "same": (
            ["views in flat_param"],
            ["views in flat_param" if same else "views elsewhere" for same in shown],
            "`flat_param` is another tensor now: the views in it, which the parameters will be, "
            "and what autograd saved look at the old memory.",
        ),
        "bytes": (
            4 * bucket.padded_numel,
            bench.gathered() - before,
            "The bytes of full parameters on this GPU have not grown by the bucket's.",
        ),
        "calls": (
            [("all_gather", bucket.padded_numel)],
            calls,
            "The collectives (operation, elements) are not these.",
        ),
        "purpose": (
            ["data"],
            [event.purpose for event in events],
            "The gather is counted as control traffic, beside flags and norms; parameters are "
            "data.",
        ),
        "label": (
            [bucket.name],
            [event.label for event in events],
            "The gather does not carry the bucket's name as its label.",
        ),
        "started": (
            "on its way",
            "on its way" if events[:1] and events[0].asynchronous and not ended else "over",
            "The gather is over when the function returns; it should only have been started.",
        ),
        "values": (
            True,
            torch.equal(whole, bucket.flat_param),
            "The bucket does not hold the shards of all ranks end to end.",
        ),
    }


# 6.3 reshard_bucket


def check_reshard_bucket(answer: judging.Answer) -> Iterator[str]:
    """One unit by itself, between its forward and its backward; then stage 3."""
    for rank, facts in enumerate(evidence.run(_on_rank_reshard, judging.RANKS)):
        judging.judge(facts, "reshard_bucket(blocks.0)", rank)
    yield "the memory is gone although autograd still holds the tensor"
    yield "shape kept, one NaN behind it: reading it spreads NaN, and nothing crashes"
    yield "filled again, the saved tensor gives backward the right numbers"
    yield judging.trains()


ANOTHER_TENSOR = (
    "`flat_param` is another tensor now. The old one lives on in what autograd saved and in the "
    "parameters' views, and the next gather fills the new one."
)


def _same_storage(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == two.untyped_storage()._cdata


def _on_rank_reshard() -> judging.Facts:
    bench = unit_runs.bench()
    bucket = bench.units[1].buckets[0]
    if not _same_storage(bucket.flat_param, bucket.views[0]):  # it has been resharded once
        return {"same": (True, False, ANOTHER_TENSOR)}
    bench.stage.unshard(bench.units[1])
    weight = next(slot.param for slot in bucket.slots if slot.name.endswith("weight"))
    buffer, held = bucket.flat_param, bench.gathered()
    inputs = torch.ones(1, 4, device=evidence.home(), requires_grad=True)
    expected = weight.detach().sum(0).tolist()
    out = F.linear(inputs, weight)
    turns.reshard_bucket(bucket)
    params = [slot.param for slot in bucket.slots]
    behind = min(param.untyped_storage().nbytes() for param in params)
    facts: judging.Facts = {
        "same": (True, bucket.flat_param is buffer, ANOTHER_TENSOR),
        "bytes": (
            held - 4 * bucket.padded_numel,
            bench.gathered(),
            "The bytes of full parameters on this GPU have not shrunk by the bucket's.",
        ),
        "shape": (
            [tuple(slot.shape) for slot in bucket.slots],
            [tuple(param.shape) for param in params],
            "A parameter has lost its shape: nobody can count or print it any more.",
        ),
        "behind": (
            "a number",
            "a number" if behind > 0 else "0 bytes",
            "A parameter has no memory behind it: `param.norm()` would read there, and the "
            "process would end.",
        ),
    }
    if behind > 0:
        most = max(param.untyped_storage().nbytes() for param in params)
        facts["one"] = (
            "one number",
            "one number" if most == 4 else f"{most} bytes",
            f"A sharded parameter has {most} bytes behind it: its whole size once more, and was to "
            "hold one NaN, expanded to its shape.",
        )
        facts["nan"] = (
            "NaN",
            "NaN" if all(bool(p.detach().isnan().all()) for p in params) else "numbers",
            "A sharded parameter reads as numbers: a mistake would go unnoticed.",
        )
    if any(expected_ != observed for expected_, observed, _ in facts.values()):
        return facts
    turns.unshard_bucket(bucket).wait()
    (grad,) = torch.autograd.grad(out.sum(), inputs)
    facts["grad"] = (
        [round(number, 4) for number in expected],
        [round(number, 4) for number in grad[0].tolist()],
        "Filled again, the tensor that autograd saved gives another gradient.",
    )
    return facts


# 6.4 assign_params


def check_assign_params(answer: judging.Answer) -> Iterator[str]:
    """Lists written out by hand; then a weight that two blocks share, trained at stage 3."""
    for what, make, blocks, expected in _models():
        _check_units(answer, make(), blocks, expected)
        yield f"{what}: the units that were written out by hand"
    plan = Plan(3, 2, "tied")
    ranks = judging.trained(plan, "assign_params(...)")
    yield unit_runs.same_weights(plan, ranks, "assign_params(...)")
    once = sum(unit_runs.padded(numel, 2) for numel in (25, 5, 30, 5))
    expected_moved = {"all_gather": 2 * once, "reduce_scatter": once}
    unit_runs.same_traffic(plan, ranks, expected_moved, "assign_params(...)")
    yield "the shared weight is gathered with the root: twice a step, and reduced once"


Expected = dict[str, list[str]]


def _models() -> list[tuple[str, Callable[[], nn.Module], list[str], Expected]]:
    stack: Expected = {"root": ["first.weight", "first.bias"]}
    stack |= {name: [f"{name}.weight", f"{name}.bias"] for name in unit_runs.BLOCKS}
    tied: Expected = {"root": ["blocks.0.weight"], "blocks.0": ["blocks.0.bias"]}
    tied |= {"blocks.1": ["blocks.1.weight", "blocks.1.bias"], "blocks.2": ["blocks.2.bias"]}
    pair: Expected = {"root": [], "0": ["0.0.weight", "0.0.bias"], "1": ["1.weight"]}
    twins: Expected = {"root": ["0.weight"], "0": [], "1": [], "2": ["2.weight"]}
    return [
        ("five blocks and the rest", unit_runs.Stack, list(unit_runs.BLOCKS), stack),
        (
            "no blocks",
            unit_runs.Stack,
            [],
            {"root": [n for names in stack.values() for n in names]},
        ),
        ("a weight in two blocks", unit_runs.Tied, ["blocks.0", "blocks.1", "blocks.2"], tied),
        ("a tie inside a block", _pair, ["0", "1"], pair),
        ("two blocks that share all they have", _twins, ["0", "1", "2"], twins),
    ]


def _pair() -> nn.Module:
    """Return two blocks; inside the first one two layers share both parameters."""
    first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first[1].weight, first[1].bias = first[0].weight, first[0].bias
    return nn.Sequential(first, nn.Linear(3, 3, bias=False))


def _twins() -> nn.Module:
    """Return three blocks; the first two share their only parameter."""
    blocks = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    blocks[1].weight = blocks[0].weight
    return nn.Sequential(*blocks)


def _check_units(
    answer: judging.Answer, model: nn.Module, blocks: list[str], expected: Expected
) -> None:
    named = [(path, model.get_submodule(path)) for path in blocks]
    value = answer(model, named)
    call = f"assign_params({type(model).__name__.lower()}, {blocks})"
    try:
        found = [(name, [own for own, _ in params]) for name, _, params in value]
    except (TypeError, ValueError):
        raise Wrong(
            "It must return a list of (name, module, [(name, parameter), ...]).",
            expected=expected,
            observed=value,
            call=call,
        ) from None
    everything = [name for _, names in found for name in names]
    for name, _ in model.named_parameters():
        if everything.count(name) != 1:
            raise Wrong(
                f"{name} is in {everything.count(name)} units; every parameter is in one.",
                expected=expected,
                observed=dict(found),
                call=call,
            )
    if [name for name, _ in found] != list(expected):
        raise Wrong(
            "These are not the units in the order in which their forwards begin.",
            expected=list(expected),
            observed=[name for name, _ in found],
            call=call,
        )
    for name, names in found:
        if names != expected[name]:
            raise Wrong(
                f"Unit {name} holds {', '.join(names) or 'nothing'}.",
                expected=", ".join(expected[name]) or "nothing",
                observed=", ".join(names) or "nothing",
                call=call,
            )


# 6.6 units_ahead


@dataclass
class _Length:
    """All that `unit_numel` looks at, and what it leaves out."""

    padded_numel: int
    persistent: bool = False

    @property
    def numel(self) -> int:
        """Three of the elements are padding."""
        return self.padded_numel - 3


CASES: tuple[tuple[str, str, int | None, str], ...] = (
    # whose turn, who follows whom, limit, who is gathered ahead
    ("a", "abcde", None, "b"),
    ("d", "abcde", None, "e"),
    ("e", "abcde", None, ""),
    ("a", "a", None, ""),
    ("a", "abcde", 25, "bc"),
    ("a", "abcde", 30, "bcd"),
    ("a", "abcde", 9, ""),
    ("a", "abcde", 0, ""),
    ("b", "abcde", 1000, "cde"),
    ("a", "aXbc", 25, ""),
    ("a", "abXc", 45, "b"),
    ("a", "abca", 1000, "bc"),
    ("a", "abcb", 1000, "bc"),
    ("a", "aa", None, ""),
)


def _lengths(numel: int) -> Any:
    """Return a bucket of so many elements, and one that is always there."""
    return [_Length(numel), _Length(7, persistent=True)]


def check_units_ahead(answer: judging.Answer) -> Iterator[str]:
    """Rows of units; then stage 3, which gathers as far ahead as it is told."""
    units = {
        name: buckets_.Unit(name, nn.Identity(), _lengths(10 if name.islower() else 40))
        for name in "abcdeX"
    }
    for name, row, limit, expected in CASES:
        follower = {units[one]: units[two] for one, two in pairwise(row)}
        value = answer(units[name], follower, limit)
        _check_ahead(value, name, row, limit, expected)
    yield f"{len(CASES)} rows of units, with and without a limit, circles among them"
    for limit, live in ((0, 1), (21, 2), (62, 3)):
        plan = Plan(3, judging.RANKS, prefetch_numel=limit)
        shown = judging.trained(plan, "units_ahead(...)")
        judging.check_live(plan, shown, live, "units_ahead(...)")
    yield unit_runs.same_weights(plan, shown, "units_ahead(...)")
    yield "stage 3 with limits of 0, 21 and 62 elements: 1, 2 and 3 blocks whole at a time"


def _check_ahead(value: Any, name: str, row: str, limit: int | None, expected: str) -> None:
    arrows = " -> ".join(row)
    call = f"units_ahead({name}, {arrows}, {limit})"
    if not isinstance(value, list) or not all(isinstance(one, buckets_.Unit) for one in value):
        raise Wrong(
            "It must return a list of units.", expected=list(expected), observed=value, call=call
        )
    found = "".join(unit.name for unit in value)
    if found != expected:
        rule = "no limit" if limit is None else f"a limit of {limit}"
        raise Wrong(
            f"{arrows}, `unit_numel` 10 each and X 40, {rule}: while {name} computes, these are "
            f"gathered: {', '.join(found) or 'none'}.",
            expected=", ".join(expected) or "none",
            observed=", ".join(found) or "none",
            call=call,
        )
