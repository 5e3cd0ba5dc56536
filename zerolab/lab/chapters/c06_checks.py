"""Chapter 6: the checks of 06_parameter_all_gather.

Owns no state. References are torch in one process, lists written out by hand and what the virtual
GPU counts. Functions that run on ranks are `_on_rank_...`; they find the answer where the engine
looks it up, and hand back facts, which are judged here.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import bucket as buckets_
from ... import comm, device, flat, turns
from ...errors import UsageError
from ...records import CollectiveEvent
from ...two_layers import parameter_sharding
from .. import evidence
from ..outcome import Wrong
from . import unit_runs
from .unit_runs import Plan, Shown

Answer = Callable[..., Any]
RANKS = 3
NOT_A_VERDICT = (NotImplementedError, RecursionError)  # which are RuntimeErrors

# 6.1 train_sharded_params

WIDTH, DEPTH, WIDE_RANKS, STEPS = 24, 16, 4, 2
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer
SLICES = DEPTH * LAYER // WIDE_RANKS  # bytes of this rank's slices
DATA = 4096  # bytes for batches, activations and what Python holds on to


@dataclass(frozen=True)
class Blank:
    """What one rank showed."""

    weights: torch.Tensor
    at_rest: int  # bytes held when the optimizer was made, -1 if it never was
    busy: int  # the most bytes held from then until the last optimizer step
    moved: dict[str, int]


def check_train_sharded_params(answer: Answer) -> Iterator[str]:
    """Weights of odd layers, then bytes and traffic of sixteen equal ones."""
    for world_size in (RANKS, 1):
        _check_blank_weights(world_size)
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        yield f"{ranks}: after 3 steps the weights of plain torch"
    shown = evidence.run(_on_rank_blank, WIDE_RANKS, WIDTH, DEPTH, STEPS)
    for rank, one in enumerate(shown):
        _check_blank_bytes(rank, one)
    yield f"at rest {SLICES:,} bytes of slices, and never two layers whole"
    numel = DEPTH * LAYER // 4
    expected = {"all_gather": (2 * STEPS + 1) * numel, "reduce_scatter": STEPS * numel}
    for rank, one in enumerate(shown):
        if one.moved != expected:
            raise Wrong(
                f"{STEPS} steps of {numel:,} parameters move {unit_runs.words(one.moved)}: each "
                "layer is gathered for forward and for backward and reduced once, and gathered "
                "once more at the end.",
                expected=unit_runs.words(expected),
                observed=unit_runs.words(one.moved),
                rank=rank,
                call="train_sharded_params(...)",
            )
    yield "elements moved: 3 a parameter and step, and 1 for the whole model at the end"


def _layers(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(3)
    if depth == 2:  # of odd sizes
        return nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 5))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def _data(rank: int, step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    luck = torch.Generator().manual_seed(77 * step + rank)
    return torch.randn(2, width, generator=luck), torch.randn(2, width, generator=luck)


def _check_blank_weights(world_size: int) -> None:
    model = _layers(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        pairs = [_data(rank, step, 5) for rank in range(world_size)]
        optimizer.zero_grad()
        torch.stack([F.mse_loss(model(x), y) for x, y in pairs]).mean().backward()
        optimizer.step()
    reference = evidence.weights_of(model)
    for rank, one in enumerate(evidence.run(_on_rank_blank, world_size, 5, 2, 3)):
        if one.at_rest < 0:
            raise Wrong(
                "`make_optimizer` was never called: nobody updates the parameters.",
                expected="an optimizer of this rank's slices",
                observed="none",
                rank=rank,
                call="train_sharded_params(...)",
            )
        apart = (one.weights - reference).abs().max().item()
        if not apart <= unit_runs.TOLERANCE:
            raise Wrong(
                f"Two layers on {world_size} ranks: after 3 steps the weights are {apart:.2g} off "
                "those of one process that saw the batches of all ranks.",
                expected=f"at most {unit_runs.TOLERANCE:g}",
                observed=f"{apart:.3g}",
                rank=rank,
                call="train_sharded_params(...)",
            )


def _check_blank_bytes(rank: int, shown: Blank) -> None:
    at_rest = SLICES + LAYER + LAYER // 2
    if shown.at_rest > at_rest:
        raise Wrong(
            f"When the optimizer is made a rank holds {shown.at_rest:,} bytes, where its slices "
            f"of {DEPTH} layers are {SLICES:,} and one layer is {LAYER:,}: somebody still holds "
            "whole layers. A slice that is a view holds all that it was cut from.",
            expected=f"at most {at_rest:,}",
            observed=f"{shown.at_rest:,}",
            rank=rank,
            call="train_sharded_params(...)",
        )
    allowed = 2 * SLICES + 5 * LAYER + DATA
    if shown.busy > allowed:
        raise Wrong(
            f"While it trains a rank holds up to {shown.busy:,} bytes. Its slices with their "
            f"gradients are {2 * SLICES:,}, and one layer with its gradients, laid out and "
            f"padded, a few times {LAYER:,}: so more than one layer was whole.",
            expected=f"at most {allowed:,}",
            observed=f"{shown.busy:,}",
            rank=rank,
            call="train_sharded_params(...)",
        )


def _on_rank_blank(width: int, depth: int, steps: int) -> Blank:
    gpu, model = device.current(), _layers(width, depth).to(evidence.home())
    assert gpu is not None
    whole = sum(param.numel() * 4 for param in model.parameters())
    pairs = [_data(comm.get_rank(), step, width) for step in range(steps)]
    batches = [(x.to(evidence.home()), y.to(evidence.home())) for x, y in pairs]
    before = gpu.allocated_bytes - whole
    held: list[int] = []

    class Watched(torch.optim.SGD):
        """An optimizer that looks at the memory when it steps."""

        def step(self, closure: Any = None) -> Any:
            held.append(gpu.peak_bytes - before)
            return super().step(closure)

    def make_optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        held.append(gpu.allocated_bytes - before)
        gpu.reset_peak()
        return Watched(params, lr=0.1, momentum=0.9 if depth == 2 else 0.0)

    parameter_sharding.train_sharded_params(model, batches, make_optimizer)
    moved = unit_runs.moved(comm.records(), 0)
    return Blank(evidence.weights_of(model), held[0] if held else -1, max(held, default=0), moved)


# 6.2 unshard_bucket


def check_unshard_bucket(answer: Answer) -> Iterator[str]:
    """One unit by itself on three ranks, then stage 3."""
    for rank, facts in enumerate(evidence.run(_on_rank_unshard, RANKS)):
        _judge(facts, "unshard_bucket(blocks.0)", rank)
    yield "the bucket's own memory is back: 21 elements, 7 from each of 3 ranks"
    yield "the gather was started, under the bucket's name, and not waited for"
    yield _trains()


Facts = dict[str, tuple[Any, Any, str]]  # name -> (expected, observed, what is wrong)


def _judge(facts: Facts, call: str, rank: int) -> None:
    """Raise for the first fact that is not as it must be."""
    for expected, observed, message in facts.values():
        if expected != observed:
            raise Wrong(message, expected=expected, observed=observed, rank=rank, call=call)


def _on_rank_unshard() -> Facts:
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
    except NOT_A_VERDICT:
        raise
    except (RuntimeError, UsageError) as error:
        what = f"The gather was refused: {str(error).splitlines()[0]}"
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


def _trains(call: str = "stage 3") -> str:
    """Train at stage 3 and compare with torch."""
    plan = Plan(3, RANKS)
    return unit_runs.same_weights(plan, trained(plan, call), call)


def trained(plan: Plan, call: str) -> list[Shown]:
    """Train; an error of the run is a verdict on the answer."""
    return _verdict(unit_runs.describe(plan), call, lambda: unit_runs.run(plan))


def _verdict(what: str, call: str, run: Callable[[], Any]) -> Any:
    """Return what a run returns; an error of it is a verdict on the answer."""
    try:
        with warnings.catch_warnings():  # torch tells of a second error, in the hook after forward
            warnings.filterwarnings("ignore", "module forward hook")
            return run()
    except NOT_A_VERDICT:
        raise
    except (RuntimeError, UsageError, AttributeError, TypeError) as error:
        raise Wrong(
            f"{what} stops: {str(error).splitlines()[0]}",
            expected="a run that reaches its end",
            observed=type(error).__name__,
            call=call,
        ) from error


# 6.3 reshard_bucket


def check_reshard_bucket(answer: Answer) -> Iterator[str]:
    """One unit by itself, between its forward and its backward; then stage 3."""
    for rank, facts in enumerate(evidence.run(_on_rank_reshard, RANKS)):
        _judge(facts, "reshard_bucket(blocks.0)", rank)
    yield "the memory is gone although autograd still holds the tensor"
    yield "shape kept, one NaN behind it: reading it spreads NaN, and nothing crashes"
    yield "filled again, the saved tensor gives backward the right numbers"
    yield _trains()


ANOTHER_TENSOR = (
    "`flat_param` is another tensor now. The old one lives on in what autograd saved and in the "
    "parameters' views, and the next gather fills the new one."
)


def _same_storage(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == two.untyped_storage()._cdata


def _on_rank_reshard() -> Facts:
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
    facts: Facts = {
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


def check_assign_params(answer: Answer) -> Iterator[str]:
    """Lists written out by hand; then a weight that two blocks share, trained at stage 3."""
    for what, make, blocks, expected in _models():
        _check_units(answer, make(), blocks, expected)
        yield f"{what}: the units that were written out by hand"
    plan = Plan(3, 2, "tied")
    ranks = trained(plan, "assign_params(...)")
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


def _check_units(answer: Answer, model: nn.Module, blocks: list[str], expected: Expected) -> None:
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


# 6.5 Turn


def check_turn(answer: Answer) -> Iterator[str]:
    """One unit's states step by step; then stage 3, whose units all use the class."""
    for rank, facts in enumerate(evidence.run(_on_rank_turn, RANKS)):
        _judge(facts, "Turn: fetch, unshard, reshard", rank)
    yield "sharded, in flight, unsharded, sharded: one gather a time round"
    yield "a gather that nobody used is waited for, then freed"
    yield "the next time round brings the newest shards"
    for rank, facts in enumerate(evidence.run(_on_rank_bare, 2)):
        _judge(facts, "Turn of a unit that has nothing to gather", rank)
    yield "a unit whose buckets are all persistent goes through the same states"
    yield _trains("Turn")
    plan = Plan(3, 2, "tied", accum_steps=2)
    yield unit_runs.same_weights(plan, trained(plan, "Turn"), "Turn")


