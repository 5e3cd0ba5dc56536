"""What is plugged in here runs in rank processes too, and in nobody else's run."""

import math

import pytest

from zerolab import comm, flat
from zerolab.errors import UsageError
from zerolab.lab import evidence, plug

TARGET = "zerolab.flat:shard_bounds"


def up(numel, world_size):
    return math.ceil(numel / world_size)


def shard_bounds(numel, world_size, rank):
    n = up(numel, world_size)
    return rank * n, (rank + 1) * n


def own_slice():
    return flat.shard_bounds(10, comm.get_world_size(), comm.get_rank())


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()
    comm.close_pool()


def in_processes(function, *args):
    return comm.run(function, 2, "gloo", args=args, timeout=60)


def test_rank_processes_run_on_what_is_plugged_in_and_only_then():
    def shifted(numel, world_size, rank):
        return 100 + rank, padded_numel(numel, world_size)  # noqa: F821 - the module's own

    plug.plug(TARGET, shifted, verified=False)
    plug.plug("zerolab.flat:padded_numel", lambda numel, world_size: 77, verified=True)
    assert in_processes(own_slice) == [(100, 77), (101, 77)]
    assert flat.shard_bounds(1, 1, 0) == (100, 77)
    plug.reset()
    assert in_processes(own_slice) == [(0, 5), (5, 10)], "the warm processes have forgotten it"


def test_a_plugged_function_brings_its_helpers_and_trains_to_the_same_bits():
    plug.plug(TARGET, shard_bounds, verified=True)
    there = in_processes(evidence._tiny_rank, 1)
    plug.reset()
    here = comm.run(evidence._tiny_rank, 2, "lockstep", args=(1,))
    for mine, reference in zip(there, here, strict=True):
        assert mine.losses == reference.losses and mine.moved == reference.moved
        assert mine.weights.equal(reference.weights)


def test_an_error_in_it_is_that_of_the_run_and_the_next_run_works():
    def broken(numel, world_size, rank):
        raise ZeroDivisionError("mine")

    plug.plug(TARGET, broken, verified=False)
    with pytest.raises(ZeroDivisionError, match="mine"):
        in_processes(own_slice)
    plug.reset()
    assert in_processes(own_slice) == [(0, 5), (5, 10)]


def test_a_function_that_cannot_travel_is_named(tmp_path):
    with (tmp_path / "open").open("w") as file:

        def shard_bounds(numel, world_size, rank):
            return file

        plug.plug(TARGET, shard_bounds, verified=False)
        with pytest.raises(UsageError, match="'shard_bounds' cannot travel"):
            in_processes(own_slice)
