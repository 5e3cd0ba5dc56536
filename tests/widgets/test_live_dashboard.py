"""live_dashboard: what it knows of a run that goes on, what that costs, and its script."""

import json
import threading
import time
from dataclasses import replace

import pytest
from picture_runs import MIB, a_step, call

from zerolab import lab
from zerolab.lab import live, training
from zerolab.records import Mark, Records
from zerolab_widgets import LiveDashboard, pulse


def train(**settings):
    return lab.train(**{"model": "gpt-nano", "dtype": "fp32", "steps": 3, **settings})


@pytest.fixture(scope="module")
def watched():
    """A run with its dashboard."""
    board = LiveDashboard()
    return train(stage=2, watch=board), board


def two_steps(world):
    """Two ranks, two steps of a second; blocked 0.1 and 0.3 s in the first, 0 and 0.2 after."""
    ranks = []
    for rank, blocked in enumerate([(0.1, 0.0), (0.3, 0.2)]):
        calls = [call(0.5 + step, "all_reduce", 0.9 + step, blocked=each)
                 for step, each in enumerate(blocked)]  # fmt: skip
        marks = [Mark(0.0, "init_done", 0, {}, 0), Mark(1.0, "step_end", 0, {}, 0),
                 Mark(2.0, "step_end", 0, {}, 0)]  # fmt: skip
        ranks.append(Records(rank, 2, [], calls, marks, world=world))
    return ranks


def test_share_is_blocked_time_of_all_time():
    seen = pulse.Pulse()
    seen.read(two_steps("gloo"))
    assert seen.shares == pytest.approx([0.4 / 2, 0.2 / 2])
    assert seen.moved == {"all_reduce": MIB} and seen.calls == 1


def test_lockstep_ranks_share_one_clock():
    seen = pulse.Pulse()
    seen.read(two_steps("lockstep"))
    assert seen.shares == pytest.approx([0.4, 0.2])


def test_steps_are_read_once_and_only_when_all_ranks_have_done_them():
    first, second = two_steps("gloo")
    late = second.marks.pop()
    seen = pulse.Pulse()
    seen.read([first, second])
    assert seen.shares == pytest.approx([0.2])
    second.marks.append(late)
    seen.read([first, second])
    seen.read([first, second])
    assert seen.shares == pytest.approx([0.2, 0.1])


def test_control_traffic_is_time_but_not_data():
    seen = pulse.Pulse()
    seen.read([a_step(0), a_step(1)])
    assert seen.moved == {"reduce_scatter": MIB, "all_gather": MIB} and seen.calls == 2
    assert seen.shares == pytest.approx([0.22])


def test_losses_are_means_of_the_steps_that_all_have_done():
    assert pulse.mean_losses([[1.0, 2.0, 3.0], [3.0, 4.0]]) == [2.0, 3.0]
    assert pulse.mean_losses([]) == []


def test_thinning_keeps_the_spikes():
    values = [1.0] * 5000
    values[1234], values[4321] = 99.0, -99.0
    points = pulse.thinned(values)
    assert len(points) <= pulse.MOST_POINTS
    assert [1234, 99.0] in points and [4321, -99.0] in points
    assert points == sorted(points) and pulse.thinned([3.0, 4.0]) == [[0, 3.0], [1, 4.0]]


def test_a_run_feeds_the_dashboard(watched):
    run, board = watched
    assert [loss for _, loss in board.losses] == [round(loss, 5) for loss in run.losses]
    assert len(board.shares) == 3 and all(0 < share < 1 for _, share in board.shares)
    gathered = [e for e in run.ranks[0].records.collectives if e.op == "all_gather"]
    data = [e for e in gathered if e.purpose == "data"]
    assert board.moved["all_gather"] == sum(e.nbytes for e in data) // 3
    assert "copying in memory" in board.note
    assert board.finding.count("4 GPUs") == 1 and "Loss 5." in board.finding


