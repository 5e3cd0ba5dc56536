"""What holds for every picture: small, quick, the same twice, for everybody, and hard to break."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import unit_records
from picture_runs import MIB, a_rank, a_step, call, event

from zerolab import lab
from zerolab.records import Mark, RankRow, Records
from zerolab_widgets import (
    CollectiveSteps,
    DeadlockTable,
    EngineMap,
    LiveDashboard,
    MemoryBars,
    MemoryExplorer,
    MemoryTimeline,
    QuizCard,
    ShardMap,
    StepTimeline,
    UnitLifecycle,
)

MOST_STATE = 50_000  # bytes of JSON
EVIL = """<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>&'"""


def bars(ranks, make=MemoryBars):
    picture = make(60 * MIB)
    if make is LiveDashboard:
        picture.advance([[3.0, 2.5] for _ in ranks], ranks)
    picture.finish(ranks)
    return picture


def dashboard(ranks):
    return bars(ranks, LiveDashboard)


def a_table(count=4, text="all_reduce #0"):
    rows = [RankRow(r, "waiting", "recv", r, text, 0.1, "cell:1", text) for r in range(count)]
    return DeadlockTable([*rows[:-1], replace(rows[-1], state="raised", where=text)])


def a_map(name="part"):
    facts = {"does": name, "yours": True, "calls": 2, "moved": 8, "module": "flat"}
    pieces = [{"name": f"{name}_{n}", "moment": "step", **facts} for n in range(3)]
    return EngineMap({"stage": 1, "moments": ["init", "step"], "pieces": pieces})


def lockstep_steps(count=2):
    return [a_step(rank, "lockstep") for rank in range(count)]


PICTURES: dict[str, Callable] = {
    "MemoryBars": lambda: bars([a_rank(rank) for rank in range(4)]),
    "LiveDashboard": lambda: dashboard(lockstep_steps()),
    "MemoryExplorer": MemoryExplorer,
    "MemoryTimeline": lambda: MemoryTimeline([a_rank(rank) for rank in range(4)]),
    "StepTimeline": lambda: StepTimeline(lockstep_steps()),
    "CollectiveSteps": lambda: CollectiveSteps(4),
    "DeadlockTable": a_table,
    "ShardMap": lambda: ShardMap({"a": (2, 3), "b": (5,)}, 4),
    "UnitLifecycle": lambda: UnitLifecycle(unit_records.many_units()),
    "EngineMap": a_map,
    "QuizCard": lambda: QuizCard(lab.quiz("01")),
}


def state_of(picture):
    keys = [key for key in picture.keys if not key.startswith("_")]
    return {key: getattr(picture, key) for key in keys if key not in ("layout", "comm", "tabbable")}


def size_of(picture):
    return len(json.dumps(state_of(picture)))


@pytest.mark.parametrize("name", PICTURES)
def test_state_is_small_and_still_picture_the_same_twice(name):
    first, second = (PICTURES[name]() for _ in range(2))
    assert size_of(first) < MOST_STATE
    data, again = (picture._repr_mimebundle_()[0] for picture in (first, second))
    assert data["text/html"] == again["text/html"] and data["text/plain"] == again["text/plain"]
    assert "<script" not in data["text/html"] and "http" not in data["text/html"]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_picture_keeps_nobody_out(draw, drawn_in, barriers, name, dark):
    page = draw(name, PICTURES[name](), dark=dark)
    assert barriers(page, "#here") == []
    assert drawn_in(page) < 1000


# Everything that can be pressed or moved and is in the order of Tab; of a group of radio buttons
# one is, and of a grid that arrows walk through.
STOPS = """() => {
  const css = 'button:not(:disabled), input, select, textarea, [tabindex="0"]';
  const seen = (node) => node.tabIndex >= 0 && node.getClientRects().length;
  window.stops = [...document.querySelectorAll(css)].filter(seen);
  return window.stops.length;
}"""
KEYS = ("ArrowRight", "ArrowLeft", "ArrowDown", "Enter", "x")


