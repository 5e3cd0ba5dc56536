"""Chapter 3's moments: buckets leave in index order, the rest is flushed, means add up."""

import pytest
import torch
from torch import nn

import zerolab
from zerolab import comm
from zerolab.bucket import GradState
from zerolab.lab.chapters import c03_runs as runs


def names(ranks, field):
    return [[getattr(step, field) for step in steps] for steps in ranks]


def test_buckets_leave_in_index_order_on_ranks_whose_gradients_come_in_another_order():
    ranks = comm.run(runs._watched, runs.WORLD_SIZE, args=(runs.Case(),))
    assert list(ranks[0][0].sent) != list(ranks[1][0].sent)
    expected = tuple(f"root/{i}" for i in range(runs.NUM_LAYERS))
    assert all(order == expected for orders in names(ranks, "order") for order in orders)


@pytest.mark.parametrize("reduce", ["boundary", "micro_step"])
@pytest.mark.parametrize("reuse", [False, True])
def test_means_of_every_step_are_those_of_one_process(reduce, reuse):
    case = runs.Case(accum=2, reduce=reduce, reuse=reuse)
    for steps in comm.run(runs._watched, runs.WORLD_SIZE, args=(case,)):
        for step, alone in zip(steps, runs.alone(case), strict=True):
            for name, grad in alone.items():
                assert torch.allclose(step.grads[name], grad, atol=1e-6), name


def test_the_schedule_decides_the_traffic():
    moved = {}
    for reduce in ("boundary", "micro_step"):
        case = runs.Case(accum=2, reduce=reduce)
        moved[reduce] = comm.run(runs._watched, runs.WORLD_SIZE, args=(case,))[0][0].moved
    psi = runs.PADDED * runs.NUM_LAYERS
    assert moved == {"boundary": 2 * psi, "micro_step": 4 * psi}


def one_backward(in_flight, stage=1):
    """Count, at each launch, how many reductions were under way before it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "overlap_comm": in_flight > 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = zerolab.initialize(model=model, config=config)
    under_way = []
    reduce = engine.sharding.reduce
    engine.sharding.reduce = lambda bucket: (
        under_way.append(len(engine.sharding.in_flight)),
        reduce(bucket),
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    states = {bucket.state for bucket in engine.sharding.trainable}
    return under_way, states, len(engine.sharding.in_flight)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_at_most_so_many_reductions_are_under_way_and_none_after_backward(in_flight):
    for under_way, states, left in comm.run(one_backward, 2, args=(in_flight,)):
        assert max(under_way) == in_flight and len(under_way) == 5
        assert states == {GradState.REDUCED} and left == 0


def test_stage_0_waits_for_nothing_until_backward_ends_whatever_overlap_comm_says():
    for under_way, states, left in comm.run(one_backward, 2, args=(0, 0)):
        assert under_way == [0, 1, 2, 3, 4]
        assert states == {GradState.REDUCED} and left == 0
