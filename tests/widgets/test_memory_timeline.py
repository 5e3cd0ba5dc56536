"""memory_timeline: curves against records, thinned without losing a peak; and its script."""

import json

import pytest
from picture_runs import MIB, a_rank, event, four_ranks, out_of_memory

from zerolab import lab
from zerolab.errors import UsageError
from zerolab.records import KINDS, Records
from zerolab_widgets import MemoryTimeline, curves
from zerolab_widgets.curves import changes, chart_of, kept_events, runs_of, shortest
from zerolab_widgets.runs import Run, run_of


@pytest.fixture(scope="module")
def trained():
    return lab.train(model="gpt-nano", dtype="fp32", stage=3, gpu_memory="8MiB")


def a_long_rank(rank, events=8_000):
    """A sawtooth with one peak that a careless thinning would miss."""
    total, memory = 0, []
    for i in range(events):
        delta = 9 * MIB if i == 4_567 else (MIB if i % 2 else -MIB if i else MIB)
        total += delta
        memory.append(
            event(i / 1e4, delta, total, KINDS[i % 2 * 6], i % 100, where=f"cell:{i % 90}")
        )
    return Records(rank=rank, memory=memory)


def held(chart, rank, moment):
    return chart.bars_at(moment)[rank].segments


def test_every_event_of_a_short_run_is_a_moment():
    chart = chart_of(Run(four_ranks()))
    assert chart.moments == 6 and chart.curves[0].at == [0, 1, 2, 3, 4, 5]
    assert held(chart, 0, 2) == {"param": 20 * MIB, "activation": 30 * MIB, "temp": 5 * MIB}
    assert held(chart, 3, 5) == {"param": 20 * MIB, "grad": 10 * MIB}
    assert chart.curves[0].phases == [["init", 0, 0], ["forward", 1, 3], ["backward", 4, 5]]
    assert chart.curves[0].marks == [[4, "backward_end"]]


def test_moments_show_who_allocated_last():
    chart = chart_of(Run([a_rank()]))
    born = [chart.births[number] for number in chart.curves[0].births]
    assert [each[4] for each in born] == [
        "cell:1",
        "cell:2",
        "cell:3",
        "cell:3",
        "cell:3",
        "cell:4",
    ]
    assert curves.birth_text(born[2]) == "5.0 MiB of temporary: aten.gelu, forward, cell:3"


def test_kept_events_are_the_fullest_of_each_stretch():
    totals = [1, 5, 2, 9, 9, 3]
    assert kept_events(totals, 6, 3) == [1, 3, 4]
    assert kept_events(totals, 12, 3) == [3, 4], "a rank that ends early ends early in the picture"
    assert kept_events([], 6, 3) == [] and kept_events(totals, 6, 100) == [0, 1, 2, 3, 4, 5]