class _Round:
    """One unit of two buckets on the calling rank, asked after every call of its `Turn`."""

    def __init__(self) -> None:
        self.bench = unit_runs.bench(bucket_numel=16)  # a weight of 16, a bias of 4
        unit = self.bench.units[2]
        self.turn, self.buckets = self.bench.stage.turns[unit], unit.buckets
        self.nbytes = 4 * sum(bucket.padded_numel for bucket in unit.buckets)
        self.facts: Facts = {}

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


def _on_rank_turn() -> Facts:
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
        start, stop = flat.shard_bounds(bucket.numel, RANKS, comm.get_rank())
        one.facts[f"new {bucket.name}"] = (
            True,
            torch.equal(bucket.flat_param[start:stop], bucket.shard),
            f"After the shards had changed the parameters of {bucket.name} have their old values.",
        )
    return one.facts


def _on_rank_bare() -> Facts:
    """Go round with a unit that has no sharded bucket."""
    bench = unit_runs.bench("tied", persistent=6)
    turn = next(bench.stage.turns[unit] for unit in bench.units if unit.name == "blocks.0")
    facts: Facts = {}
    for call, state in (("fetch", "in flight"), ("unshard", "unsharded"), ("reshard", "sharded")):
        getattr(turn, call)()
        found = getattr(turn.state, "value", turn.state)
        message = f"A unit that has nothing to gather is {found} after {call}, and not {state}."
        facts[call] = (state, found, message)
    return facts


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


