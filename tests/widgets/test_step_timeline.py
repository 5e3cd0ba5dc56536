"""step_timeline: lanes from phases and collectives, exposed communication, and its script."""

import json
from functools import partial

import pytest
from picture_runs import MIB, a_step, call, event

from zerolab import lab
from zerolab.records import Mark, Records
from zerolab_widgets import StepTimeline, lanes
from zerolab_widgets.runs import Run, run_of


@pytest.fixture(scope="module")
def trained():
    return lab.train(model="gpt-nano", dtype="fp32", stage=3, steps=2)


def step_of(world="gloo"):
    return lanes.rank_step("rank 0", lanes.windows_of(Run([a_step(world=world)]))[0][0])


def pieces(step, lane):
    return [(p.what, round(p.start), round(p.end)) for p in step.pieces if p.lane == lane]


def test_compute_lane_is_the_phases_in_milliseconds():
    assert pieces(step_of(), "compute") == [
        ("forward", 100, 400),
        ("backward", 400, 700),  # then it waits
        ("step", 800, 850),
        ("step", 950, 1000),
    ]


def test_a_collective_is_hidden_until_the_rank_is_blocked_by_it():
    assert pieces(step_of(), "communication") == [
        ("hidden", 500, 700),
        ("exposed", 700, 800),
        ("control", 820, 840),
        ("exposed", 850, 950),
    ]


def test_exposed_communication_is_blocked_time_without_control():
    step = step_of()
    assert step.exposed == pytest.approx(200) and step.length == pytest.approx(1000)
    assert (step.calls, step.exposed_calls, step.nbytes) == (2, 1, 2 * MIB)


def test_copies_are_casts_until_the_next_event():
    assert pieces(step_of(), "copies") == [("copy", 550, 800)]


def in_turns():
    """A lockstep step by hand: one bucket goes while backward computes, the last after it.

    bucket 1   0.35 to 0.75   a matrix product comes between: hidden
    bucket 0   0.50 to 0.80   memory is let go and asked for, the first bucket is cast: exposed
    gather     0.85 to 0.95   nothing at all: exposed
    """
    did = [(0.1, "forward", "aten.mm"), (0.3, "backward", "aten.mm"), (0.4, "backward", "aten.mm"),
           (0.55, "backward", "free"), (0.6, "backward", "aten.new_empty"),
           (0.65, "backward", "aten._to_copy"), (0.82, "step", "aten.add")]  # fmt: skip
    memory = [event(time, MIB, 0, "temp", i, phase, op) for i, (time, phase, op) in enumerate(did)]
    calls = [
        call(0.35, "reduce_scatter", 0.75, seq=0),
        call(0.5, "reduce_scatter", 0.8, seq=1),
        call(0.85, "all_gather", 0.95, seq=2, phase="step"),
    ]
    ends = [Mark(0.0, "init_done", 0, {}, 0), Mark(1.0, "step_end", 0, {}, 0)]
    return Records(0, 2, memory, calls, ends, world="lockstep")


def test_in_lockstep_hidden_means_that_the_rank_computed_meanwhile():
    step = lanes.rank_step("rank 0", lanes.windows_of(Run([in_turns()]))[0][0])
    found = [p.what for p in step.pieces if p.lane == "communication"]
    assert found == ["hidden", "exposed", "exposed"]
    assert step.exposed == 0.0 and (step.calls, step.exposed_calls) == (3, 2)


def test_in_lockstep_nothing_is_computed_while_the_last_bucket_travels():
    # On the axis 1 is an event or a turn: 0.1 0.3 (0.35) 0.4 (0.5) .. (0.8) 0.82 (0.85) (0.95)
    step = lanes.rank_step("rank 0", lanes.windows_of(Run([in_turns()]))[0][0])
    last = next(p for p in step.pieces if p.what == "exposed")
    backward = [p for p in step.pieces if p.what == "backward"]
    assert (last.start, last.end) == (5.0, 10.0)
    assert [(p.start, p.end) for p in backward] == [(1.0, 5.0)]


def test_last_bucket_of_a_real_step_is_exposed(trained):
    step = lanes.rank_step("rank 0", lanes.windows_of(run_of(trained))[-1][0])
    sent = [p for p in step.pieces if p.text.startswith("reduce_scatter")]
    assert {p.what for p in sent[:-1]} == {"hidden"} and sent[-1].what == "exposed"
    assert "root/0" in sent[-1].text


def test_lockstep_axis_is_order():
    records = a_step(world="lockstep")
    window = lanes.windows_of(Run([records]))[0][0]
    places = [window.place(e.time) for e in [*records.memory, *records.collectives]]
    order = sorted(
        range(len(places)), key=lambda i: [*records.memory, *records.collectives][i].time
    )
    assert [places[i] for i in order] == sorted(places)
    stretched = a_step(world="lockstep")
    stretched.memory = [e if e.time < 0.9 else event(0.99, MIB, 5 * MIB, "temp", 4, "step")
                        for e in stretched.memory]  # fmt: skip
    again = lanes.windows_of(Run([stretched]))[0][0]
    assert again.place(1.0) == window.place(1.0), "how long something takes does not matter"