@pytest.mark.browser
@pytest.mark.parametrize("name", PICTURES)
def test_every_control_is_reached_by_tab_and_keys_change_something(draw, name):
    page = draw(name, PICTURES[name]())
    count = page.evaluate(STOPS)
    reached = set()
    for _ in range(count):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("window.stops.indexOf(document.activeElement)"))
        shown = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(shown) != "none", "nobody sees where the focus is"
    assert reached == set(range(count)) and count
    before = page.evaluate("JSON.stringify(state_now())")
    page.evaluate("document.activeElement.blur()")
    changed = False
    for at in range(count):
        for key in KEYS if not changed else ():
            page.evaluate(f"{STOPS}()".replace("() =>", "(() =>", 1).replace("}()", "})()"))
            page.evaluate("(at) => window.stops[at]?.focus()", at)
            page.keyboard.press(key)
            changed = changed or page.evaluate("JSON.stringify(state_now())") != before
    assert changed


def many_ranks(count=64):
    return [replace(a_step(rank, "lockstep"), world_size=count) for rank in range(count)]


def long_run(events=40_000):
    """Very many events in ten steps, with two hundred collectives each."""
    phases = ("forward", "backward", "step")
    held = [(MIB, MIB), (-MIB, 0)]  # asked for and let go, in turn
    memory = [
        event(i / events, *held[i % 2], "temp", i // 2, phases[i // 999 % 3]) for i in range(events)
    ]
    calls = [call(i / 2000, "all_gather", (i + 1.5) / 2000, seq=i) for i in range(2000)]
    marks = [Mark(0.0, "init_done", 0, {}, 0)]
    marks += [Mark((k + 1) / 10, "step_end", 0, {}, 0) for k in range(10)]
    return [Records(0, 1, memory, calls, marks, world="lockstep")]


OF_RUNS = {
    "MemoryBars": bars,
    "LiveDashboard": dashboard,
    "MemoryTimeline": MemoryTimeline,
    "StepTimeline": StepTimeline,
    "UnitLifecycle": UnitLifecycle,
}
RUNS = {"empty": lambda: [Records()], "ranks": many_ranks, "long": long_run}


@pytest.mark.browser
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OF_RUNS)
def test_no_run_is_too_small_or_too_large(draw, drawn_in, name, run):
    picture = OF_RUNS[name](RUNS[run]())
    assert size_of(picture) < MOST_STATE
    page = draw(name, picture)
    assert drawn_in(page) < 1000
    assert page.locator(".zl-finding").inner_text() == picture.finding
    for button in page.locator("button:visible:enabled").all()[:3]:
        button.click(timeout=30_000)


def written_everywhere():
    run = a_step(0, "lockstep")
    run.memory = [replace(each, op=EVIL, where=EVIL) for each in run.memory]
    run.collectives = [replace(each, label=f"{EVIL}/0", where=EVIL) for each in run.collectives]
    return [run]


WITH_NAMES = {
    **{name: (lambda make=make: make(written_everywhere())) for name, make in OF_RUNS.items()},
    "DeadlockTable": lambda: a_table(2, EVIL),
    "ShardMap": lambda: ShardMap({EVIL: (3,)}, 2),
    "EngineMap": lambda: a_map(EVIL),
}


@pytest.mark.browser
@pytest.mark.parametrize("name", WITH_NAMES)
def test_names_are_text_and_never_html(draw, name):
    picture = WITH_NAMES[name]()
    assert EVIL not in picture.to_html() and "<script" not in picture.to_html()
    page = draw(name, picture)
    page.set_content(picture.to_html())
    page.wait_for_timeout(50)
    assert not page.evaluate("window.harmed")
    assert page.locator("img[src='x'], script").count() == 0


def test_a_loss_that_is_no_number_is_left_out_of_the_curve():
    board = LiveDashboard()
    board.advance([[2.0, float("nan"), float("inf"), 1.0]], lockstep_steps(1))
    assert board.losses == [[0, 2.0], [3, 1.0]]
    json.dumps(state_of(board), allow_nan=False)


def test_one_of_a_kind_is_counted_as_one():
    one = a_rank()
    assert bars([one]).finding.startswith("1 GPU; rank 0")
    assert DeadlockTable([RankRow(0, "waiting", "recv", 0, "recv #0", 0.1, "cell:1")]).finding == (
        "Rank 0 waits in recv #0."
    )
