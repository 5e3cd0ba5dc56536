"""memory_explorer: its bars are the estimates of zerolab.sim, and its controls move them."""

import json
from functools import partial

import pytest

from zerolab import gpt
from zerolab.errors import UsageError
from zerolab.sim import estimate, shapes
from zerolab_widgets import MemoryExplorer, explore
from zerolab_widgets.bars import mib
from zerolab_widgets.explore import Setting

PAPER = Setting(7_500_000_000, 64, micro_batch=0)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_are_those_of_the_paper(stage, gigabytes):
    bar = explore.bars_of(PAPER)[stage]
    states = sum(bar.segments.get(kind, 0) for kind in estimate.STATE_KINDS)
    assert states / 1e9 == pytest.approx(gigabytes, abs=0.05)
    each = estimate.model_states(PAPER.num_params, 64, stage)
    assert {kind: bar.segments[kind] for kind in each} == each


def test_activations_are_those_of_a_gpt_of_that_size_at_every_stage():
    setting = Setting(gpt.num_params(gpt.preset("gpt-7.5b")), 8, micro_batch=2, seq_len=1024)
    wanted = estimate.activation_bytes(gpt.preset("gpt-7.5b"), 2)
    assert [bar.segments["activation"] for bar in explore.bars_of(setting)] == [wanted] * 4


def test_recomputing_leaves_the_outputs_of_blocks_and_one_block():
    setting = Setting(7_500_000_000, 8, seq_len=1024, checkpointed=True)
    shape = shapes.shape_for(setting.num_params, 1024)
    wanted = estimate.activation_bytes(shape, 1, checkpointed=True)
    assert explore.activations(setting) == wanted + estimate.block_activation_bytes(shape, 1)


def test_stage_3_adds_the_root_and_two_units():
    shape = shapes.shape_for(PAPER.num_params)
    root, block, *_ = shapes.unit_numels(shape)
    assert explore.bars_of(PAPER)[3].segments["gathered"] == 2 * (root + 2 * block)
    assert "gathered" not in explore.bars_of(PAPER)[2].segments


@pytest.mark.parametrize("preset", ["gpt-125m", "gpt-1.5b", "gpt-7.5b", "gpt-13b", "gpt-170b"])
def test_a_preset_has_the_shape_of_its_own_size(preset):
    wanted = gpt.preset(preset)
    found = shapes.shape_for(gpt.num_params(wanted), wanted.seq_len)
    assert (found.num_layers, found.dim) == (wanted.num_layers, wanted.dim)
    assert sum(shapes.unit_numels(found)) == gpt.num_params(found)


@pytest.mark.parametrize("psi", [10**8, 10**9, 33 * 10**9, 10**12])
def test_shapes_come_near_any_number_of_parameters(psi):
    assert gpt.num_params(shapes.shape_for(psi)) == pytest.approx(psi, rel=0.1)


def test_shape_of_no_parameters_is_refused():
    with pytest.raises(UsageError, match="num_params 0 is below 1"):
        shapes.shape_for(0)


def test_offload_leaves_the_parameters_and_says_what_the_host_holds():
    setting = Setting(7_500_000_000, 64, 2, micro_batch=0, offload=True)
    bars = explore.bars_of(setting)
    assert "optimizer" in bars[0].segments and "optimizer" not in bars[2].segments
    gpu, host = estimate.offload_states(setting.num_params, 64, 2)
    assert bars[2].segments["param"] == gpu["param"] and explore.on_host(setting) == host
    assert f"In host memory: {mib(sum(host.values()))} for each GPU." in explore.note(setting)
    assert "nothing is offloaded" in explore.note(Setting(10**9, 4, 0, offload=True))


def test_finding_says_who_fits_and_what_is_largest():
    text = explore.finding(Setting(7_500_000_000, 64, 1, micro_batch=0), 80 * 2**30)
    assert text == (
        "7.5 billion parameters on 64 GPUs. Under 80.0 GiB: stage 1, stage 2, stage 3 fit; "
        "stage 0 does not. At stage 1 the largest part is parameters (14.0 GiB of 29.2 GiB)."
    )