def test_overlapping_collectives_lie_in_rows_of_their_own():
    records = a_step()
    records.collectives = [call(0.2, "all_gather", 0.6), call(0.3, "all_gather", 0.5, seq=1),
                           call(0.7, "all_gather", 0.8, seq=2)]  # fmt: skip
    window = lanes.windows_of(Run([records]))[0][0]
    assert [piece.row for piece in lanes.communication_pieces(window)] == [0, 1, 0]


def test_a_call_that_nobody_waited_for_lasts_to_the_end_of_the_step():
    records = a_step()
    records.collectives = [call(0.2, "all_reduce", 0.0)]
    window = lanes.windows_of(Run([records]))[0][0]
    assert window.end_of(records.collectives[0]) == 1.0


def test_finding_says_how_much_is_exposed_and_in_which_sense():
    timed = StepTimeline([a_step(0), a_step(1)]).finding
    assert "rank 0 waits longest, 200.0 of 1000.0 ms (20 %) are exposed communication" in timed
    ordered = StepTimeline([a_step(0, "lockstep"), a_step(1, "lockstep")]).finding
    assert "of 2 data collectives of rank 0, 0 are on their way while it computes, 2 are" in ordered
    assert "this is order, not time" in ordered
    assert "No step has ended" in StepTimeline([Records()]).finding


def test_real_run_shows_every_data_collective_of_the_step(trained):
    picture = StepTimeline(trained)
    records = trained.ranks[0].records
    ends = [mark.time for mark in records.marks if mark.name == "step_end"]
    wanted = [e for e in records.collectives if ends[0] < e.time <= ends[1] and e.purpose == "data"]
    assert picture.steps == 2 and picture.step == 1
    assert picture._ranks[0].calls == len(wanted)
    assert picture._ranks[0].nbytes == sum(e.nbytes for e in wanted)
    assert all(e.ended > e.time for e in records.collectives)
    phases = {piece.what for piece in picture._ranks[0].pieces if piece.lane == "compute"}
    assert phases == {"forward", "backward", "step"}


def test_another_step_is_drawn_within_200_ms(trained, best_of):
    picture = StepTimeline(trained)
    before = picture.finding
    assert best_of(*[partial(setattr, picture, "step", step) for step in (0, 1, 0)]) < 0.2
    assert picture.finding != before and "Step 1 of 2" in picture.finding


def test_step_counts_from_the_end_and_stays_in_range(trained):
    assert StepTimeline(trained, step=-2).step == 0
    assert StepTimeline(trained, step=99).step == 1


def test_state_of_a_step_with_many_collectives_stays_under_50_kb():
    ranks = []
    for rank in range(4):
        calls = [call(i / 1501 + 1e-5, "all_gather", (i + 0.5) / 1501, nbytes=4 * i, seq=i)
                 for i in range(1500)]  # fmt: skip
        memory = [event(i / 2001 + 1e-6, MIB, MIB, "temp", i, "forward", "aten.clone")
                  for i in range(2000)]  # fmt: skip
        ranks.append(
            Records(rank, 4, memory, calls, [Mark(1.0, "step_end", 0, {}, 0)], world="gloo")
        )
    state = {k: v for k, v in StepTimeline(ranks).get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000


def test_still_picture_is_the_same_twice_and_fetches_nothing():
    first, second = (StepTimeline([a_step(0), a_step(1)])._repr_mimebundle_()[0] for _ in range(2))
    assert first["text/html"] == second["text/html"] and first["text/plain"] == second["text/plain"]
    assert 'alt="Step 1 of 1' in first["text/html"] and "200.0 of 1000.0 ms" in first["text/html"]
    assert "<svg" not in first["text/html"] and "http" not in first["text/html"]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_lanes_and_says_what_the_axis_is(draw, drawn_in, keep, trained, dark):
    page = draw("step_timeline", StepTimeline(trained), dark=dark)
    assert drawn_in(page) < 1000
    assert page.locator(".zl-row").count() == 4
    assert "order, not time" in page.locator(".zl-axis").inner_text()
    assert page.locator('[data-what="hidden"]').count() > 0
    keep(page, f"step_timeline_{'dark' if dark else 'light'}")


@pytest.mark.browser
def test_script_draws_measured_time(draw, keep):
    page = draw("step_timeline", StepTimeline([a_step(0), a_step(1)]))
    axis = page.locator(".zl-axis").inner_text()
    assert "measured time" in axis and "1000.0 ms" in axis
    keep(page, "step_timeline_time")


@pytest.mark.browser
def test_script_says_what_a_piece_is_by_mouse_and_keyboard(draw):
    page = draw("step_timeline", StepTimeline([a_step(0), a_step(1)]))
    page.locator('[data-rank="1"] [data-what="exposed"]').last.click()
    said = page.locator(".zl-said")
    assert "rank 1: all_gather of 1.0 MiB, bucket 0, step, cell:7" in said.inner_text()
    page.get_by_role("button", name="previous piece").focus()
    page.keyboard.press("Enter")
    assert "all_reduce" in said.inner_text()
    page.get_by_role("button", name="next piece").click()
    assert "all_gather" in said.inner_text()
    assert page.locator(".zl-piece.zl-chosen").count() == 1


@pytest.mark.browser
def test_script_changes_the_step_by_keyboard(draw, trained):
    page = draw("step_timeline", StepTimeline(trained))
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.model.get('step')") == 0


@pytest.mark.browser
def test_script_fits_a_narrow_column(draw, keep, trained):
    page = draw("step_timeline", StepTimeline(trained), width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep(page, "step_timeline_narrow")
