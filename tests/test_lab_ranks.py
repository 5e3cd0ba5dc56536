"""`%%ranks`: a cell on every rank, whose variables stay."""

import os
import signal
import time

import pytest

from zerolab.comm import pool
from zerolab.errors import DeadlockError, UsageError
from zerolab.lab import ranks

WORLDS = ["lockstep", "gloo"]


@pytest.mark.parametrize("world", WORLDS)
def test_variables_stay_on_their_rank_and_the_last_value_comes_back(world):
    assert ranks.run_on_ranks("mine = 10 * rank", 2, world) == [None, None]
    assert ranks.run_on_ranks("def twice(x):\n    return 2 * x\ntwice(mine)", 2, world) == [0, 20]


@pytest.mark.parametrize("world", WORLDS)
def test_collectives_work_across_cells(world):
    ranks.run_on_ranks("x = torch.full((3,), float(rank + 1))", 2, world)
    assert ranks.run_on_ranks("_ = comm.all_reduce(x)\nx.tolist()", 2, world) == [[3.0] * 3] * 2


def test_output_comes_in_rank_order_with_the_rank(capsys):
    ranks.run_on_ranks("print('hello from', rank)", 3, "gloo")
    lines = [line for line in capsys.readouterr().out.splitlines() if "hello" in line]
    assert lines == [f"[rank {r}] hello from {r}" for r in range(3)]


@pytest.mark.parametrize("world", WORLDS)
def test_an_error_names_the_rank_and_the_line_of_the_cell(world):
    cell = "y = 1\nif rank == 1:\n    raise KeyError('lost')\ncomm.barrier()"
    with pytest.raises(KeyError) as caught:
        ranks.run_on_ranks(cell, 2, world)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes and "raise KeyError('lost')" in notes


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_skips_a_collective_ends_in_the_table(world):
    ranks.run_on_ranks("comm.barrier()", 2, world)  # the start of processes is not measured
    began = time.perf_counter()
    with pytest.raises(DeadlockError) as caught:
        ranks.run_on_ranks("if rank == 0:\n    comm.barrier()", 2, world)
    assert time.perf_counter() - began < 20
    assert "comm.barrier()" in str(caught.value)


def test_restarted_ranks_say_that_their_variables_are_gone(capsys):
    ranks.run_on_ranks("kept = 1", 2, "gloo")
    (pid, _) = ranks.run_on_ranks("import os\nos.getpid()", 2, "gloo")
    os.kill(pid, signal.SIGKILL)
    limit = time.perf_counter() + 20  # a killed process takes a moment to end
    while all(seat.process.is_alive() for seat in pool.the_pool().seats):
        assert time.perf_counter() < limit
        time.sleep(0.01)
    assert ranks.run_on_ranks("'kept' in globals()", 2, "gloo") == [False, False]
    assert "variables of earlier cells are gone" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["-n two", "--worlds gloo", "-n 0", "--world mars", "--timeout 0"])
def test_a_wrong_option_is_one_clear_line(line):
    with pytest.raises(UsageError):
        ranks.ranks(line, "1")
