"""Whose code runs: the line on cards and after runs; engines older than a change say so."""

import pytest
import torch
from torch import nn

import zerolab
from zerolab import comm, flat, lab, zero1
from zerolab.lab import cards, plug, whose
from zerolab.lab.plug import listed

TARGET = "zerolab.flat:shard_bounds"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


@pytest.fixture(autouse=True)
def nothing_plugged_in(monkeypatch):
    monkeypatch.setattr(whose, "_begun", [])
    plug.reset()
    yield
    plug.reset()


def bounds(numel, world_size, rank):
    n = -(-numel // world_size)
    return rank * n, (rank + 1) * n


def test_running_names_the_chapters_functions_and_what_else_is_plugged_in():
    assert repr(lab.running()) == "running on: the reference engine"
    lab.begin("00")
    assert repr(lab.running()) == "running on: reference shard_bounds, reference padded_numel"
    plug.plug(TARGET, bounds, verified=True)
    plug.plug("zerolab.zero1:Zero1", type("Zero1", (zero1.Zero1,), {}), verified=False)
    assert repr(lab.running()) == (
        "running on: your shard_bounds, reference padded_numel, your Zero1 (unverified)"
    )
    assert lab.running(TARGET) is flat.shard_bounds


def test_a_run_says_whose_code_it_ran_on_and_claims_nothing_when_untouched():
    lab.begin("00")
    untouched = lab.train(stage=1, steps=1, model="gpt-nano")
    assert repr(untouched).endswith("running on: the reference engine")
    plug.plug(TARGET, bounds, verified=False)
    mine = lab.train(stage=1, steps=1, model="gpt-nano")
    assert "running on: your shard_bounds (unverified), reference padded_numel" in repr(mine)
    assert "running on: your shard_bounds" in mine._repr_html_()
    plug.reset()
    assert "your shard_bounds" in repr(mine), "it still says what it ran on"


def test_what_the_engine_does_not_use_is_no_part_of_what_it_runs_on():
    plug.plug("zerolab.sim.states:sharded_kinds", lambda stage: (), verified=True)
    assert whose.of_training() == "running on: the reference engine"
    assert "your sharded_kinds" in repr(lab.running())
    modules = whose.engine_modules()
    assert {"zerolab.flat", "zerolab.zero3", "zerolab.bucket", "zerolab.comm"} <= modules
    assert not any(name.startswith(("zerolab.lab", "zerolab.cli")) for name in modules)


# Engines that are older than a change.


def new_engine():
    engine, *_ = zerolab.initialize(model=nn.Linear(3, 2), config=CONFIG)
    return engine


def step(engine):
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()


def test_an_older_engine_asks_once_to_be_built_anew(capsys):
    engine = new_engine()
    plug.plug(TARGET, bounds, verified=True)
    step(engine)
    text = capsys.readouterr().out
    assert text.startswith("This engine was built before shard_bounds changed")
    assert "zerolab.initialize" in text
    step(engine)
    plug.reset()
    step(engine)
    step(new_engine())
    assert capsys.readouterr().out == ""
    engine.close()


def test_what_changed_back_or_to_the_same_code_is_no_change(capsys):
    engine = new_engine()
    with plug.plugged(TARGET, bounds):
        pass
    step(engine)
    engine.close()
    plug.plug(TARGET, bounds, verified=False)
    engine = new_engine()
    plug.plug(TARGET, bounds, verified=True)  # the cell was run again
    step(engine)
    assert capsys.readouterr().out == ""
    engine.close()


def test_only_rank_0_speaks(monkeypatch):
    said = []
    monkeypatch.setattr(cards, "show", said.append)

    def ranks():
        engine = new_engine()
        comm.barrier()
        if comm.get_rank() == 0:
            plug.plug(TARGET, bounds, verified=True)
        comm.barrier()
        step(engine)
        engine.close()

    comm.run(ranks, 2, "lockstep")
    assert [card.heading for card in said] == ["This engine was built before shard_bounds changed"]


def test_a_class_of_the_same_code_is_the_same():
    def zero():
        class Zero1(zero1.Zero1):
            def reduce(self, bucket):
                return None

        return Zero1

    plug.plug("zerolab.zero1:Zero1", zero(), verified=True)
    before = plug.signature()
    plug.plug("zerolab.zero1:Zero1", zero(), verified=True)
    assert plug.signature() == before
    assert listed(["zerolab.zero1:Zero1"] * 2) == "running on: your Zero1"
