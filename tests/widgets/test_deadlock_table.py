"""deadlock_table: who is the odd one out, the still table, and the script on a stub model."""

import pytest
import torch

from zerolab import comm
from zerolab.errors import DeadlockError, MismatchError, UsageError
from zerolab.records import RankRow
from zerolab_widgets import DeadlockTable, stuck


def row(rank, state="waiting", op="all_reduce", detail="all_reduce #3 (sum, 10 float32)", seq=3):
    source = "comm.all_reduce(loss)" if state != "returned" else ""
    return RankRow(rank, state, op, seq, detail, 0.5 + rank, f"cell 4:{rank}", source)


def one_left_early():
    return [row(0), row(1), row(2, "returned", detail="", seq=2), row(3)]


def error_of(program):
    with pytest.raises(DeadlockError) as caught:
        comm.run(program, 4, "lockstep")
    return caught.value


def test_the_rank_that_returned_is_odd():
    assert stuck.odd_ones(one_left_early()) == [2]
    assert stuck.finding(one_left_early()) == (
        "Rank 2 has returned, after all_reduce #2 at cell 4:2; "
        "ranks 0, 1 and 3 wait in all_reduce #3 (sum, 10 float32)."
    )


def test_of_two_the_one_that_does_not_wait_is_odd():
    assert stuck.odd_ones([row(0), row(1, "raised", detail="ValueError: 3")]) == [1]
    assert stuck.odd_ones([row(0), row(1, detail="all_gather #3", op="all_gather")]) == []


def test_a_circle_of_messages_has_no_odd_one():
    rows = [
        row(r, op="send", detail=f"send #0 (to rank {(r + 1) % 4}, 3 float32)") for r in range(4)
    ]
    assert stuck.odd_ones(rows) == []
    assert stuck.finding(rows) == "All 4 ranks wait in a send, each for another: a circle."


def test_another_shape_is_another_call():
    rows = [row(0), row(1), row(2, detail="all_reduce #3 (sum, 12 float32)")]
    assert stuck.odd_ones(rows) == [2]


def test_a_rank_without_a_turn_is_not_odd_beside_a_contradiction():
    gathers = row(1, op="all_gather", detail="all_gather #3 (8)")
    rows = [row(0), gathers, row(2, "computing", detail=""), row(3, "computing", detail="")]
    assert stuck.odd_ones(rows) == []
    assert stuck.finding(rows) == (
        "Rank 0 waits in all_reduce #3 (sum, 10 float32); rank 1 waits in all_gather #3 (8)."
    )
    assert stuck.odd_ones([*rows[:2], row(2), rows[3]]) == [1]


def test_who_is_busy_is_odd_when_all_others_wait_for_it():
    assert stuck.odd_ones([row(0, "computing", detail=""), row(1), row(2)]) == [0]
    busy = [row(rank, "computing", detail="") for rank in range(2)]
    assert stuck.finding(busy).startswith("None of 2 ranks waited: Rank 0 was busy")


def test_rows_say_what_the_others_wait_for():
    says = [line.says for line in stuck.lines_of(one_left_early())]
    assert says[2].endswith("Ranks 0, 1 and 3 wait in all_reduce #3 (sum, 10 float32).")
    assert says[0].endswith("The others that wait are in the same call.")


def test_table_of_a_real_deadlock_marks_who_left():
    def program():
        if comm.get_rank() != 2:
            comm.all_reduce(torch.ones(10))

    table = DeadlockTable(error_of(program))
    assert [line["odd"] for line in table.lines] == [False, False, True, False]
    assert [line["state"] for line in table.lines] == ["waiting"] * 2 + ["returned", "waiting"]
    assert table.lines[0]["source"] == "comm.all_reduce(torch.ones(10))"
    assert "Rank 2 has returned" in table.finding


@pytest.mark.parametrize("world", ["lockstep", "gloo"])
def test_mismatch_names_the_ranks_and_their_calls_with_their_lines(world):
    def program():
        op = comm.all_gather if comm.get_rank() == 1 else comm.reduce_scatter
        sizes = (2, 1) if comm.get_rank() == 1 else (1, 2)
        op(torch.ones(sizes[0]), torch.ones(sizes[1]))

    with pytest.raises(MismatchError) as caught:
        comm.run(program, 2, world)
    table = DeadlockTable(caught.value)
    line = program.__code__.co_firstlineno + 3
    where = f"test_deadlock_table.py:{line}"
    assert table.finding == (
        f"The calls do not match: rank 0 called reduce_scatter #0 (sum, 2 float32) at {where}, "
        f"rank 1 called all_gather #0 (2 float32) at {where}."
    )
    assert [line["mark"] for line in table.lines if line["odd"]] == ["does not match"] * 2


def test_mismatch_names_the_calls_and_not_where_ranks_wait_by_now():
    calls = tuple(
        row(r, detail=f"all_reduce #1 (root/{2 if r == 1 else 1})", seq=1) for r in (0, 1)
    )
    rows = (row(0), row(1, "computing"), row(2))
    table = DeadlockTable(MismatchError("mismatch", rows, calls))
    assert table.finding == (
        "The calls do not match: rank 0 called all_reduce #1 (root/1) at cell 4:0, "
        "rank 1 called all_reduce #1 (root/2) at cell 4:1."
    )
    assert [line["odd"] for line in table.lines] == [True, True, False]
    assert table.finding in table.to_html() and "root/2" in table.lines[0]["says"]


def test_of_three_calls_the_one_that_differs_is_marked():
    calls = tuple(row(r, detail=f"all_reduce #1 ({3 if r == 1 else 4})") for r in range(3))
    table = DeadlockTable(MismatchError("mismatch", calls, calls))
    assert [line["odd"] for line in table.lines] == [False, True, False]
    assert "ranks 0 and 2 called all_reduce #1 (4) at cell 4:0 and cell 4:2" in table.finding


def test_what_has_no_rows_is_refused():
    with pytest.raises(UsageError, match="ValueError has no rows"):
        DeadlockTable(ValueError("no"))
    with pytest.raises(UsageError, match="NoneType has no rows"):
        DeadlockTable(None)


def test_still_table_leaves_times_out():
    early, late = one_left_early(), one_left_early()
    late = [RankRow(r.rank, r.state, r.op, r.seq, r.detail, 9.9, r.where, r.source) for r in late]
    data, _ = DeadlockTable(early)._repr_mimebundle_()
    assert data["text/html"] == DeadlockTable(late).to_html()
    assert "comm.all_reduce(loss)" in data["text/html"] and "bold" in data["text/html"]
    assert data["text/plain"] == repr(DeadlockTable(late))


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_marks_the_odd_one_and_tells_of_a_row(draw, keep, dark):
    page = draw("deadlock_table", DeadlockTable(one_left_early()), dark=dark)
    assert page.locator("tbody tr").count() == 4
    assert page.locator(".zl-odd .zl-mark").count() == 1
    page.locator("tbody tr").nth(2).click()
    assert page.evaluate("window.model.get('selected')") == 2
    assert "Ranks 0, 1 and 3 wait" in page.locator(".zl-said").inner_text()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("window.model.get('selected')") == 1
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    keep(page, f"deadlock_table_{'dark' if dark else 'light'}")
