"""Who can still come? The proof of a deadlock, on states written by hand."""

import pytest

from zerolab.comm import deadlock, watch
from zerolab.errors import DeadlockError, MismatchError
from zerolab.records import RankRow


def computing(launched=0):
    return {**watch.silent_state(), "launched": launched, "beat": 1}


def waiting(seq, launched=None, beat=1, signature="'all_reduce'"):
    """Waits in collective `seq`; has made `launched` collectives, that one included."""
    return {
        **watch.silent_state(),
        **{"state": "waiting", "op": "all_reduce", "detail": f"all_reduce #{seq}"},
        **{"seq": seq, "key": str(seq), "launched": seq + 1 if launched is None else launched},
        "calls": {str(seq): [signature, f"all_reduce #{seq}", "all_reduce", ""]},
        "beat": beat,
    }


def ended(how, launched=0):
    return {**watch.silent_state(), "state": how, "launched": launched, "beat": 1}


def message(op, rank, peer, seq=0, made=()):
    """Waits in a send or receive; `made` are the pairs of all its messages so far."""
    pair = (rank, peer) if op == "send" else (peer, rank)
    counts = [[*pair, seq + 1], *([*other, 1] for other in made)]
    state = {**watch.silent_state(), "state": "waiting", "op": op, "seq": seq, "peer": peer}
    return {**state, "key": f"{pair[0]}>{pair[1]} #{seq}", "messages": counts, "beat": 1}


CASES = {
    "a peer that computes may still come": ([waiting(3), computing(3)], set()),
    "a peer that returned never comes": ([waiting(3), ended("returned", 3)], {0}),
    "a peer that made the call and returned has sent": ([waiting(3), ended("returned", 4)], set()),
    "all made the call, bytes are on the way": ([waiting(3), waiting(3)], set()),
    "the peer is ahead": ([waiting(3), waiting(5)], set()),
    "who waits for one that may come may come": ([waiting(4), waiting(3), computing(3)], set()),
    "who waits for a stuck one is stuck": ([waiting(4), waiting(3), ended("died", 3)], {0, 1}),
    "sends in a circle": ([message("send", 0, 1), message("send", 1, 0)], {0, 1}),
    "a send that meets its receive": ([message("send", 0, 1), message("recv", 1, 0)], set()),
    "a receive posted before frees the sender, and then its peer": (
        [message("send", 0, 1), message("send", 1, 0, made=[(0, 1)])],
        set(),
    ),
    "a collective against a message": ([waiting(0), message("recv", 1, 0)], {0, 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_stuck_ranks_are_those_that_nobody_frees(case):
    states, expected = CASES[case]
    assert watch.stuck(dict(enumerate(states))) == expected


def test_stream_that_waits_is_in_vain_only_for_ended_ranks():
    circle = {0: message("send", 0, 1), 1: message("send", 1, 0)}
    assert watch.in_vain(0, circle, host_waits=True)
    assert not watch.in_vain(0, circle, host_waits=False)
    assert watch.in_vain(0, {0: waiting(3), 1: ended("died", 3)}, host_waits=False)


def test_doubt_is_confirmed_only_by_news_that_change_nothing():
    before = {0: waiting(3, beat=1), 1: ended("returned", 3)}
    assert not watch.confirmed(before, before)
    assert watch.confirmed(before, {**before, 0: waiting(3, beat=2)})
    assert not watch.confirmed(before, {**before, 0: waiting(4, beat=2)})


def test_different_calls_of_one_number_need_no_doubt():
    states = {0: waiting(3), 1: waiting(3, signature="'broadcast'"), 2: computing()}
    assert watch.contradictions(0, states) == [1]
    error = watch.error_of(0, states)
    assert isinstance(error, MismatchError) and len(error.table) == 3
    same = {0: waiting(3), 1: ended("returned", 3)}
    assert watch.contradictions(0, same) == []
    assert type(watch.error_of(0, same)) is DeadlockError


def test_table_is_aligned_and_quotes_the_source():
    rows = [
        RankRow(0, "waiting", "barrier", 7, "barrier #7", 1.5, "train.py:3", "comm.barrier()"),
        RankRow(10, "raised", "all_reduce", 6, "ValueError: no", 0.25, "", ""),
    ]
    head, first, second = deadlock.render(rows).splitlines()
    for column, cell in {
        "call": "barrier #7",
        "since": "1.50 s",
        "source": "comm.barrier()",
    }.items():
        assert head.index(column) == first.index(cell)
    assert head.index("call") == second.index("after all_reduce #6: ValueError: no")
    assert deadlock.explain(rows) == (
        "rank 10 raised without the call that rank 0 waits in: barrier #7"
    )


@pytest.mark.parametrize(
    ("ranks", "text"), [([2], "rank 2"), ([0, 3], "ranks 0 and 3"), ([0, 1, 2], "ranks 0, 1 and 2")]
)
def test_ranks_are_named_in_words(ranks, text):
    assert deadlock.ranks_text(ranks) == text
