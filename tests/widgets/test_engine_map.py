"""engine_map: the pieces of a real step, the learner's among them, and the script."""

import json

import pytest

from zerolab import flat, lab
from zerolab.errors import UsageError
from zerolab.lab import plug
from zerolab_widgets import EngineMap, engine_map


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()


def write_shard_bounds():
    def shard_bounds(numel, world_size, rank):
        n = flat.padded_numel(numel, world_size) // world_size
        return rank * n, (rank + 1) * n

    plug.plug("zerolab.flat:shard_bounds", shard_bounds, verified=True)


@pytest.fixture(scope="module")
def stage_1():
    """The map of stage 1 on the package's own functions."""
    return lab.engine_map(stage=1)


@pytest.fixture(scope="module")
def stage_3():
    """The map of stage 3 with one function of a learner in it."""
    write_shard_bounds()
    facts = lab.engine_map(stage=3)
    plug.reset()
    return facts


def names(facts, moment):
    return {f"{p['module']}.{p['name']}" for p in facts["pieces"] if p["moment"] == moment}


def test_functions_stand_at_the_moments_at_which_a_step_calls_them(stage_1):
    assert {"flat.shard_bounds", "ddp.DDP.place", "bucket.build_units"} <= names(stage_1, "init")
    after = names(stage_1, "post_backward")
    assert {"bucket.collect", "zero1.Zero1.reduce", "comm.reduce_scatter"} <= after
    step = names(stage_1, "step")
    assert {"optim.step_bucket", "zero1.Zero1.publish", "comm.all_gather"} <= step
    assert "comm.all_gather" not in after and "comm.reduce_scatter" not in step


def test_stage_3_gathers_at_two_moments_and_frees_at_two(stage_3):
    facts = stage_3
    for moment in ("pre_forward", "pre_backward"):
        assert "comm.all_gather" in names(facts, moment), moment
        assert any(name.endswith(f".{moment}") for name in names(facts, moment))
    for moment in ("post_forward", "post_backward"):
        assert any(name.endswith(".reshard") for name in names(facts, moment)), moment
    assert "comm.reduce_scatter" in names(facts, "post_backward")
    assert "comm.all_gather" not in names(facts, "step")


def test_plugged_pieces_are_lit_and_counted(stage_1):
    assert EngineMap(stage_1).finding.endswith("none of them yours so far.")
    write_shard_bounds()
    picture = EngineMap(lab.engine_map(stage=1))
    yours = {(p["module"], p["short"]) for p in picture.pieces if p["yours"]}
    assert yours == {("flat", "shard_bounds")}
    assert picture.finding.endswith("1 of them yours: flat.shard_bounds.")
    assert "shard_bounds (yours)" in picture.to_html()


def test_a_run_is_asked_for_its_map():
    training = lab.train(stage=0, steps=1, model="gpt-nano")
    picture = EngineMap(training)
    assert picture.finding.startswith("Stage 0: a step calls ")
    assert ("comm", "all_reduce") in {(p["module"], p["short"]) for p in picture.pieces}


def test_what_is_no_map_is_refused():
    assert EngineMap().finding.startswith("No step has been traced")
    with pytest.raises(UsageError, match="int is no map"):
        EngineMap(3)
    with pytest.raises(UsageError, match="dict is no map"):
        EngineMap({"stage": 1, "moments": [], "pieces": [{"module": "flat"}]})


def test_a_piece_says_what_it_does(stage_1):
    piece = next(p for p in EngineMap(stage_1).pieces if p["short"] == "step_bucket")
    assert piece["says"].startswith("optim.step_bucket. ")
    assert "Called " in piece["says"] and " at step." in piece["says"]


def test_rows_go_from_what_others_stand_on_upward(stage_1):
    modules = EngineMap(stage_1).modules
    assert modules.index("comm") < modules.index("flat") < modules.index("zero1")
    assert set(modules) <= set(engine_map.MODULES)


def test_state_stays_small_and_the_still_picture_is_the_same_twice(stage_3):
    first = EngineMap(stage_3)
    assert len(json.dumps(first.get_state(), default=str)) < 50_000
    data, _ = first._repr_mimebundle_()
    write_shard_bounds()
    assert data["text/html"] == EngineMap(lab.engine_map(stage=3)).to_html()
    assert data["text/plain"] == f"EngineMap: {first.finding}"


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_lights_yours_and_tells_of_a_choice(draw, keep, stage_3, dark):
    picture = EngineMap(stage_3)
    page = draw("engine_map", picture, dark=dark)
    shown = [piece for piece in picture.pieces if not piece["helper"]]
    assert page.locator(".zl-piece").count() == len(shown) < len(picture.pieces)
    keep(page, f"engine_map_whole_{'dark' if dark else 'light'}")
    assert page.locator(".zl-yours").count() == sum(p["yours"] for p in picture.pieces)
    page.get_by_role("button", name="shard_bounds, yours").first.click()
    chosen = page.evaluate("window.model.get('selected')")
    assert page.locator(".zl-said").inner_text() == picture.pieces[chosen]["says"]
    keep(page, f"engine_map_{'dark' if dark else 'light'}")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("window.model.get('selected')") > chosen
    assert page.evaluate("document.activeElement.className").startswith("zl-piece")
    page.get_by_role("button", name="helpers").click()
    assert page.locator(".zl-piece").count() == len(picture.pieces)
