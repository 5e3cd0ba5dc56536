"""shard_map: layouts as the engine makes them, mistakes of a plugged function, and the script."""

import json

import pytest

from zerolab import flat, gpt
from zerolab.errors import UsageError
from zerolab.lab import plug
from zerolab_widgets import ShardMap, layouts

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 2)}


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()


def test_layout_is_padded_and_says_who_owns_what():
    (buffer,) = layouts.lay_out(SHAPES, 4)
    assert (buffer.numel, buffer.padded) == (10, 12)
    assert buffer.shards == ((0, 3), (3, 6), (6, 9), (9, 12))
    assert [param.parts for param in buffer.params] == [
        ((0, 3), (1, 3)),
        ((2, 2),),
        ((2, 1), (3, 1)),
    ]
    assert buffer.cuts == [(3, "a.weight"), (9, "b.weight")]
    assert layouts.problems(buffer) == []


def test_buckets_are_those_of_the_engine():
    buffers = layouts.lay_out(SHAPES, 2, bucket_size=6)
    groups = flat.plan_buckets([6, 2, 2], 6)
    assert [[param.name for param in buffer.params] for buffer in buffers] == [
        [list(SHAPES)[position] for position in group] for group in groups
    ]


def test_finding_counts_padding_and_cuts():
    assert layouts.finding(layouts.lay_out(SHAPES, 4)) == (
        "10 elements in one flat buffer, 2 of padding: each of 4 ranks owns 3. "
        "Boundaries cut 2 of 3 parameters."
    )
    assert layouts.finding(layouts.lay_out(SHAPES, 1)).endswith("No boundary cuts a parameter.")


def test_words_about_a_part():
    (buffer,) = layouts.lay_out(SHAPES, 4)
    assert layouts.param_text(buffer.params[0]) == (
        "a.weight (2 x 3) takes elements 0 to 5. Cut by a boundary: rank 0 has 3, rank 1 has 3."
    )
    assert layouts.shard_text(buffer, 3) == (
        "Rank 3 owns 3 elements of b.weight; 2 of them padding: elements 9 to 11."
    )
    assert layouts.padding_text(buffer).startswith("Padding: 2 unused elements")


def test_a_plugged_function_draws_its_own_mistake():
    def floor(numel, world_size, rank):
        n = numel // world_size
        return rank * n, (rank + 1) * n

    plug.plug("zerolab.flat:shard_bounds", floor, verified=False)
    picture = ShardMap(SHAPES, 4)
    assert picture.buffers[0]["shards"][3]["span"] == [6, 8]
    assert "elements 8 to 11 belong to no rank" in picture.finding
    plug.plug("zerolab.flat:shard_bounds", lambda n, w, r: (0, n), verified=False)
    assert "belong to ranks 0, 1, 2 and 3" in ShardMap(SHAPES, 4).finding


def test_shards_of_unequal_length_are_a_mistake():
    def uneven(numel, world_size, rank):
        return (0, 3) if rank == 0 else (3, 12)

    plug.plug("zerolab.flat:shard_bounds", uneven, verified=False)
    assert "not equally long: 3, 9" in ShardMap(SHAPES, 2).finding


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UsageError, match="0 parameters"):
        ShardMap({}, 2)
    with pytest.raises(UsageError, match="world_size=0"):
        ShardMap(SHAPES, 0)
    with pytest.raises(UsageError, match="world_size=33"):
        ShardMap(SHAPES, 33)
    with pytest.raises(UsageError, match="101 parameters in one buffer"):
        ShardMap({str(number): (1,) for number in range(101)}, 2)


def test_state_of_a_whole_model_stays_small_and_repeats():
    model = gpt.GPT(gpt.preset("gpt-10m"))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    first = ShardMap(shapes, 8, bucket_size=500_000)
    assert len(json.dumps(first.get_state(), default=str)) < 50_000
    assert len(json.dumps(ShardMap(shapes, 8).get_state(), default=str)) < 50_000
    assert first.note.startswith("Drawn: the first ") and first.note in first.to_html()
    data, _ = first._repr_mimebundle_()
    assert data["text/html"] == ShardMap(shapes, 8, bucket_size=500_000).to_html()
    assert "<svg" not in data["text/html"] and "data:image/svg+xml" in data["text/html"]
    assert data["text/plain"].startswith("ShardMap: 10,795,008 elements in ")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_tells_of_what_is_pointed_at_and_chosen(draw, keep, dark):
    page = draw("shard_map", ShardMap(SHAPES, 4), dark=dark)
    assert page.locator(".zl-box").count() == 3 + 1 + 4
    assert page.locator(".zl-cuts").count() == 2
    page.get_by_text("a.bias").hover()
    assert page.locator(".zl-said").inner_text().startswith("a.bias (2) takes elements 6 to 7.")
    page.get_by_text("rank 2", exact=True).click()
    assert page.evaluate("window.model.get('selected')") == [0, "shard", 2]
    assert page.locator(".zl-related").count() == 2
    keep(page, f"shard_map_{'dark' if dark else 'light'}")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('selected')") == [0, "shard", 3]
    page.keyboard.press("ArrowUp")
    assert page.evaluate("window.model.get('selected')[1]") == "padding"
    assert "2 unused elements" in page.locator(".zl-said").inner_text()
    assert page.evaluate("document.activeElement.textContent") == "padding"


@pytest.mark.browser
def test_script_draws_many_buckets_and_mistakes(draw, keep):
    shapes = {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in SHAPES.items()}
    page = draw("shard_map", ShardMap(shapes, 2, bucket_size=12))
    assert page.locator(".zl-buffer").count() == len(layouts.lay_out(shapes, 2, 12))
    page.locator(".zl-box").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("window.model.get('selected')[0]") == 1
    plug.plug("zerolab.flat:shard_bounds", lambda n, w, r: (r * 2, r * 2 + 2), verified=False)
    page = draw("shard_map", ShardMap(SHAPES, 4))
    assert page.locator(".zl-problem").count() >= 1
    keep(page, "shard_map_wrong")
