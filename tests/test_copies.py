"""Copies of a model that an engine trains: whole and free of the engine, or refused in words."""

import copy
import io
import pickle

import pytest
import torch
from stage_runs import full_params
from test_engine_misuse import STAGES, build, make_loss, make_model, micro_step

import zerolab
from zerolab import comm, zero
from zerolab.errors import UsageError


def whole(engine):
    return zero.GatheredParameters(engine.module.parameters())


def equal(model, params):
    named = dict(model.named_parameters())
    return all(torch.equal(named[name], value) for name, value in params.items())


@torch.no_grad()
def average(ema, model):
    for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 0.1)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_an_average_made_before_initialize_follows_the_weights(stage, world_size):
    def train():
        model = make_model()
        ema = copy.deepcopy(model).requires_grad_(False)
        engine = build(model, stage)
        for number in range(3):
            micro_step(engine, number)
            with zero.GatheredParameters([*engine.module.parameters(), *ema.parameters()]):
                average(ema, engine.module)
        return dict(ema.named_parameters())

    def alone():
        model = make_model()
        ema = copy.deepcopy(model).requires_grad_(False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            sgd.zero_grad()
            losses = [batch_loss(model, number, rank) for rank in range(world_size)]
            (sum(losses) / world_size).backward()
            sgd.step()
            average(ema, model)
        return dict(ema.named_parameters())

    expected = alone()
    for params in comm.run(train, world_size):
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name])


def batch_loss(model, number, rank):
    """The loss of `make_loss` on a given rank."""
    numbers = torch.Generator().manual_seed(10 * number + rank)
    x, y = torch.randn(2, 4, 6, generator=numbers)
    return (model(x) - y).pow(2).mean()


@pytest.mark.parametrize("part", [slice(None), 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_made_inside_gathered_parameters_is_whole_and_free(stage, part):
    """It computes without a collective, trains on its own, and the engine does not notice."""

    def duplicate(copied):
        engine = build(make_model(), stage)
        micro_step(engine, 0)
        if copied:
            with whole(engine):
                twin = copy.deepcopy(engine.module[part])
            before, calls = full_params(engine), len(comm.records().collectives)
            prefix = "" if isinstance(part, slice) else f"{part}."
            mine = {n.removeprefix(prefix): v for n, v in before.items() if n.startswith(prefix)}
            assert equal(twin, mine)
            twin(torch.ones(2, 6)).sum().backward()
            torch.optim.SGD(twin.parameters(), lr=1.0).step()
            assert len(comm.records().collectives) == calls and not equal(twin, mine)
        micro_step(engine, 1)
        return full_params(engine)

    first, second = comm.run(duplicate, 2, args=(True,)), comm.run(duplicate, 2, args=(False,))
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_sharded_parameters_is_refused(act):
    def duplicate():
        engine = build(make_model(), 3)
        for part in (engine.module, engine.module[1]):
            with pytest.raises(UsageError, match=r"'weight' is sharded.*GatheredParameters"):
                act(part)
        micro_step(engine, 0)

    comm.run(duplicate, 2)


def test_the_state_of_sharded_parameters_is_refused_and_the_engine_has_it():
    def save():
        engine = build(make_model(), 3)
        for module in (engine, engine.module, engine.module[1]):
            with pytest.raises(UsageError, match=r"sharded.*engine.module_state_dict"):
                module.state_dict()
        state, expected = engine.module_state_dict(), make_model().state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())

    comm.run(save, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pickled_model_comes_back_whole_and_may_have_an_engine_of_its_own(stage):
    def work():
        engine = build(make_model(), stage)
        micro_step(engine, 0)
        file = io.BytesIO()
        with whole(engine):
            torch.save(engine.module, file)
        model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert equal(model, full_params(engine))
        second = build(model, stage)
        micro_step(second, 1)
        engine.backward(make_loss(engine, 1))
        return [torch.isfinite(value).all() for value in full_params(second).values()]

    assert all(all(finite) for finite in comm.run(work, 2))


def test_an_engine_is_neither_copied_nor_pickled():
    def duplicate():
        engine = build(make_model(), 0)
        for act in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(UsageError, match="cannot be copied or pickled"):
                act(engine)

    comm.run(duplicate, 1)


def test_a_model_copied_after_its_engine_was_closed_trains_with_another():
    def again():
        engine = build(make_model(), 2)
        micro_step(engine, 0)
        engine.close()
        twin = copy.deepcopy(engine.module)
        second, *_ = zerolab.initialize(model=twin, config=engine.config.raw | SGD)
        micro_step(second, 1)
        return second.was_step_applied()

    assert all(comm.run(again, 2))


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
