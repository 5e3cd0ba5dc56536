"""memory_bars: the data it draws, its still picture, and its script in a page without Jupyter."""

import json
import re
from pathlib import Path

import pytest

from zerolab.records import KINDS, MemoryEvent, Records
from zerolab_widgets import MemoryBars, theme
from zerolab_widgets.bars import (
    Bar,
    bar_of_records,
    finding,
    finding_under,
    frames_of_records,
    in_order,
    mib,
    peak_index,
)

MIB = 2**20


def event(time, delta, total, kind, block, phase="forward"):
    return MemoryEvent(time, delta, total, kind, block, "aten.mm", phase, "cell:1")


def a_rank(rank=0, scale=1, start=0.0):
    """Parameters, an activation known as one only in backward, a temporary that goes."""
    mib = MIB * scale
    return Records(
        rank=rank,
        world_size=4,
        memory=[
            event(start + 0.1, 20 * mib, 20 * mib, "param", 0, "init"),
            event(start + 0.2, 30 * mib, 50 * mib, "temp", 1),
            event(start + 0.3, 5 * mib, 55 * mib, "temp", 2),
            event(start + 0.4, -5 * mib, 50 * mib, "temp", 2),
            event(start + 0.5, -30 * mib, 20 * mib, "activation", 1, "backward"),
            event(start + 0.6, 10 * mib, 30 * mib, "grad", 3, "backward"),
        ],
    )


def four_ranks():
    return [a_rank(rank, start=rank / 100) for rank in range(4)]


def a_picture():
    bars = MemoryBars(160 * MIB)
    bars.finish(four_ranks())
    return bars


def test_a_bar_is_the_peak_with_the_kind_a_block_had_last():
    bar = bar_of_records(a_rank())
    assert bar.segments == {"param": 20 * MIB, "activation": 30 * MIB, "temp": 5 * MIB}
    assert bar.peak == bar.total == 55 * MIB


def test_in_order_follows_kinds_and_leaves_out_what_holds_nothing():
    assert list(in_order({"temp": 3, "param": 1, "grad": 0})) == ["param", "temp"]


def test_a_rank_without_events_has_an_empty_bar():
    assert bar_of_records(Records(rank=2)) == Bar("rank 2")
    assert peak_index([]) == -1
    assert frames_of_records([Records()]) == []


def test_frames_end_with_what_is_left_and_hold_each_peak():
    frames = frames_of_records(four_ranks(), count=5)
    assert len(frames) <= 5 + 4
    held = {"param": 20 * MIB, "grad": 10 * MIB}
    assert frames[-1]["bars"] == [["backward", [held.get(kind, 0) for kind in KINDS]]] * 4
    for rank in range(4):
        assert 55 * MIB in [sum(frame["bars"][rank][1]) for frame in frames]


def test_frames_are_ordered_in_time():
    times = [frame["time"] for frame in frames_of_records(four_ranks())]
    assert times == sorted(times)