def check_units_ahead(answer: Answer) -> Iterator[str]:
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
        plan = Plan(3, RANKS, prefetch_numel=limit)
        shown = trained(plan, "units_ahead(...)")
        _check_live(plan, shown, live, "units_ahead(...)")
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


# 6.7 Zero3


def check_zero3(answer: Answer) -> Iterator[str]:
    """Weights, bits, bytes, order and traffic of stage 3, with and without accumulation."""
    call, plan = "stage 3", Plan(3, RANKS)
    ranks = trained(plan, call)
    _check_published(ranks, call)
    _check_prefetch(plan, ranks, call)
    yield "order: the gather of the next block starts while one computes, in both directions"
    _check_times(plan, ranks, call, at_most=True)
    _check_live(plan, ranks, 2, call)
    _check_freed(ranks, call)
    _check_row(ranks, call)
    yield "order: a block is freed before the next but one comes; two whole at a time, beside root"
    _check_not_hasty(ranks, call)
    yield "order: nobody waits for a gather before its unit's turn"
    psi = unit_runs.stack_numel(RANKS)
    unit_runs.same_traffic(plan, ranks, {"all_gather": 2 * psi, "reduce_scatter": psi}, call)
    _check_times(plan, ranks, call)
    yield f"traffic: every unit gathered twice and reduced once, 3 x {psi} elements"
    yield unit_runs.same_weights(plan, ranks, call)
    _check_bits(plan, ranks, call)
    yield "bits: weights and losses are those of stage 0"
    _check_held(plan, ranks, psi, call)
    yield "bytes: parameters, gradients and averages are a third each"
    yield _check_persistent(call)
    yield _check_kept(call)
    yield from _check_deep(call)
    yield _check_held_open(call)


