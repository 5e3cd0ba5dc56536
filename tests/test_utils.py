"""safe_get_full_* and their setters: the same numbers at every stage, in every precision."""

import logging

import pytest
import torch
from stage_runs import full_params, make_batches, make_config, make_model, to_dtype

import zerolab
from zerolab import UsageError, comm, utils

DTYPES = ("fp32", "bf16")


def make_engine(stage, dtype="fp32", accum=1, **more):
    model = make_model("odd")
    return zerolab.initialize(model=model, config=make_config(stage, dtype, accum, **more))[0]


def batches(count, dtype="fp32"):
    made = make_batches("odd", comm.get_rank(), comm.get_world_size(), 2, count)
    return [to_dtype(batch, dtype) for batch in made]


def everywhere(engine, ask):
    """What a getter says about every parameter, by name."""
    return {name: ask(param) for name, param in engine.module.named_parameters()}


def same(first, second):
    def equal(one, other):
        return one is other if one is None or other is None else torch.equal(one, other)

    return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)


def nothing(answers):
    return {name for name, value in answers.items() if value is None}


FROZEN = {"frozen.weight", "frozen.bias"}
UNUSED = {"never.weight", "never.bias"}

# -- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_weights_are_what_the_optimizer_updates_at_every_stage(dtype, world_size):
    def ask(stage):
        engine = make_engine(stage, dtype)
        start = everywhere(engine, utils.safe_get_full_fp32_param)
        for batch in batches(2, dtype):
            engine.backward(engine(*batch))
            engine.step()
        return start, everywhere(engine, utils.safe_get_full_fp32_param), full_params(engine)

    original = {name: p.detach() for name, p in make_model("odd").named_parameters()}
    first = comm.run(ask, world_size, args=(0,))[0]
    for stage in range(4):
        for start, end, params in comm.run(ask, world_size, args=(stage,)):
            assert nothing(start) == nothing(end) == FROZEN
            for name in start.keys() - FROZEN:
                assert torch.equal(start[name], original[name])  # before rounding to 16 bits
                assert end[name].dtype == torch.float32
                assert torch.equal(end[name].to(params[name].dtype), params[name])
            assert same(end, first[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", range(4))
def test_a_set_weight_is_read_back_and_trained_from(stage, dtype):
    def change(before):
        torch.manual_seed(7)
        value = torch.randn(7, 5)
        model = make_model("odd")
        if before:
            model.first.weight.data.copy_(value)
        engine, *_ = zerolab.initialize(model=model, config=make_config(stage, dtype))
        if not before:
            utils.safe_set_full_fp32_param(model.first.weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(model.first.weight), value)
        batch = batches(1, dtype)[0]
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return {"loss": loss.detach()} | full_params(engine)

    early, late = comm.run(change, 3, args=(True,)), comm.run(change, 3, args=(False,))
    assert all(same(one, other) for one, other in zip(early, late, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", range(4))
def test_local_weights_are_the_pieces_of_the_whole_and_can_be_set(stage, dtype):
    def ask():
        engine = make_engine(stage, dtype)
        param = engine.module.blocks[0].weight
        local, full = utils.safe_get_local_fp32_param(param), utils.safe_get_full_fp32_param(param)
        utils.safe_set_local_fp32_param(param, local * 2)
        return (
            local,
            full,
            utils.safe_get_full_fp32_param(param),
            full_params(engine)["blocks.0.weight"],
        )

    results = comm.run(ask, 3)
    whole = results[0][1].reshape(-1)
    if stage == 0:
        assert all(torch.equal(local, whole) for local, *_ in results)
    else:
        assert torch.equal(torch.cat([local for local, *_ in results]), whole)
    for _, full, doubled, param in results:
        assert torch.equal(doubled, full * 2) and torch.equal(param, doubled.to(param.dtype))


# -- gradients ------------------------------------------------------------------------------


def torch_grads(world_size, count, accum):
    """The mean over ranks and micro-steps, by one process."""
    model = make_model("odd")
    for rank in range(world_size):
        for x, y in make_batches("odd", rank, world_size, 2, count):
            (model(x, y) / (world_size * accum)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_full_gradients_equal_torch(stage, world_size):
    def ask():
        engine = make_engine(stage)
        before = everywhere(engine, utils.safe_get_full_grad)
        engine.backward(engine(*batches(1)[0]))
        grads = everywhere(engine, utils.safe_get_full_grad)
        local = everywhere(engine, utils.safe_get_local_grad)
        engine.step()
        return before, grads, everywhere(engine, utils.safe_get_full_grad), local

    expected = torch_grads(world_size, 1, 1)
    for before, grads, after, local in comm.run(ask, world_size):
        assert nothing(before) == nothing(after) == before.keys()
        assert nothing(grads) == nothing(local) == nothing(expected) == FROZEN | UNUSED
        for name in grads.keys() - FROZEN - UNUSED:
            torch.testing.assert_close(grads[name], expected[name], rtol=1e-5, atol=1e-7)
            assert local[name].numel() <= grads[name].numel()


@pytest.mark.parametrize("reduce", ["boundary", "micro_step"])
@pytest.mark.parametrize("stage", range(4))
def test_full_gradients_are_the_mean_so_far_before_the_boundary(stage, reduce):
    """Whether they are reduced yet or still local; asking twice changes nothing."""

    def ask(curious):
        engine = make_engine(stage, accum=3, zerolab={"reduce": reduce})
        seen = []
        for batch in batches(3):
            engine.backward(engine(*batch))
            if curious:
                everywhere(engine, utils.safe_get_full_grad)
                seen.append(everywhere(engine, utils.safe_get_full_grad))
            engine.step()
        return seen, full_params(engine)

    for (seen, params), (_, undisturbed) in zip(
        comm.run(ask, 2, args=(True,)), comm.run(ask, 2, args=(False,)), strict=True
    ):
        assert same(params, undisturbed)
        for count, grads in enumerate(seen, start=1):
            expected = torch_grads(2, count, 3)
            for name in grads.keys() - FROZEN - UNUSED:
                torch.testing.assert_close(grads[name], expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_after_a_plain_backward_are_whole(stage):
    def ask():
        engine = make_engine(stage)
        engine(*batches(1)[0]).backward()
        grads = everywhere(engine, utils.safe_get_full_grad)
        engine.step()
        return grads, full_params(engine)

    def usual():
        engine = make_engine(stage)
        engine.backward(engine(*batches(1)[0]))
        engine.step()
        return full_params(engine)

    expected, params = torch_grads(2, 1, 1), comm.run(usual, 2)[0]
    for grads, trained in comm.run(ask, 2):
        assert same(trained, params) and nothing(grads) == nothing(expected)
        torch.testing.assert_close(grads["first.weight"], expected["first.weight"])


def test_gradients_come_without_the_loss_scale():
    def ask(scale):
        fp16 = {"enabled": True, "loss_scale": scale}
        engine = make_engine(2, fp16=fp16)
        batch = tuple(t.half() for t in batches(1)[0])
        engine.backward(engine(*batch))
        grad = utils.safe_get_full_grad(engine.module.first.bias)
        utils.safe_set_full_grad(engine.module.first.bias, torch.full((7,), 2.0))
        return grad, utils.safe_get_full_grad(engine.module.first.bias)

    (plain, _), (scaled, back) = comm.run(ask, 2, args=(1,))[0], comm.run(ask, 2, args=(128,))[0]
    torch.testing.assert_close(scaled, plain, rtol=2e-2, atol=1e-4)
    assert back.tolist() == [2.0] * 7


@pytest.mark.parametrize("reduce", ["boundary", "micro_step"])
@pytest.mark.parametrize("stage", range(4))
def test_a_set_gradient_is_the_one_that_is_stepped_with(stage, reduce):
    """SGD with lr 1: the weights move by what was set, also where no rank used the parameter."""

    def change(local):
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        engine = make_engine(stage, zerolab={"reduce": reduce}, optimizer=optimizer)
        params = [engine.module.first.weight, engine.module.never.weight]
        before = [utils.safe_get_full_fp32_param(param) for param in params]
        engine.backward(engine(*batches(1)[0]))
        for param in params:
            if local:
                own = utils.safe_get_local_fp32_param(param)
                utils.safe_set_local_grad(param, torch.ones_like(own))
            else:
                utils.safe_set_full_grad(param, torch.ones(param.shape))
        engine.step()
        after = [utils.safe_get_full_fp32_param(param) for param in params]
        return [torch.equal(b - 1, a) for b, a in zip(before, after, strict=True)]

    assert comm.run(change, 2, args=(False,)) == [[True, True]] * 2
    assert comm.run(change, 2, args=(True,)) == [[True, True]] * 2


def test_a_gradient_set_before_the_boundary_replaces_what_the_ranks_had():
    def change():
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        engine = make_engine(1, accum=2, optimizer=optimizer)
        param = engine.module.first.bias
        before = utils.safe_get_full_fp32_param(param)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        utils.safe_set_full_grad(param, torch.full((7,), 4.0))
        assert utils.safe_get_full_grad(param).tolist() == [4.0] * 7
        assert utils.safe_get_local_grad(param) is None  # not reduced yet
        engine.step()
        engine.backward(engine(x, y) * 0)
        engine.step()
        return torch.equal(before - 4, utils.safe_get_full_fp32_param(param))

    assert comm.run(change, 2) == [True, True]


def test_a_gradient_that_only_one_rank_has_is_the_mean_with_zeros():
    class Fork(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2)

        def forward(self, x):
            return (self.left if comm.get_rank() == 0 else self.right)(x).sum()

    def ask(stage):
        engine, *_ = zerolab.initialize(model=Fork(), config=make_config(stage))
        engine.backward(engine(torch.ones(1, 2)))
        return utils.safe_get_full_grad(engine.module.left.weight)

    for stage in range(3):  # stage 3 gathers a unit whose modules are all in the root
        assert all(grad.unique().tolist() == [0.5] for grad in comm.run(ask, 2, args=(stage,)))


# -- optimizer states -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_optimizer_states_agree_at_every_stage(dtype, world_size):
    def ask(stage):
        engine = make_engine(stage, dtype)
        key = "exp_avg_sq"
        early = everywhere(engine, lambda p: utils.safe_get_full_optimizer_state(p, key))
        engine.backward(engine(*batches(1, dtype)[0]))
        grads = everywhere(engine, utils.safe_get_full_grad)
        engine.step()
        states = everywhere(engine, lambda p: utils.safe_get_full_optimizer_state(p, key))
        steps = everywhere(engine, lambda p: utils.safe_get_full_optimizer_state(p, "step"))
        return early, grads, states, steps

    first = comm.run(ask, world_size, args=(0,))[0]
    for stage in range(4):
        for early, grads, states, steps in comm.run(ask, world_size, args=(stage,)):
            assert nothing(early) == early.keys()
            assert nothing(states) == FROZEN | UNUSED and same(states, first[2])
            for name in states.keys() - FROZEN - UNUSED:
                expected = grads[name].square() * (1 - 0.999)
                torch.testing.assert_close(states[name], expected, rtol=1e-4, atol=1e-9)
                assert steps[name].item() == 1


@pytest.mark.parametrize("stage", range(4))
def test_set_optimizer_states_are_read_back_in_whole_and_in_pieces(stage):
    def change():
        engine = make_engine(stage)
        param = engine.module.blocks[2].weight
        with pytest.raises(UsageError, match="no optimizer state yet"):
            utils.safe_set_full_optimizer_state(param, torch.ones(7, 7), "exp_avg")
        engine.backward(engine(*batches(1)[0]))
        engine.step()
        value = torch.arange(49.0).view(7, 7)
        utils.safe_set_full_optimizer_state(param, value, "exp_avg")
        utils.safe_set_full_optimizer_state(param, torch.tensor(9.0), "step")
        whole = utils.safe_get_full_optimizer_state(param, "exp_avg")
        local = utils.safe_get_local_optimizer_state(param, "exp_avg")
        utils.safe_set_local_optimizer_state(param, local + 1, "exp_avg")
        more = utils.safe_get_full_optimizer_state(param, "exp_avg")
        step = utils.safe_get_full_optimizer_state(param, "step")
        with pytest.raises(UsageError, match=r"'exp_av' is unknown.*exp_avg_sq"):
            utils.safe_get_full_optimizer_state(param, "exp_av")
        return torch.equal(whole, value), torch.equal(more, value + 1), step.item()

    assert comm.run(change, 3) == [(True, True, 9.0)] * 3


# -- mistakes, and life after the engine ----------------------------------------------------


def test_setters_say_why_nothing_can_be_set():
    def mistakes():
        engine = make_engine(2)
        frozen, trained = engine.module.frozen.weight, engine.module.first.weight
        with pytest.raises(UsageError, match="trained by no engine"):
            utils.safe_set_full_fp32_param(frozen, torch.zeros(7, 7))
        with pytest.raises(UsageError, match=r"has shape \(7, 5\), the value \(5, 7\)"):
            utils.safe_set_full_fp32_param(trained, torch.zeros(5, 7))
        with pytest.raises(UsageError, match="no reduced gradient now"):
            utils.safe_set_full_grad(trained, torch.zeros(7, 5))
        with pytest.raises(UsageError, match="no reduced gradient now"):
            utils.safe_set_local_grad(trained, torch.zeros(7))
        with pytest.raises(UsageError, match="this rank has"):
            utils.safe_set_local_fp32_param(trained, torch.zeros(1000))
        stranger = torch.nn.Parameter(torch.zeros(3))
        assert utils.safe_get_full_fp32_param(stranger) is None
        assert utils.safe_get_full_grad(stranger) is None

    comm.run(mistakes, 2)


def test_a_parameter_finds_its_latest_living_engine_and_keeps_none_alive():
    import gc
    import weakref

    model = make_model("odd")
    first, *_ = zerolab.initialize(model=model, config=make_config(1))
    assert zerolab.homes.find(model.first.weight).engine is first
    first.close()
    second, *_ = zerolab.initialize(model=model, config=make_config(1))
    assert zerolab.homes.find(model.first.weight).engine is second
    gone = weakref.ref(second)
    del first, second
    gc.collect()
    assert gone() is None and zerolab.homes.find(model.first.weight) is None
    assert utils.safe_get_full_fp32_param(model.first.weight) is None


# -- what scripts import beside -------------------------------------------------------------


def test_a_repeating_loader_begins_again():
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and iter(loader) is loader


def test_log_dist_speaks_on_the_chosen_ranks_only(caplog):
    caplog.set_level(logging.INFO, "zerolab")
    comm.run(lambda: utils.log_dist("here", ranks=[1]), 3)
    assert caplog.messages == ["[Rank 1] here"]
    comm.run(lambda: utils.log_dist("all"), 2)
    assert len(caplog.messages) == 3
