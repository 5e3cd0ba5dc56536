"""What holds for every small picture: quick, silent on the network, no colour of its own, no motion
where none is wanted, and a still picture that is there without script."""

import re
from pathlib import Path

import pytest
import unit_records

import zerolab_widgets
from zerolab.records import RankRow
from zerolab_widgets import (
    CollectiveSteps,
    DeadlockTable,
    EngineMap,
    ShardMap,
    UnitLifecycle,
    theme,
)

STATIC = Path(zerolab_widgets.__file__).parent / "static"
NAMES = ("collective_steps", "deadlock_table", "shard_map", "unit_lifecycle", "engine_map", "panel")


def a_row(rank):
    return RankRow(rank, "waiting", "recv", 0, f"recv #0 (from rank {rank})", 0.1, "cell:1", "recv")


def an_engine():
    facts = {"does": "Do it.", "yours": True, "calls": 2, "moved": 8}
    pieces = [
        {"module": "flat", "name": f"part_{number}", "moment": moment, **facts}
        for number in range(20)
        for moment in ("init", "step")
    ]
    return {"stage": 1, "moments": ["init", "step"], "pieces": pieces}


PICTURES = {
    "collective_steps": (lambda: CollectiveSteps(8), "at", 1),
    "deadlock_table": (lambda: DeadlockTable([a_row(rank) for rank in range(8)]), "selected", 1),
    "shard_map": (
        lambda: ShardMap({f"p{i}": (i + 1, 7) for i in range(90)}, 16),
        "selected",
        [0, "shard", 3],
    ),
    "unit_lifecycle": (lambda: UnitLifecycle(unit_records.many_units()), "at", 5),
    "engine_map": (lambda: EngineMap(an_engine()), "selected", 3),
}
# The fastest of five: a busy machine makes any single one slow.
REACT = """([field, value]) => {
  const before = window.model.get(field);
  const times = [1, 2, 3, 4, 5].map(() => {
    window.model.set(field, before);
    const began = performance.now();
    window.model.set(field, value);
    document.body.offsetHeight;
    return performance.now() - began;
  });
  return Math.min(...times);
}"""


@pytest.mark.browser
@pytest.mark.parametrize("name", PICTURES)
def test_large_pictures_are_drawn_and_react_at_once(draw, drawn_in, name):
    make, field, value = PICTURES[name]
    page = draw(name, make())
    said = page.locator(".zl-said").inner_text()
    reacted = page.evaluate(REACT, [field, value])
    drawn = drawn_in(page)
    print(f"{name}: drawn in {drawn:.0f} ms, reacted in {reacted:.0f} ms")
    assert drawn < 1000 and reacted < 200
    assert page.locator(".zl-said").inner_text() != said


@pytest.mark.browser
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fit_a_narrow_column(draw, keep, name):
    page = draw(name, PICTURES[name][0](), width=400)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep(page, f"narrow_{name}")


@pytest.mark.browser
def test_pictures_follow_the_theme_of_the_page(draw):
    page = draw("shard_map", PICTURES["shard_map"][0]())
    ink = "getComputedStyle(document.querySelector('.zl-finding')).color"
    before = page.evaluate(ink)
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.wait_for_function(f"{ink} !== {before!r}")


@pytest.mark.browser
def test_nothing_slides_where_motion_is_not_wanted(draw):
    page = draw("collective_steps", CollectiveSteps(4))
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="one step on").click()
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    page.get_by_role("button", name="one step on").click()
    assert page.evaluate("document.getAnimations().length") == 4


@pytest.mark.parametrize("name", NAMES)
def test_scripts_and_sheets_name_no_colour_and_no_address(name):
    text = (STATIC / f"{name}.js").read_text() + (STATIC / f"{name}.css").read_text()
    assert not re.findall(
        r"#[0-9a-fA-F]{3,8}\b|rgba?\(|hsl\(|\b(?:red|green|blue|white|black)\b(?!-)", text
    )
    assert not re.findall(r"https?:|fetch\(|\bimport\b|url\(", text)


@pytest.mark.parametrize("rank", range(10))
def test_numbers_of_ranks_can_be_read_on_their_colours(rank):
    style = theme.rank_style(rank)
    assert theme.contrast(style.ink, style.fill) >= 4.5


def test_no_two_of_the_first_ranks_and_no_two_states_look_alike():
    ranks = [theme.rank_style(rank) for rank in range(16)]
    assert len({(style.fill, style.hatch) for style in ranks}) == 16
    states = theme.UNIT_STATES.values()
    assert len({style.fill for style in states}) == len({style.hatch for style in states}) == 4
    assert all(theme.contrast(style.ink, style.fill) >= 4.5 for style in states)


@pytest.mark.parametrize("name", PICTURES)
def test_still_picture_says_the_finding_and_brings_no_script(name):
    picture = PICTURES[name][0]()
    data, _ = picture._repr_mimebundle_()
    html = data["text/html"]
    assert html.startswith("<p>") and "<table>" in html
    assert "<script" not in html and "<svg" not in html
    assert data["text/plain"] == f"{type(picture).__name__}: {picture.finding}"
