"""Chapter 6: the check of stage 3: order, traffic, bits and bytes of whole runs.

Owns nothing. References are torch in one process, stage 0 for the bits, and the story of a step.
"""

from collections.abc import Iterator
from itertools import pairwise

from ..outcome import Wrong
from . import c06_judging as judging
from . import unit_runs
from .unit_runs import Plan, Shown

# 6.7 Zero3


def check_zero3(answer: judging.Answer) -> Iterator[str]:
    """Weights, bits, bytes, order and traffic of stage 3, with and without accumulation."""
    call, plan = "stage 3", Plan(3, judging.RANKS)
    ranks = judging.trained(plan, call)
    _check_published(ranks, call)
    _check_prefetch(plan, ranks, call)
    yield "order: the gather of the next block starts while one computes, in both directions"
    _check_times(plan, ranks, call, at_most=True)
    judging.check_live(plan, ranks, 2, call)
    _check_freed(ranks, call)
    _check_row(ranks, call)
    yield "order: a block is freed before the next but one comes; two whole at a time, beside root"
    _check_not_hasty(ranks, call)
    yield "order: nobody waits for a gather before its unit's turn"
    psi = unit_runs.stack_numel(judging.RANKS)
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
    ranks = judging.trained(plan, call)
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
        ranks = judging.trained(plan, call)
        unit_runs.same_traffic(plan, ranks, {"all_gather": 2 * psi, "reduce_scatter": psi}, call)
        judging.check_live(plan, ranks, live, call)
        yield unit_runs.same_weights(plan, ranks, call)
    yield "without prefetch one block at a time; as many as fit where `prefetch_numel` is large"


def _check_kept(call: str) -> str:
    """Train with units that may stay from forward to backward: one gather each."""
    keys = (("stage3_max_live_parameters", 10**9), ("stage3_max_reuse_distance", 10**9))
    plan, psi = Plan(3, 2, "deep", zero=keys), 3 * unit_runs.padded(unit_runs.DEEP_BLOCK, 2)
    expected = {"all_gather": psi, "reduce_scatter": psi}
    unit_runs.same_traffic(plan, judging.trained(plan, call), expected, call)
    return "units that `needed_again` keeps are gathered once a step"


def _check_held_open(call: str) -> str:
    """Step inside `GatheredParameters`: what is whole there has to be new afterwards."""
    shown = judging.verdict("a step inside GatheredParameters", call, _held)
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