def test_a_long_run_keeps_its_peaks_in_less_than_50_kb():
    ranks = [a_long_rank(rank) for rank in range(4)]
    picture = MemoryTimeline(ranks)
    for curve, records in zip(picture._chart.curves, ranks, strict=True):
        assert curve.peak == max(e.total for e in records.memory)
        assert curve.at[curve.peak_moment] == 4_567
    state = {k: v for k, v in picture.get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000
    assert picture.drawn["moments"] > 60


def test_many_ranks_fit_too():
    picture = MemoryTimeline([a_long_rank(rank, 300) for rank in range(64)])
    state = {k: v for k, v in picture.get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000


def test_real_run_agrees_with_its_ledger_at_every_peak(trained):
    chart = chart_of(run_of(trained))
    for rank, curve in zip(trained.ranks, chart.curves, strict=True):
        assert curve.peak == rank.peak_bytes
        shown = held(chart, rank.rank, curve.peak_moment)
        for kind, size in rank.peak_by_kind.items():
            assert abs(shown.get(kind, 0) - size) < 1024


def test_a_real_run_is_drawn_within_a_second(trained, best_of):
    assert best_of(*[lambda: MemoryTimeline(trained)._repr_mimebundle_()] * 3) < 1.0


def test_finding_names_the_fullest_rank_or_the_one_that_failed():
    assert MemoryTimeline(four_ranks()).finding == (
        "4 GPUs; rank 0 peaks at 55.0 MiB, in forward; most of it: activations."
    )
    picture = MemoryTimeline(out_of_memory())
    assert picture.finding == (
        "rank 2 ran out of memory: it held 30.0 MiB of 40.0 MiB and asked for 12.0 MiB more in "
        "aten.mm at cell:5."
    )
    assert picture.rank == 2 and picture.failure["requested"] == 12 * MIB
    assert picture.failure["moment"] == 5, "before what was freed on the way out"
    assert picture.failure["text"] == "CUDA out of memory. Tried to allocate 12.00 MiB."


def test_a_run_without_events_says_so():
    for nothing in (MemoryTimeline([]), MemoryTimeline(Records())):
        assert nothing.finding == "No memory was recorded."
        assert nothing.to_html() == "<p>No memory was recorded.</p>"


@pytest.mark.parametrize("nonsense", [3, "run", None, [1, 2]])
def test_what_is_no_run_is_refused(nonsense):
    with pytest.raises(UsageError, match=r"give what lab\.train returned"):
        MemoryTimeline(nonsense)


def test_rows_are_sent_as_changes_and_runs():
    assert changes([4, 4, 7, 7, 4]) == [[0, 4], [2, 7], [4, 4]]
    assert shortest([4, 4, 7, 7, 4]) == [4, 4, 7, 7, 4] and shortest([4] * 9) == [[0, 4]]
    assert runs_of(["a", "a", "b"]) == [["a", 0, 1], ["b", 2, 2]]


def test_still_picture_is_the_same_twice_and_fetches_nothing():
    first, second = (MemoryTimeline(out_of_memory())._repr_mimebundle_()[0] for _ in range(2))
    assert first["text/html"] == second["text/html"] and first["text/plain"] == second["text/plain"]
    page = first["text/html"]
    assert 'alt="rank 2 ran out of memory' in page and "cell:3" in page
    assert "<svg" not in page and "http" not in page and "0x" not in first["text/plain"]
    assert len(page) < 60_000


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_ranks_capacity_and_the_failure(draw, drawn_in, keep, dark):
    page = draw("memory_timeline", MemoryTimeline(out_of_memory()), dark=dark)
    assert drawn_in(page) < 1000
    assert page.locator(".zl-row").count() == 4
    assert page.locator(".zl-capacity").count() == 4
    assert page.locator(".zl-oom").text_content() == "out of memory: 12.0 MiB more did not fit"
    assert page.locator(".zl-where").inner_text() == "cell:3"
    keep(page, f"memory_timeline_failed_{'dark' if dark else 'light'}")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_a_real_run(draw, drawn_in, keep, trained, dark):
    page = draw("memory_timeline", MemoryTimeline(trained), dark=dark)
    assert drawn_in(page) < 1000
    keep(page, f"memory_timeline_{'dark' if dark else 'light'}")


@pytest.mark.browser
def test_script_scrubber_moves_cursor_bars_and_source_line(draw):
    page = draw("memory_timeline", MemoryTimeline(four_ranks()))
    bars = page.locator(".zl-total")
    assert bars.all_inner_texts() == ["55.0 MiB"] * 4
    page.locator("input[type=range]").focus()
    page.keyboard.press("Home")
    assert bars.all_inner_texts() == ["20.0 MiB"] * 4
    assert page.locator("output").inner_text() == "event 1 of 6, init"
    assert page.locator(".zl-where").inner_text() == "cell:1"
    page.keyboard.press("End")
    assert page.locator(".zl-where").inner_text() == "cell:4"
    assert bars.all_inner_texts() == ["30.0 MiB"] * 4
    page.get_by_role("button", name="peak", exact=True).click()
    assert bars.first.inner_text() == "55.0 MiB"


@pytest.mark.browser
def test_script_takes_a_click_on_a_strip_and_the_name_of_a_rank(draw):
    page = draw("memory_timeline", MemoryTimeline(four_ranks()))
    strip = page.locator(".zl-strip").nth(3)
    box = strip.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + 20)
    assert page.evaluate("[window.model.get('rank'), window.model.get('moment')]") == [3, 5]
    page.locator(".zl-name").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("window.model.get('rank')") == 1
    assert page.locator(".zl-born").inner_text().startswith("rank 1")


@pytest.mark.browser
def test_script_reacts_within_200_ms_to_a_long_run(draw, drawn_in):
    page = draw("memory_timeline", MemoryTimeline([a_long_rank(r) for r in range(4)]))
    took = [
        page.evaluate(
            "(at) => { const began = performance.now(); window.model.set('moment', at);"
            " document.body.offsetHeight; return performance.now() - began; }",
            at,
        )
        for at in (5, 15, 25)
    ]
    assert min(took) < 200
    assert drawn_in(page) < 1000


@pytest.mark.browser
def test_script_fits_a_narrow_column(draw, keep):
    page = draw("memory_timeline", MemoryTimeline(four_ranks()), width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep(page, "memory_timeline_narrow")
