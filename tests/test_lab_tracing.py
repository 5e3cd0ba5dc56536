"""lab.trace: one real step as a tree: moments, calls, whose they are, shapes and bytes."""

import sys

import pytest

from zerolab import gpt, lab
from zerolab.errors import UsageError
from zerolab.lab import plug, tracing

PARAM_BYTES = 4 * gpt.num_params(gpt.preset("gpt-nano"))


def shard_bounds(numel, world_size, rank):
    n = -(-numel // world_size)
    return rank * n, (rank + 1) * n


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()


@pytest.fixture(scope="module")
def stage_1():
    return lab.trace(stage=1)


def calls(trace, name, moment=None):
    def walk(node):
        yield node
        for child in node.children:
            yield from walk(child)

    roots = [m for m in trace.moments if moment in (None, m.name)]
    return [node for root in roots for node in walk(root) if node.name == name]


def test_moments_come_in_the_order_of_a_step(stage_1):
    assert [m.name for m in stage_1.moments] == ["init", "forward", "backward", "step"]


def test_a_collective_stands_below_the_function_that_called_it(stage_1):
    (reduce, *_) = calls(stage_1, "zero1.Zero1.reduce", "backward")
    (inner,) = [c for c in reduce.children if c.name.startswith("comm.")]
    assert inner.name == "comm.reduce_scatter" and "input [" in inner.arguments
    assert calls(stage_1, "comm.all_gather", "step") and not calls(
        stage_1, "comm.all_gather", "init"
    )


def test_bytes_are_those_that_stage_1_moves_and_holds(stage_1):
    moved = {m.name: m.moved for m in stage_1.moments}
    assert moved["forward"] == 0
    gathered = sum(node.moved for node in calls(stage_1, "comm.all_gather", "step"))
    assert moved["backward"] == gathered == PARAM_BYTES, "it divides by four: no padding"
    updates = calls(stage_1, "optim.step_bucket", "step")
    steps = 4 * sum(1 for _ in gpt.GPT(gpt.preset("gpt-nano")).parameters())
    assert 0 <= sum(node.held for node in updates) - 2 * PARAM_BYTES // 4 <= steps


def test_what_is_plugged_in_is_yours_at_any_depth_and_nothing_else_is():
    plug.plug("zerolab.flat:shard_bounds", shard_bounds, verified=True)
    trace = lab.trace(stage=1, depth=1)
    own = calls(trace, "flat.shard_bounds")
    assert own and all(node.yours for node in own)
    assert own[0].arguments == "numel 28272, world_size 4, rank 0"
    assert own[0].result == "(0, 7068)"
    text = repr(trace).splitlines()
    assert all(("flat.shard_bounds" in line) == ("yours" in line) for line in text)
    assert any("reference" in line for line in text)


def test_an_unplugged_engine_is_all_reference(stage_1):
    assert "yours" not in repr(stage_1)
    assert "flat.shard_bounds" in repr(stage_1)


def test_text_is_the_same_again(stage_1):
    assert repr(lab.trace(stage=1)) == repr(stage_1)


def test_depth_limits_the_tree():
    trace = lab.trace(stage=0, depth=1)
    below = [c for m in trace.moments for call in m.children for c in call.children]
    assert below and all(c.name.startswith("comm.") and not c.children for c in below)


def test_stage_3_gathers_in_forward_and_again_in_backward():
    trace = lab.trace(stage=3)
    for moment in ("forward", "backward"):
        assert calls(trace, "comm.all_gather", moment)
    assert not calls(trace, "comm.all_gather", "step")
    assert "zero3.Zero3." in repr(trace)


def test_calls_alike_in_a_row_become_one_with_their_bytes_added():
    def call(held, inner):
        return tracing.Node("f", held=held, children=[tracing.Node("g", held=inner)])

    root = tracing.Node("step", children=[call(5, 1), call(6, 2), tracing.Node("h"), call(7, 3)])
    tracing.merge(root)
    first, between, last = root.children
    assert (first.calls, first.held, first.children[0].held) == (2, 11, 3)
    assert (between.name, last.calls, last.held) == ("h", 1, 7)


def test_an_earlier_profiler_is_put_back():
    seen = []

    def profiler(frame, event, value):
        seen.append(event)

    sys.setprofile(profiler)
    try:
        lab.trace(stage=0, depth=1)
        assert sys.getprofile() is profiler and seen
    finally:
        sys.setprofile(None)


def test_html_is_the_text_escaped(stage_1):
    assert "-&gt; (0, 7068)" in stage_1._repr_html_()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"depth": 0}, "depth=0"), ({"stage": 5}, "stage 5"), ({"model": "gpt-9x"}, "gpt-9x")],
)
def test_bad_values_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        lab.trace(**settings)
