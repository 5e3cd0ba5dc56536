"""Chapter 2: calls that ranks have agreed on may use gloo's own collective; others may not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab import comm
from zerolab.comm.pattern import Pattern
from zerolab.errors import DeadlockError, MismatchError

NUMEL = 10_000  # beyond `SMALL_NUMEL`
CALLS = st.lists(st.integers(0, 2**32 - 1), max_size=6)


def repeat(pattern, calls):
    """Make the calls of a step and say which were expected."""
    return [pattern.expects(call) for call in calls]


@settings(deadline=None)
@given(CALLS, CALLS)
def test_a_step_is_expected_up_to_the_first_call_that_differs(first, second):
    pattern = Pattern()
    assert not any(repeat(pattern, first))
    pattern.end_step(alike=True)
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    assert repeat(pattern, second) == [True] * same + [False] * (len(second) - same)


@settings(deadline=None)
@given(CALLS)
def test_nothing_is_expected_after_ranks_differed(calls):
    pattern = Pattern()
    repeat(pattern, calls)
    pattern.end_step(alike=False)
    assert not any(repeat(pattern, calls))


@settings(deadline=None)
@given(CALLS, CALLS)
def test_digests_are_equal_for_equal_calls_only(first, second):
    digests = []
    for calls in (first, second):
        pattern = Pattern()
        repeat(pattern, calls)
        digests.append(pattern.digest())
        assert 0 <= digests[-1] < 2**63
    assert (digests[0] == digests[1]) == (first == second)


def step(label="gradients", numel=NUMEL, op="avg"):
    """Make one call of a step; numbers that a sum in another order would round differently."""
    generator = torch.Generator().manual_seed(comm.get_rank())
    values = torch.randn(numel, generator=generator) * 1e3
    comm.all_reduce(values, op, label=label)
    comm.end_step()
    return values


def count_gloo_calls():
    """Count the calls that gloo itself carries out; patched in this rank's process only."""
    group, calls = comm.current_group(), []
    own = group._two_rank_all_reduce

    def counted(call, flat):
        calls.append(call.op)
        return own(call, flat)

    group._two_rank_all_reduce = counted
    return calls


def three_steps(op):
    calls, seen = count_gloo_calls(), []
    for _ in range(3):
        values = step(op=op)
        seen.append((values, len(calls)))
    return seen


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_agreed_path_gives_the_bits_of_the_first_step(op):
    expected = comm.run(lambda: step(op=op), world_size=2, world="lockstep", ledger=False)[0]
    for rank in comm.run(three_steps, world_size=2, world="gloo", args=(op,)):
        assert [calls for _, calls in rank] == [0, 1, 2]
        for values, _ in rank:
            assert torch.equal(values, expected)


def differ(what):
    """Agree for two steps, then let rank 1 do something else without waiting for anything."""
    step()
    step()
    mine = torch.ones(NUMEL)
    if comm.get_rank() == 0:
        comm.all_reduce(mine, "avg", label="gradients")
    elif what == "label":
        works = [comm.all_reduce(mine, "avg", label=name, async_op=True) for name in ("b", "a")]
        for work in works:
            work.wait()
    elif what == "size":
        works = [
            comm.all_reduce(torch.ones(size), "avg", label="gradients", async_op=True)
            for size in (NUMEL // 2, NUMEL)
        ]
        for work in works:
            work.wait()
    return mine


@pytest.mark.parametrize("what", ["label", "size"])
def test_ranks_that_stray_after_agreeing_are_told_apart_and_mix_nothing(what):
    with pytest.raises(MismatchError) as caught:
        comm.run(differ, world_size=2, world="gloo", args=(what,), timeout=20)
    assert "gradients" in str(caught.value)


def test_a_rank_that_stops_after_agreeing_is_named():
    with pytest.raises(DeadlockError) as caught:
        comm.run(differ, world_size=2, world="gloo", args=("stop",), timeout=20)
    assert "rank 1" in str(caught.value)
    assert "returned" in str(caught.value)


def test_other_traffic_between_steps_costs_the_shortcut_and_nothing_else():
    def work():
        calls = count_gloo_calls()
        for number in range(4):
            if number == 2:
                comm.all_reduce(torch.ones(3), "sum", purpose="control")
            step()
        return len(calls)

    assert comm.run(work, world_size=2, world="gloo") == [1, 1]


def test_steps_that_repeat_the_agreed_one_are_not_compared_again():
    def work():
        for numel in (NUMEL, NUMEL, NUMEL, NUMEL // 2, NUMEL // 2):
            step(numel=numel)
        return [call.label for call in comm.current_group().calls].count("end of step")

    assert comm.run(work, world_size=2, world="gloo") == [2, 2]