def test_what_is_chosen_moves_the_bars_within_200_ms(best_of):
    explorer = MemoryExplorer()
    before = [sum(size for _, size in bar["segments"]) for bar in explorer.bars]
    moves = [partial(setattr, explorer, "world_size", size) for size in (512, 256, 128)]
    assert best_of(*moves) < 0.2
    after = [sum(size for _, size in bar["segments"]) for bar in explorer.bars]
    assert after[0] == before[0] and after[3] < before[3]
    assert "on 128 GPUs" in explorer.finding


def test_stage_and_selected_bar_follow_each_other():
    explorer = MemoryExplorer(stage=2)
    assert explorer.selected == [2, ""]
    explorer.selected = [1, "param"]
    assert explorer.stage == 1 and explorer.selected == [1, "param"]
    explorer.stage = 3
    assert explorer.selected == [3, "param"] and "At stage 3" in explorer.finding


def test_capacity_moves_the_finding():
    explorer = MemoryExplorer(micro_batch=0)
    assert "stage 0 does not" in explorer.finding
    explorer.capacity = 160 * 2**30
    assert "stage 0, stage 1, stage 2, stage 3 fit" in explorer.finding


def test_a_value_that_no_run_can_have_goes_back():
    explorer = MemoryExplorer()
    explorer.world_size = 0
    assert explorer.world_size == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage": 4}, "stage 4 is out of range; give 0 to 3"),
        ({"psi": 0}, "num_params 0 is out of range"),
        ({"precision": "int4"}, "dtype 'int4' is unknown"),
        ({"optimizer": "muon"}, "optimizer 'muon' is unknown"),
        ({"layers": 3}, "'layers' cannot be chosen"),
        ({"capacity": "80GB"}, "80GB"),
    ],
)
def test_bad_values_are_refused_in_one_line(given, message):
    with pytest.raises(UsageError, match=message):
        MemoryExplorer(**given)


def test_still_picture_is_the_same_twice_and_fetches_nothing():
    first, second = (MemoryExplorer()._repr_mimebundle_()[0] for _ in range(2))
    assert first["text/html"] == second["text/html"] and first["text/plain"] == second["text/plain"]
    assert 'alt="7.5 billion parameters' in first["text/html"]
    assert "<svg" not in first["text/html"] and "http" not in first["text/html"]


def test_state_stays_under_50_kb():
    state = {k: v for k, v in MemoryExplorer().get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 50_000


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_draws_four_stages_and_controls(draw, drawn_in, keep, dark):
    page = draw("memory_explorer", MemoryExplorer(), dark=dark)
    assert drawn_in(page) < 1000
    assert page.locator(".zl-column").count() == 4
    assert page.locator(".zl-verdict").all_inner_texts()[0] == "out of memory"
    assert page.locator(".zl-ceiling").inner_text() == "ceiling 80.0 GiB"
    assert "7.50 billion" in page.locator(".zl-choices").inner_text()
    keep(page, f"memory_explorer_{'dark' if dark else 'light'}")


@pytest.mark.browser
def test_script_controls_are_operable_by_keyboard(draw):
    page = draw("memory_explorer", MemoryExplorer())
    page.locator('[data-field="world_size"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('world_size')") == 128
    page.locator('input[data-field="psi"]').focus()
    page.keyboard.press("Home")
    assert page.evaluate("window.model.get('psi')") == 1e8
    page.locator('[data-field="offload"]').focus()
    page.keyboard.press("Space")
    assert page.evaluate("window.model.get('offload')") is True
    page.locator('select[data-field="precision"]').select_option("fp32")
    assert page.evaluate("window.model.get('precision')") == "fp32"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.browser
def test_script_fits_a_narrow_column(draw, keep):
    page = draw("memory_explorer", MemoryExplorer(), width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep(page, "memory_explorer_narrow")
