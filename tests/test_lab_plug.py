"""Plugging: the learner's function in the engine's place, seeing the engine's names first."""

import types

import pytest

from zerolab import flat
from zerolab.lab import plug

TARGET = "zerolab.flat:shard_bounds"


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()


def written_in_a_notebook(source, name="shard_bounds"):
    namespace = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace[name]


def test_plugged_function_is_what_the_engine_calls_until_reset():
    reference = flat.shard_bounds
    plug.plug(TARGET, lambda numel, world_size, rank: (7, 8), verified=True)
    assert flat.shard_bounds(10, 4, 0) == (7, 8)
    assert plug.reference(TARGET) is reference
    plug.plug(TARGET, lambda numel, world_size, rank: (1, 2), verified=False)
    assert flat.shard_bounds(10, 4, 0) == (1, 2)
    plug.reset()
    assert flat.shard_bounds is reference


def test_plugged_function_sees_the_module_before_the_notebook():
    source = """
padded_numel = 3  # a scratch variable of the notebook
def shard_bounds(numel, world_size, rank):
    n = padded_numel(numel, world_size) // world_size
    return rank * n, (rank + 1) * n
"""
    plug.plug(TARGET, written_in_a_notebook(source), verified=True)
    assert flat.shard_bounds(10, 4, 3) == (9, 12)


def test_plugged_function_sees_helpers_but_no_variables_of_the_notebook():
    source = """
import math
world = 4
def up(a, b):
    return math.ceil(a / b)
def shard_bounds(numel, world_size, rank):
    return up(numel, world_size), math.pi, int(3.5), len("ab"), world
"""
    function = plug.rebind(written_in_a_notebook(source), flat)
    with pytest.raises(NameError, match="world"):
        function(10, 4, 0)
    source = source.replace(", world\n", "\n")
    assert plug.rebind(written_in_a_notebook(source), flat)(10, 4, 0)[0] == 3


def test_sibling_that_is_plugged_later_is_seen():
    source = "def shard_bounds(n, w, r):\n    return padded_numel(n, w)\n"
    plug.plug(TARGET, written_in_a_notebook(source), verified=True)
    plug.plug("zerolab.flat:padded_numel", lambda numel, world_size: 99, verified=True)
    assert flat.shard_bounds(10, 4, 0) == 99


def test_global_statement_changes_neither_module_nor_notebook():
    source = (
        "def shard_bounds(n, w, r):\n    global padded_numel\n    padded_numel = 5\n    return 1\n"
    )
    function = written_in_a_notebook(source)
    plug.plug(TARGET, function, verified=True)
    flat.shard_bounds(1, 1, 0)
    assert isinstance(flat.padded_numel, types.FunctionType)
    assert "padded_numel" not in function.__globals__


def test_defaults_and_closures_survive():
    def maker(step):
        def shard_bounds(numel, world_size, rank, *, extra=1):
            return rank * step, rank * step + extra

        return shard_bounds

    assert plug.rebind(maker(5), flat)(0, 0, 2) == (10, 11)


def test_plugged_in_a_with_block_only():
    before = flat.shard_bounds
    with plug.plugged(TARGET, lambda numel, world_size, rank: "inside"):
        assert flat.shard_bounds(1, 1, 0) == "inside"
    assert flat.shard_bounds is before
    with pytest.raises(RuntimeError), plug.plugged(TARGET, lambda: None):
        raise RuntimeError
    assert flat.shard_bounds is before


def test_status_says_whose_and_whether_verified():
    plug.plug(TARGET, lambda n, w, r: (0, 0), verified=False)
    assert plug.status("00") == "running on: your shard_bounds (unverified), reference padded_numel"