def test_state_of_a_long_run_stays_under_50_kb():
    ranks = [Records(rank=r) for r in range(4)]
    for records in ranks:
        records.memory = [
            event(i / 1e4, MIB, i * MIB, KINDS[i % len(KINDS)], i) for i in range(5000)
        ]
    bars = MemoryBars(160 * MIB)
    bars.finish(ranks)
    state = {key: value for key, value in bars.get_state().items() if key != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000


def test_finding_names_the_rank_that_failed_and_what_filled_it():
    bars = [Bar("rank 0", {"optimizer": 100 * MIB}, 100 * MIB, failed=True), Bar("rank 1")]
    text = finding(bars, 160 * MIB)
    assert text == (
        "2 GPUs; rank 0 ran out of memory with 100.0 MiB of 160.0 MiB; "
        "most of it: optimizer state (100.0 MiB)."
    )
    assert finding([], None) == "Nothing has run yet."


def test_finding_under_a_ceiling_says_who_fits():
    bars = [Bar(f"stage {k}", {"param": size * MIB}) for k, size in enumerate((80, 40, 20))]
    assert finding_under(bars, 100 * MIB) == "Under 100.0 MiB: stage 0, stage 1, stage 2 fit."
    assert (
        finding_under(bars, 50 * MIB) == "Under 50.0 MiB: stage 1, stage 2 fit; stage 0 does not."
    )
    assert finding_under(bars, 20 * MIB) == "Under 20.0 MiB: stage 2 fits; stage 0, stage 1 do not."
    assert finding_under(bars, MIB) == "Under 1.0 MiB: nothing fits."


def test_moving_the_ceiling_changes_the_finding():
    picture = MemoryBars.of_bars([Bar("stage 0", {"temp": MIB, "param": MIB})], 10 * MIB)
    assert picture.finding == "Under 10.0 MiB: stage 0 fits."
    assert [kind for kind, _ in picture.bars[0]["segments"]] == ["param", "temp"]
    picture.capacity = MIB
    assert picture.finding == "Under 1.0 MiB: nothing fits."


def test_small_sizes_are_shown_in_small_units():
    sizes = [61 * MIB, MIB // 8, 2048, 16, 0]
    assert [mib(size) for size in sizes] == ["61.0 MiB", "128 KiB", "2 KiB", "16 B", "0 B"]
    assert mib(MIB // 4) == "256 KiB" and mib(80 * 2**30) == "80.0 GiB"


def test_repr_and_still_picture_are_the_same_twice():
    first, second = a_picture(), a_picture()
    assert repr(first) == repr(second)
    assert first.to_html() == second.to_html()
    assert "0x" not in repr(first)


def test_mime_bundle_has_view_text_and_html():
    data, _ = a_picture()._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/plain", "text/html"}
    assert "<svg" not in data["text/html"], "inline svg is stripped from untrusted notebooks"
    assert "55.0 MiB" in data["text/html"] and 'alt="4 GPUs' in data["text/html"]


def test_show_draws_a_run_that_goes_on():
    bars = MemoryBars(160 * MIB)
    bars.show([{"param": MIB}, {}], ["init", ""], [MIB, 0])
    assert [bar["segments"] for bar in bars.bars] == [[["param", MIB]], []]


def test_every_kind_has_a_style_of_its_own():
    assert list(theme.KINDS) == list(KINDS)
    for field in ("label", "fill", "hatch", "meaning"):
        assert len({getattr(style, field) for style in theme.KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_label_on_fill_has_contrast(kind):
    style = theme.KINDS[kind]
    assert theme.contrast(style.ink, style.fill) >= 4.5


@pytest.mark.parametrize("lane", theme.LANES)
def test_label_on_a_lane_has_contrast(lane):
    style = theme.LANES[lane]
    assert theme.contrast(style.ink, style.fill) >= 4.5


def test_every_lane_has_a_style_of_its_own():
    for field in ("label", "fill", "hatch"):
        assert len({getattr(style, field) for style in theme.LANES.values()}) == len(theme.LANES)


def test_no_other_file_names_a_colour():
    for path in sorted(Path(theme.__file__).parent.rglob("*.*")):
        if path.suffix in (".py", ".js", ".css") and path.name != "theme.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"#[0-9a-fA-F]{6}\b|rgba?\(", text), path.name


@pytest.mark.parametrize("paper", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_on_paper_has_contrast(paper):
    for ink in (paper.ink, paper.muted, paper.alarm):
        assert theme.contrast(ink, paper.paper) >= 4.5
    assert theme.contrast(paper.ink, paper.track) >= 4.5
    assert theme.contrast(paper.alarm_ink, paper.alarm) >= 4.5
    assert theme.contrast(paper.focus, paper.paper) >= 3


def test_contrast_matches_the_known_extremes():
    assert theme.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert theme.contrast("#777777", "#777777") == 1


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_bars_and_breakdown_on_click(draw, keep, dark):
    bars = MemoryBars(60 * MIB)
    bars.finish(four_ranks(), failed=0, message="CUDA out of memory. Tried to allocate 3.00 MiB.")
    page = draw("memory_bars", bars, dark=dark)
    assert page.locator(".zl-column").count() == 4
    assert page.locator(".zl-failed").count() == 1
    assert page.locator(".zl-ceiling").inner_text() == "ceiling 60.0 MiB"
    page.locator('[data-bar="0"][data-kind="activation"]').click()
    assert page.evaluate("window.model.get('selected')") == [0, "activation"]
    assert "backward needs it" in page.locator(".zl-meaning").inner_text()
    keep(page, f"memory_bars_{'dark' if dark else 'light'}")


@pytest.mark.browser
def test_script_slider_moves_through_the_run(draw, keep):
    bars = a_picture()
    page = draw("memory_bars", bars)
    assert page.locator("output").inner_text() == "every rank at its peak"
    page.locator("input[type=range]").fill("0")
    assert page.evaluate("window.model.get('frame')") == 0
    assert page.locator("output").inner_text() == f"event 1 of {len(bars.frames)}"
    assert page.locator(".zl-sum").first.inner_text() == "20.0 MiB, init"
    page.locator("button", has_text="peaks").click()
    assert page.locator(".zl-sum").first.inner_text() == "55.0 MiB"
    keep(page, "memory_bars_slider")


@pytest.mark.browser
def test_script_is_operable_by_keyboard(draw):
    page = draw("memory_bars", a_picture())
    page.locator('[data-bar="1"][data-kind="param"]').focus()
    page.keyboard.press("Enter")
    assert page.evaluate("window.model.get('selected')") == [1, "param"]
    assert page.evaluate("document.activeElement.dataset.kind") == "param"
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.model.get('frame')") >= 0


@pytest.mark.browser
def test_script_ceiling_slider_says_who_fits(draw, keep):
    stages = [
        Bar("stage 0", {"param": 20 * MIB, "optimizer": 60 * MIB}, 80 * MIB),
        Bar("stage 3", {"param": 5 * MIB, "optimizer": 15 * MIB}, 20 * MIB),
    ]
    page = draw("memory_bars", MemoryBars.of_bars(stages, 100 * MIB), width=560)
    assert page.locator(".zl-verdict").all_inner_texts() == ["fits", "fits"]
    page.locator("input[type=range]").fill("50")
    assert page.locator(".zl-verdict").all_inner_texts() == ["out of memory", "fits"]
    keep(page, "memory_bars_ceiling")
