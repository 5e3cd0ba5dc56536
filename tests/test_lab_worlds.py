"""Checks follow ZEROLAB_WORLD: one exercise, its evidence from lockstep, gloo or nccl ranks."""

import linecache
import textwrap

import pytest

from zerolab import comm, lab
from zerolab.lab import evaluate, evidence, exercise, plug
from zerolab.lab.outcome import Outcome, Skipped
from zerolab.lab.sandbox import Sandbox

TARGET = "zerolab.flat:shard_bounds"
FOUND = exercise.find("0.1")
RIGHT = "n = -(-numel // world_size)\nreturn rank * n, (rank + 1) * n\n"
ON_RANKS = "from zerolab import comm\nif comm.get_world() == 'gloo':\n    {}\n" + RIGHT
pytestmark = pytest.mark.timeout(300)


def answer(body, arguments="numel, world_size, rank", before=""):
    """Return a function as a cell defines it; its lines are known."""
    source = f"{before}\ndef shard_bounds({arguments}):\n{textwrap.indent(body, '    ')}"
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace["shard_bounds"]


@pytest.fixture(autouse=True)
def on_gloo(monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORLD", "gloo")
    monkeypatch.setattr("zerolab.lab.checking.strict", lambda: False)
    plug.reset()
    yield
    plug.reset()


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    comm.close_pool()


@pytest.fixture(scope="module")
def sandbox():
    own = Sandbox()
    yield own
    own.close()


def test_right_answer_passes_in_the_child_on_gloo_ranks(sandbox):
    report = sandbox.run(FOUND, answer(RIGHT))
    assert (report.outcome, report.world) == (Outcome.PASS, "gloo"), report.message
    assert any("the weights of plain torch" in fact for fact in report.proven)


def test_wrong_answer_fails_in_the_child_with_its_message(sandbox):
    floors = answer("n = numel // world_size\nreturn rank * n, (rank + 1) * n\n")
    report = sandbox.run(FOUND, floors)
    assert report.outcome is Outcome.FAIL and report.mutant == "drops_the_rest"
    assert "elements 8 to 9 belong to nobody" in report.message


def test_what_is_wrong_on_real_ranks_alone_fails():
    neighbour = answer(ON_RANKS.format("rank = (rank + 1) % world_size"))
    report = evaluate.evaluate(FOUND, neighbour)
    assert report.outcome is Outcome.FAIL and "the weights differ" in report.message
    assert report.world == "gloo" and report.proven[0].startswith("8 layouts")


def test_an_error_on_a_rank_names_the_learners_line():
    broken = answer(ON_RANKS.format("return 1 / 0"))
    report = evaluate.evaluate(FOUND, broken)
    assert report.outcome is Outcome.EXCEPTION and "ZeroDivisionError" in report.message
    assert linecache.getline(report.file, report.line).strip() == "return 1 / 0"


def test_calling_the_reference_on_ranks_is_noticed():
    body = ON_RANKS.format("return theirs(numel, world_size, rank)")
    before = "from zerolab.flat import shard_bounds as reference\n"
    cheat = answer(body, "numel, world_size, rank, theirs=reference", before)
    report = evaluate.evaluate(FOUND, cheat)
    assert report.outcome is Outcome.FAIL and "asked to write" in report.message


def test_a_rank_that_hangs_is_a_timeout_and_the_next_check_works(monkeypatch):
    monkeypatch.setattr(evidence, "HANGING_SECONDS", 3.0)
    report = evaluate.evaluate(FOUND, answer(ON_RANKS.format("while True: pass")))
    assert report.outcome is Outcome.TIMEOUT and not report.usable
    assert "still computing" in report.message
    monkeypatch.setattr(evidence, "HANGING_SECONDS", 60.0)
    assert evaluate.evaluate(FOUND, answer(RIGHT)).outcome is Outcome.PASS


def test_ranks_that_wait_for_each_other_are_a_deadlock():
    report = evaluate.evaluate(FOUND, answer(ON_RANKS.format("rank == 1 and comm.barrier()")))
    assert report.outcome is Outcome.DEADLOCK and "barrier" in report.message


def test_too_few_gpus_skip_the_check_with_the_reason(monkeypatch, capsys):
    monkeypatch.setenv("ZEROLAB_WORLD", "nccl")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    lab.check("0.1", answer(RIGHT), debug=True)
    text = capsys.readouterr().out
    assert "SKIPPED  0.1 shard_bounds" in text and "4 GPUs and this machine has 2" in text
    assert "your shard_bounds (unverified)" in text, "it could not be verified"
    with pytest.raises(Skipped, match="this machine has 2"):
        evidence.run(comm.get_rank, 3)


def test_a_block_plugged_in_for_a_while_travels_too():
    def world_of(numel, world_size, rank):
        return comm.get_world()

    with plug.plugged(TARGET, world_of):
        assert evidence.run(_bounds, 2) == ["gloo", "gloo"]
    assert evidence.run(_bounds, 2) == [(0, 5), (5, 10)]


def test_what_stands_in_for_a_while_may_call_what_was_there_before():
    plug.plug(
        TARGET, answer("n = padded_numel(numel, world_size)\nreturn n, rank\n"), verified=True
    )
    mine = lab.running(TARGET)

    def shifted(numel, world_size, rank):
        return mine(numel, world_size, rank + 10)

    with lab.plugged(TARGET, shifted):
        assert evidence.run(_bounds, 2) == [(10, 10), (10, 11)]


def _bounds():
    from zerolab import flat

    return flat.shard_bounds(10, comm.get_world_size(), comm.get_rank())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiny_run_shows_the_same_in_both_worlds(stage):
    there = evidence.train_tiny(stage, 2)
    here = evidence.train_tiny(stage, 2, world="lockstep")
    alone = evidence.train_tiny_alone(2)
    for mine, reference in zip(there, here, strict=True):
        assert mine.weights.equal(reference.weights) and mine.losses == reference.losses
        assert mine.weights.allclose(alone, atol=evidence.TOLERANCE)
        assert (mine.held, mine.moved, mine.calls) == (
            reference.held,
            reference.moved,
            reference.calls,
        )
        assert sum(mine.peak.values()) > sum(mine.held.values()) > 0
        assert {op for op, _, _ in mine.calls} == set(mine.moved)


def test_tiny_run_takes_a_configuration_and_a_model():
    more = {"bf16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 10}}
    ranks = evidence.train_tiny(1, 2, config=more, world="lockstep")
    gathered = ranks[0].moved["all_gather"]  # with padding
    assert ranks[0].held["master"] == 4 * gathered / 2 and ranks[0].weights.dtype.itemsize == 2
    assert len(ranks[0].calls) > len(evidence.train_tiny(1, 2, world="lockstep")[0].calls)
