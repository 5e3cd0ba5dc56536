"""unit_lifecycle: the states of units from records, made up and real, and the script."""

import html
import json

import pytest
from unit_records import KIB, root_and_block

from zerolab import lab
from zerolab.errors import UsageError
from zerolab.records import Records
from zerolab_widgets import UnitLifecycle, lifecycle, unit_lifecycle


@pytest.fixture(scope="module")
def training():
    """Two real steps of stage 3: in the second it is known what follows what."""
    return lab.train(stage=3, steps=2, model="gpt-nano")


def test_states_follow_call_end_and_death():
    (step,) = lifecycle.steps_of(root_and_block())
    assert step.units == ("root", "blocks.0")
    assert [(moment.unit, moment.what) for moment in step.moments] == [
        ("root", "gather"),
        ("root", "whole"),
        ("blocks.0", "gather"),
        ("blocks.0", "whole"),
        ("blocks.0", "free"),
        ("root", "free"),
    ]
    assert [moment.states for moment in step.moments] == [
        ("in flight", "sharded"),
        ("unsharded", "sharded"),
        ("unsharded", "prefetched"),
        ("unsharded", "unsharded"),
        ("unsharded", "sharded"),
        ("sharded", "sharded"),
    ]
    assert [moment.gathered for moment in step.moments] == [KIB, KIB, 2 * KIB, 2 * KIB, KIB, 0]
    assert step.moments[2].says == (
        "Forward: the all-gather of blocks.0 starts ahead of its turn while root computes. "
        "2 KiB gathered."
    )


def test_finding_counts_gathers_and_names_what_is_never_freed():
    (step,) = lifecycle.steps_of(root_and_block())
    assert step.finding == (
        "Step 1 of rank 0: 2 units, each gathered once; at most 2 KiB of 2 KiB were whole or on "
        "their way; 1 of 2 gathers began ahead of their turn."
    )
    (step,) = lifecycle.steps_of(root_and_block(freed=False))
    assert step.finding.endswith("Not freed: root, blocks.0.")


def test_a_step_that_broke_off_is_a_step():
    records = root_and_block()
    records.marks.pop()
    (step,) = lifecycle.steps_of(records)
    assert step.name == "Step 1, which broke off," and len(step.moments) == 6


def test_a_real_step_gathers_every_unit_twice_and_frees_it(training):
    first, second = lifecycle.steps_of(training.ranks[1].records)
    blocks = [unit for unit in second.units if unit.startswith("blocks.")]
    assert second.units == ("root", *blocks) and len(blocks) > 1
    assert first.counts == second.counts == (2,) * len(second.units)
    assert first.left == second.left == ()
    assert set(second.moments[-1].states) == {"sharded"}
    assert sum(moment.what == "reduce" for moment in second.moments) >= len(second.units)


def test_only_the_second_real_step_gathers_ahead(training):
    first, second = lifecycle.steps_of(training.ranks[0].records)
    assert first.ahead == 0 < second.ahead
    assert {s for m in first.moments for s in m.states} == {"sharded", "in flight", "unsharded"}
    assert "prefetched" in {s for m in second.moments for s in m.states}
    assert second.peak < second.all_bytes


def test_gathered_bytes_are_those_of_the_ledger(training):
    records = training.ranks[0].records
    held, most = 0, 0
    for event in records.memory:
        if event.kind == "gathered" and event.time > records.marks[0].time:
            held += event.delta
            most = max(most, held)
    peaks = [step.peak for step in lifecycle.steps_of(records)]
    assert max(peaks) == most


def test_a_run_without_gathers_says_so():
    picture = UnitLifecycle(lab.train(stage=1, steps=1, model="gpt-nano"))
    assert "no unit was gathered" in picture.finding
    assert html.escape(picture.finding) in picture.to_html()
    assert "no unit was gathered" in UnitLifecycle(Records()).finding


def test_steps_and_ranks_that_are_not_there_are_refused(training):
    with pytest.raises(UsageError, match="step 3"):
        UnitLifecycle(training, step=3)
    with pytest.raises(UsageError, match="rank 9"):
        UnitLifecycle(training, rank=9)


def test_the_first_two_steps_and_the_one_shown_are_kept():
    assert unit_lifecycle.chosen_steps(1, 1) == [1]
    assert unit_lifecycle.chosen_steps(9, 9) == [1, 2, 9]
    assert unit_lifecycle.chosen_steps(9, 5) == [1, 2, 5]


def test_state_stays_small_and_the_still_picture_is_the_same_for_every_run(training):
    first = UnitLifecycle(training)
    assert len(json.dumps(first.get_state(), default=str)) < 50_000
    data, _ = first._repr_mimebundle_()
    again = UnitLifecycle(lab.train(stage=3, steps=2, model="gpt-nano"))
    assert data["text/html"] == again.to_html() and data["text/plain"] == repr(again)
    assert "data:image/svg+xml" in data["text/html"]
    first.step = 0
    assert first.finding.startswith("Step 1 of rank 0")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_units_and_moves_through_moments(draw, keep, training, dark):
    picture = UnitLifecycle(training)
    page = draw("unit_lifecycle", picture, dark=dark)
    units = picture.steps[1]["units"]
    assert page.locator("[data-unit]").count() == len(units)
    for state in ("sharded", "prefetched", "unsharded"):
        assert page.locator(f'[data-state="{state}"]').count() > 0
    page.locator(".zl-grid").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('at')") == 5
    assert page.locator(".zl-said").inner_text() == picture.steps[1]["moments"][5][5]
    assert page.locator(".zl-now[data-unit]").count() == 1
    keep(page, f"unit_lifecycle_{'dark' if dark else 'light'}")
    page.get_by_role("button", name="Step 1").click()
    assert page.locator('[data-state="prefetched"]').count() == 0
    assert page.locator(".zl-finding").inner_text().startswith("Step 1 of rank 0")


@pytest.mark.browser
def test_script_of_a_run_without_gathers_is_a_sentence(draw):
    page = draw("unit_lifecycle", UnitLifecycle(Records()))
    assert "no unit was gathered" in page.locator(".zl-finding").inner_text()
    assert not page.locator(".zl-control").is_visible()