def _check_persistent(call: str) -> str:
    """Train with biases that stay whole: they need the owners' new slices after every step."""
    keys = (("stage3_param_persistence_threshold", 6),)
    plan = Plan(3, 2, "tied", accum_steps=2, zero=keys)
    ranks = trained(plan, call)
    for shown in ranks:
        if shown.blocking:
            raise Wrong(
                f"After the step the gathers of {', '.join(shown.blocking)} were waited for where "
                "they were started, one after the other: `publish` returns the work.",
                expected="async_op=True",
                observed=f"{len(shown.blocking)} gathers waited for",
                rank=shown.rank,
                call=call,
            )
    return unit_runs.same_weights(plan, ranks, call)


def _check_deep(call: str) -> Iterator[str]:
    """Train with blocks whose gradients come in two lots, and with such that run again."""
    psi = 3 * unit_runs.padded(unit_runs.DEEP_BLOCK, 2)
    recomputed = Plan(3, 2, "recomputed", prefetch_numel=psi)
    for plan, live in ((Plan(3, 2, "deep", prefetch=False), 1), (recomputed, 3)):
        ranks = trained(plan, call)
        unit_runs.same_traffic(plan, ranks, {"all_gather": 2 * psi, "reduce_scatter": psi}, call)
        _check_live(plan, ranks, live, call)
        yield unit_runs.same_weights(plan, ranks, call)
    yield "without prefetch one block at a time; as many as fit where `prefetch_numel` is large"


def _check_kept(call: str) -> str:
    """Train with units that may stay from forward to backward: one gather each."""
    keys = (("stage3_max_live_parameters", 10**9), ("stage3_max_reuse_distance", 10**9))
    plan, psi = Plan(3, 2, "deep", zero=keys), 3 * unit_runs.padded(unit_runs.DEEP_BLOCK, 2)
    expected = {"all_gather": psi, "reduce_scatter": psi}
    unit_runs.same_traffic(plan, trained(plan, call), expected, call)
    return "units that `needed_again` keeps are gathered once a step"