def test_losses_are_seen_while_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(live, "REDRAW_SECONDS", 0.001)
    monkeypatch.setattr(live, "DRAWING_SHARE", 1.0)
    seen = []

    class Watching(LiveDashboard):
        def advance(self, losses, ranks):
            super().advance(losses, ranks)
            if threading.current_thread() is not threading.main_thread():
                seen.append(len(self.losses))

    train(stage=1, steps=6, watch=Watching())
    assert seen == sorted(seen) and any(0 < count < 6 for count in seen)


def test_processes_are_drawn_at_their_end(watched):
    """They cannot be looked at while they run: the last picture is told everything at once."""
    run, _ = watched
    ranks = [replace(rank, records=replace(rank.records, world="gloo")) for rank in run.ranks]
    board = LiveDashboard()
    training._draw_end(board, replace(run, ranks=ranks))
    assert len(board.losses) == len(board.shares) == 3 and board.note == ""
    assert len(board.bars) == 4 and "Loss 5." in board.finding


class Counted(LiveDashboard):
    """Adds up the processor time that drawing took, outside the last picture."""

    drawing = 0.0

    def show(self, held, phases, peaks):
        began = time.thread_time()
        super().show(held, phases, peaks)
        self.drawing += time.thread_time() - began

    def advance(self, losses, ranks):
        began = time.thread_time()
        super().advance(losses, ranks)
        if threading.current_thread() is not threading.main_thread():
            self.drawing += time.thread_time() - began


def test_being_watched_costs_less_than_5_percent():
    """Processor time, which means the same on a busy machine as on a quiet one."""
    board = Counted()
    began = time.process_time()
    train(stage=1, steps=6, watch=board)
    assert 0 < board.drawing < 0.05 * (time.process_time() - began)


def test_a_slow_picture_is_drawn_less_often():
    spent = []

    class Slow:
        capacity = 0

        def show(self, held, phases, peaks):
            began = time.thread_time()
            while time.thread_time() - began < 0.005:
                pass
            spent.append(time.thread_time() - began)

        def finish(self, ranks, failed=None, message=""):
            pass

    began = time.process_time()
    with live.redrawn(Slow(), 2):
        while time.process_time() - began < 0.8:
            pass
    assert len(spent) >= 2
    assert sum(spent[:-1]) <= 0.05 * 0.8


def test_still_picture_has_no_times_and_is_the_same_twice(watched):
    _, board = watched
    again = LiveDashboard()
    train(stage=2, watch=again)
    first, second = (each._repr_mimebundle_()[0] for each in (board, again))
    assert first["text/html"] == second["text/html"] and first["text/plain"] == second["text/plain"]
    assert "<svg" not in first["text/html"] and "http" not in first["text/html"]
    assert "reduce_scatter" in first["text/html"]


def test_state_of_a_long_run_stays_under_50_kb(watched):
    board = LiveDashboard()
    board.advance([[1.0 / (i + 1) for i in range(5000)]] * 4, two_steps("lockstep"))
    run, _ = watched
    board.finish([rank.records for rank in run.ranks])
    state = {k: v for k, v in board.get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_bars_losses_and_shares(draw, drawn_in, keep, watched, dark):
    page = draw("live_dashboard", watched[1], dark=dark)
    assert drawn_in(page) < 1000
    assert page.locator(".zl-column").count() == 4
    assert "loss" in page.locator("figcaption").first.inner_text()
    assert "% of the time" in page.locator("figcaption").last.inner_text()
    assert page.locator(".zl-chart").last.locator("rect[fill^=url]").count() == 3
    assert "reduce_scatter" in page.locator(".zl-moved").inner_text()
    keep(page, f"live_dashboard_{'dark' if dark else 'light'}")


@pytest.mark.browser
def test_script_follows_the_run(draw):
    page = draw("live_dashboard", LiveDashboard())
    assert page.locator(".zl-line").count() == 0
    page.evaluate("window.model.set('losses', [[0, 5.5], [1, 5.25]])")
    assert page.locator("figcaption").first.inner_text() == "loss 5.250"
    assert page.locator(".zl-line").count() == 1