def _check_held_open(call: str) -> str:
    """Step inside `GatheredParameters`: what is whole there has to be new afterwards."""
    shown = _verdict("a step inside GatheredParameters", call, _held)
    for rank, (readable, apart) in enumerate(shown):
        if not readable:
            raise Wrong(
                "A forward ran inside GatheredParameters, and after it the parameters there are "
                "NaN: `self.reshard(unit)` leaves alone what somebody holds, the turn does not.",
                expected="whole parameters to the end of the block",
                observed="NaN after forward",
                rank=rank,
                call=call,
            )
        if apart:
            raise Wrong(
                "engine.step() ran inside GatheredParameters, and the parameters that are whole "
                f"there are {apart:.2g} off the new slices: who holds a unit reads old values.",
                expected="the new values of all ranks",
                observed=f"values up to {apart:.3g} off",
                rank=rank,
                call=call,
            )
    return "units that somebody holds during a step are new after it"


def _check_row(ranks: list[Shown], call: str) -> None:
    """What is needed now is gathered before what will be needed next."""
    row = ("root", *unit_runs.BLOCKS, "root", *reversed(unit_runs.BLOCKS))
    for shown in ranks:
        if sorted(shown.gathers) == sorted(row) and shown.gathers != row:
            at = next(number for number, name in enumerate(row) if shown.gathers[number] != name)
            raise Wrong(
                f"The gather of {shown.gathers[at]} begins before that of {row[at]}, which is "
                "needed first: a gather waits for those before it, so the unit whose turn it is "
                "comes before its followers.",
                expected=" ".join(row),
                observed=" ".join(shown.gathers),
                rank=shown.rank,
                call=call,
            )


def _check_freed(ranks: list[Shown], call: str) -> None:
    """The last gradient frees its unit: not the end of backward, and not before it was taken."""
    for shown in ranks:
        if shown.left:
            raise Wrong(
                f"The last gradient has come, and {', '.join(shown.left)} was not freed by it: a "
                "unit whose inputs need no gradient hears of its end from `grad_ready` alone.",
                expected="every unit freed by the last of its gradients",
                observed=f"whole at the end of backward: {', '.join(shown.left)}",
                rank=shown.rank,
                call=call,
            )
        if shown.rash:
            raise Wrong(
                f"{', '.join(shown.rash)} freed before the last gradient has been taken and sent: "
                "a unit is done with when that has come, and all ranks wait for it first of all.",
                expected="the reduction begins, then the unit is freed",
                observed=f"freed first: {', '.join(shown.rash)}",
                rank=shown.rank,
                call=call,
            )


def _held() -> list[tuple[bool, float]]:
    return unit_runs.stale_in_a_held_block(2)


def _check_not_hasty(ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        if shown.hasty:
            way, unit = shown.hasty[0]
            raise Wrong(
                f"In {way} the gather of {unit} has been waited for before the block that "
                "computed was freed: it was started ahead, and hides behind nothing.",
                expected="a gather on its way until its own unit's turn",
                observed=f"waited for ahead: {', '.join(unit for _, unit in shown.hasty)}",
                rank=shown.rank,
                call=call,
            )


def _live_blocks(story: tuple[str, ...]) -> int:
    """Return how many units beside the root are whole at once, at most."""
    live: set[str] = set()
    most = 0
    for sign, name in ((event[0], event[1:]) for event in story):
        live = live | {name} if sign == "+" else live - {name}
        most = max(most, len(live - {"root"}))
    return most


def _check_live(plan: Plan, ranks: list[Shown], expected: int, call: str) -> None:
    for shown in ranks:
        live = _live_blocks(shown.story)
        if live != expected:
            where = _where_most(shown.story)
            rule = "are enough" if live > expected else "can be, by the options"
            raise Wrong(
                f"{unit_runs.describe(plan)}: {live} blocks are whole at the same time{where}, "
                f"where {expected} {rule}.",
                expected=expected,
                observed=" ".join(shown.story),
                rank=shown.rank,
                call=call,
            )


def _where_most(story: tuple[str, ...]) -> str:
    """Say whether the most units are whole on the way out or on the way back."""
    blocks = [event for event in story if event[1:] != "root"]
    first = blocks[: 2 * len({event[1:] for event in blocks})]
    return " in forward" if _live_blocks(tuple(first)) == _live_blocks(story) else " in backward"


def _check_published(ranks: list[Shown], call: str) -> None:
    for shown in ranks:
        if shown.published:
            raise Wrong(
                f"After the optimizer's step {len(shown.published)} units are gathered, and nobody "
                "computes with them: the next forward gathers them itself.",
                expected="no gather in the step",
                observed=", ".join(shown.published),
                rank=shown.rank,
                call=call,
            )


def _check_prefetch(plan: Plan, ranks: list[Shown], call: str) -> None:
    """Look for the gather of the next block before the end of the one that computes."""
    blocks = list(unit_runs.BLOCKS)
    for shown in ranks:
        story = list(shown.story)
        for one, two in pairwise(blocks):
            _check_early(story, one, two, "forward", shown.rank, call)
        for one, two in pairwise(blocks[::-1]):  # the last time that each comes and goes
            _check_early(story, one, two, "backward", shown.rank, call)


def _check_early(story: list[str], one: str, two: str, way: str, rank: int, call: str) -> None:
    comes, goes = _at(story, f"+{two}", way), _at(story, f"-{one}", way)
    if not comes < goes:
        raise Wrong(
            f"In {way} the gather of {two} begins only when {one} has gone: it cannot run while "
            "that one computes.",
            expected=f"+{two} before -{one}",
            observed=" ".join(story),
            rank=rank,
            call=call,
        )


def _at(story: list[str], event: str, way: str) -> int:
    """Return the position of an event's first time in forward, of its last in backward."""
    found = [number for number, other in enumerate(story) if other == event]
    return len(story) if not found else found[0 if way == "forward" else -1]


def _check_times(plan: Plan, ranks: list[Shown], call: str, *, at_most: bool = False) -> None:
    """Count each unit's gathers: two, or with `at_most` no more than two."""
    for shown in ranks:
        for name in ("root", *unit_runs.BLOCKS):
            times = shown.gathers.count(name)
            if times > 2 or (times < 2 and not at_most):
                raise Wrong(
                    f"{unit_runs.describe(plan)}: {name} is gathered {times} times a step; once "
                    "for forward and once for backward are enough, and needed.",
                    expected="2 times",
                    observed=f"{times} times",
                    rank=shown.rank,
                    call=call,
                )


def _check_bits(plan: Plan, ranks: list[Shown], call: str) -> None:
    for shown, other in zip(ranks, unit_runs.stage_0(plan.world_size), strict=True):
        different = int((shown.weights != other.weights).sum())
        if different or shown.losses != other.losses:
            raise Wrong(
                f"{different} weights differ in their last bits from those of stage 0.",
                expected="the same bits",
                observed=f"{different} weights differ; losses {shown.losses}, {other.losses}",
                rank=shown.rank,
                call=call,
            )


def _check_held(plan: Plan, ranks: list[Shown], psi: int, call: str) -> None:
    share = 4 * psi // plan.world_size
    for shown in ranks:
        held = {kind: shown.ready.get(kind, 0) for kind in ("param", "grad", "gathered")}
        expected = {"param": share, "grad": share, "gathered": 0}
        if held != expected:
            raise Wrong(
                f"{unit_runs.describe(plan)}: when the gradients are ready a rank holds other "
                "bytes than a third.",
                expected=expected,
                observed=held,
                rank=shown.rank,
                call=call,
            )
