"""What goes wrong in a training loop is refused with a reason, or leaves the numbers right."""

import threading
from contextlib import contextmanager

import pytest
import torch
from stage_runs import full_params, make_config
from torch import nn

import zerolab
from zerolab import comm, device
from zerolab.errors import MismatchError, UsageError
from zerolab.turns import ShardState

STAGES = (0, 1, 2, 3)


class Interrupted(Exception):
    pass


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def build(model, stage, accum=1, optimizer=None):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accum,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20},
    }
    sgd = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zerolab.initialize(model=model, optimizer=sgd, config=config)[0]


def make_loss(engine, number):
    numbers = torch.Generator().manual_seed(10 * number + comm.get_rank())
    x, y = torch.randn(2, 4, 6, generator=numbers)
    return (engine(x) - y).pow(2).mean()


def micro_step(engine, number):
    engine.backward(make_loss(engine, number))
    engine.step()


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# -- what breaks off ------------------------------------------------------------------------


def break_in_backward(engine):
    """Raise in the middle of backward, when some gradients are in the buckets already."""
    weight = engine.module[0][0].weight

    def interrupt(grad):
        raise Interrupted

    loss = make_loss(engine, 7)
    handle = weight.register_hook(interrupt)
    with pytest.raises(Interrupted):
        engine.backward(loss)
    handle.remove()


def break_in_forward(engine):
    def interrupt(*_):
        raise Interrupted

    handle = engine.module[1][1].register_forward_hook(interrupt)
    with pytest.raises(Interrupted):
        make_loss(engine, 7)
    handle.remove()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("break_off", [break_in_backward, break_in_forward])
def test_an_exception_leaves_no_part_of_its_gradients(stage, break_off):
    def train(broken):
        engine = build(make_model(), stage)
        micro_step(engine, 0)
        if broken:
            break_off(engine)
        micro_step(engine, 1)
        return full_params(engine)

    assert equal(comm.run(train, 2, args=(True,))[0], comm.run(train, 2, args=(False,))[0])


@pytest.mark.parametrize("stage", (0, 3))
def test_a_step_that_breaks_off_begins_anew_with_all_its_micro_steps(stage):
    def train(broken):
        engine = build(make_model(), stage, accum=2)
        if broken:
            micro_step(engine, 5)
            break_in_backward(engine)
        for number in range(4):
            micro_step(engine, number)
        return full_params(engine), engine.global_steps

    (first, steps), (second, _) = (comm.run(train, 2, args=(b,))[0] for b in (True, False))
    assert steps == 2 and equal(first, second)


@pytest.mark.parametrize("stage", STAGES)
def test_no_gradient_outlives_a_step_that_was_interrupted(stage):
    def interrupted():
        engine = build(make_model(), stage)
        engine.backward(make_loss(engine, 0))
        whole_step, calls = engine.groups.step, []

        def step(bucket):
            calls.append(bucket)
            if len(calls) == 2:
                raise KeyboardInterrupt
            whole_step(bucket)

        engine.groups.step = step
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        return [b.reduced is None and b.fresh is None for b in engine.sharding.trainable]

    assert all(all(buckets) for buckets in comm.run(interrupted, 2))


@contextmanager
def capacity(extra):
    gpu = device.current()
    gpu.capacity = gpu.allocated_bytes + extra
    try:
        yield
    finally:
        gpu.capacity = None


def test_running_out_of_memory_inside_a_unit_leaves_it_sharded():
    """The unit has two buckets, a weight and a bias, and there is room for the weight only."""

    def gather():
        engine = build(make_model(), 3)
        stage, held = engine.sharding, device.current().allocated_bytes
        unit = stage.units[0]
        with capacity(36 * 4), pytest.raises(torch.OutOfMemoryError):
            stage.unshard(unit)
        turn = stage.turns[unit]
        left = device.current().allocated_bytes - held
        micro_step(engine, 0)
        return len(unit.buckets), left, turn.works, turn.state

    assert comm.run(gather, 2) == [(2, 0, [], ShardState.SHARDED)] * 2


def test_a_mismatch_in_forward_is_the_only_thing_that_is_said():
    """A warning about a second failure, in the hook after the module, would be an error here."""

    def part():
        engine = build(make_model(), 3)
        engine.module[comm.get_rank()](torch.ones(1, 6))

    with pytest.raises(MismatchError):
        comm.run(part, 2)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_has_one_engine_at_a_time(stage):
    def twice():
        model = make_model()
        engine = build(model, stage)
        with pytest.raises(UsageError, match="another engine"):
            build(model, stage)
        engine.close()
        if stage == 3:
            with pytest.raises(UsageError, match="in the shards of another engine"):
                build(model, stage)
        else:
            micro_step(build(model, stage), 0)

    comm.run(twice, 2)


def test_an_optimizer_of_another_model_is_refused():
    def strange():
        with pytest.raises(UsageError, match="not in the model"):
            build(make_model(), 1, optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1))

    comm.run(strange, 1)


def test_the_optimizer_alone_is_refused_and_steps_again_after_close():
    def alone():
        engine = build(make_model(), 2)
        make_loss(engine, 0).backward()
        with pytest.raises(UsageError, match=r"call engine\.step\(\)"):
            engine.optimizer.step()
        engine.step()
        engine.close()
        engine.optimizer.step()

    comm.run(alone, 2)


LOSSES = {
    "no tensor": (lambda out: {"loss": out.sum()}, r"got dict: .* outputs\.loss"),
    "a number": (lambda out: out.sum().item(), "got float"),
    "no scalar": (lambda out: out, r"got shape \(2, 6\): take \.mean\(\)"),
    "no graph": (lambda out: out.sum().detach(), "depends on no trainable parameter"),
    "whole numbers": (lambda out: out.sum().long(), "depends on no trainable parameter"),
    "a new tensor": (
        lambda out: torch.tensor(out.sum().item(), requires_grad=True),
        r"depends on no trainable parameter.*torch\.tensor",
    ),
    "another device": (lambda out: out.sum().to("meta"), "on the meta device"),
    "complex": (lambda out: torch.complex(out, out).sum(), r"complex64: take \.real"),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("stage", (0, 3))
def test_a_loss_that_backward_cannot_start_from_is_explained_in_one_line(stage, kind):
    make, message = LOSSES[kind]

    def train(wrong):
        engine = build(make_model(), stage)
        if wrong:
            with pytest.raises(UsageError, match=message) as caught:
                engine.backward(make(engine(torch.ones(2, 6))))
            assert "\n" not in str(caught.value)
        micro_step(engine, 0)
        return full_params(engine)

    assert equal(comm.run(train, 2, args=(True,))[0], comm.run(train, 2, args=(False,))[0])


# -- what is allowed ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_is_frozen_when_the_engine_is_built_trains_once_unfrozen(stage):
    def train():
        model = make_model()
        model[1].requires_grad_(False)
        engine, frozen = build(model, stage), {}
        for number in range(4):
            micro_step(engine, number)
            if number == 1:
                frozen = full_params(engine)
                model[1].requires_grad_(True)
        return frozen, full_params(engine)

    def reference():
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            model[1].requires_grad_(number > 1)
            make_loss(model, number).backward()
            sgd.step()
            sgd.zero_grad()
        return dict(model.named_parameters())

    frozen, params = comm.run(train, 1)[0]
    start = dict(make_model().named_parameters())
    assert torch.equal(frozen["1.0.weight"], start["1.0.weight"])
    for name, expected in reference().items():
        torch.testing.assert_close(params[name], expected.detach())


def use_part(model, rank):
    """Rank 0 uses all layers, the others only the last one."""
    layers = model if rank == 0 else model[2:]
    return layers(torch.full((4, 6), 1.0 + rank)).pow(2).mean()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_buckets_that_a_rank_does_not_use_are_reduced_in_the_order_of_all(stage):
    def train():
        engine = build(make_model(), stage)
        engine.backward(use_part(engine.module, comm.get_rank()))
        engine.step()
        return full_params(engine)

    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (sum(use_part(model, rank) for rank in range(3)) / 3).backward()
    sgd.step()
    params = comm.run(train, 3)[0]
    for name, expected in model.named_parameters():
        torch.testing.assert_close(params[name], expected.detach())


@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_inputs_to_a_bf16_model_are_explained(stage):
    config = make_config(stage, "bf16")

    def run():
        engine, *_ = zerolab.initialize(model=nn.Linear(3, 3), config=config)
        with pytest.raises(UsageError, match=r"computes in bfloat16.*x.to\(torch.bfloat16\)"):
            engine(torch.randn(2, 3))
        return engine(torch.randn(2, 3).bfloat16()).shape

    assert comm.run(run, 2) == [torch.Size([2, 3])] * 2


def test_a_model_without_anything_to_train_is_refused_in_these_words():
    model = make_model().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter to train"):
        zerolab.initialize(model=model, config=make_config(0))


# -- a model that changes -------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_replaced_after_initialize_is_refused_by_name(stage):
    def work():
        engine = build(make_model(), stage)
        micro_step(engine, 0)
        engine.module[2][0] = nn.Linear(6, 6)
        with pytest.raises(UsageError, match=r"parameter '2.0.weight' was added or replaced after"):
            micro_step(engine, 1)

    comm.run(work, world_size=2)


def test_a_layer_added_frozen_is_nobodys_business():
    def work():
        engine = build(make_model(), stage=1)
        engine.module.append(nn.Linear(6, 6).requires_grad_(False))
        micro_step(engine, 0)
        assert engine.was_step_applied()

    comm.run(work, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_group_added_after_initialize_is_refused(stage):
    def work():
        engine = build(make_model(), stage)
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(UsageError, match="add_param_group before initialize"):
            micro_step(engine, 0)

    comm.run(work, world_size=2)


def assign(model):
    model[1][0].bias.data = torch.full((6,), 0.1)


REPLACE = {"assigned": assign, "converted": lambda model: model.double(), "half": nn.Module.half}


@pytest.mark.parametrize("how", REPLACE)
@pytest.mark.parametrize("stage", STAGES)
def test_data_that_replaces_a_parameter_is_refused_by_name(stage, how):
    """The optimizer would train the bucket, and the model compute with something else."""

    def work():
        engine = build(make_model(), stage)
        micro_step(engine, 0)
        refusal = r"data of parameter '\d.0.\w+' was replaced"
        if stage == 3 and how != "assigned":  # a conversion needs values that are not here
            refusal = r"(double|half|to) needs the values of parameter '0.0.weight'"
        with pytest.raises(UsageError, match=refusal):
            REPLACE[how](engine.module)
            engine.backward(engine(torch.ones(2, 6, dtype=next(engine.parameters()).dtype)).sum())
            engine.step()

    comm.run(work, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_conversion_to_what_the_model_is_already_changes_nothing(stage):
    def work():
        engine = build(make_model(), stage)
        for _ in range(2):
            engine.module.float().to("cpu")
            micro_step(engine, 0)
        return engine.was_step_applied()

    assert all(comm.run(work, world_size=2))


def test_parameters_that_nobody_trains_are_named_once(caplog):
    def work():
        model = make_model()
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
        micro_step(build(model, 1, optimizer=sgd), 0)

    comm.run(work, world_size=2)
    (warning,) = [r.getMessage() for r in caplog.records if "not in the optimizer" in r.message]
    assert warning.startswith("4 parameters require gradients") and "requires_grad_" in warning


def test_a_step_skipped_without_fp16_is_named_with_what_to_look_at(caplog):
    def work():
        engine = build(make_model(), 3)
        engine.backward(make_loss(engine, 0) * torch.inf)
        engine.step()
        return engine.skipped_steps

    assert comm.run(work, world_size=2) == [1, 1]
    (warning,) = [r.getMessage() for r in caplog.records if "step skipped" in r.message]
    assert "a gradient is infinite or NaN; look at the loss of every rank" in warning


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_called_in_another_thread_than_its_rank_is_refused(stage):
    """That thread is no rank: at stage 0 it would train on, on its own."""

    def work():
        engine, errors = build(make_model(), stage), []

        def elsewhere():
            try:
                micro_step(engine, 0)
            except UsageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        micro_step(engine, 0)
        return errors

    for (error,) in comm.run(work, world_size=2):
        assert "made on 2 ranks and is called where the world size is 1" in error


def test_inference_mode_and_complex_parameters_are_refused_at_initialize():
    model = make_model()
    with torch.inference_mode():
        made = make_model()
        with pytest.raises(UsageError, match=r"under torch.inference_mode\(\).*outside"):
            zerolab.initialize(model=model, config=make_config(0))
    with pytest.raises(UsageError, match=r"'0.0.weight' was made under torch.inference_mode"):
        zerolab.initialize(model=made, config=make_config(0))
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"'phase' is torch.complex64.*view_as_real"):
        zerolab.initialize(model=model, config=make_config(0))


def test_lazy_parameters_are_refused_until_they_have_a_shape():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"'0.weight' is lazy.*run the model once"):
        zerolab.initialize(model=model, config=make_config(0))
    model(torch.ones(2, 6))
    assert zerolab.initialize(model=model, config=make_config(0))[0](torch.ones(2, 6)).shape == (
        2,
        3,
    )


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_weights_clipped_by_the_script_stay_clipped_in_bf16(stage):
    """The master weights must follow, or the next step would bring the old values back."""

    def train():
        config = make_config(stage, "bf16") | {
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }
        engine, *_ = zerolab.initialize(model=make_model(), config=config)
        with torch.no_grad():
            for param in engine.module[:2].parameters():
                param.clamp_(-0.01, 0.01)
        engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).sum())
        engine.step()
        return full_params(engine)

    start = make_model()
    for params in comm.run(train, 2):
        for name, value in params.items():
            limit = 0.01 if name < "2" else 10.0
            expected = start.get_parameter(name).detach().bfloat16().clamp(-limit, limit)
            torch.testing.assert_close(value.bfloat16(), expected)


# -- schedules that end, or leave what fp32 can hold ----------------------------------------

SCHEDULES = {
    "one cycle": (
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2),
        r"OneCycleLR has no learning rate for step 4 .*step 3 is done: give the schedule as many",
    ),
    "a table": (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [1.0, 0.5].__getitem__),
        r"LambdaLR has no learning rate for step 3 .*index out of range.*step 2 is done",
    ),
    "too steep": (
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 1e25),
        r"rate of parameter group 0 is 1e\+49 at step 3, set by the schedule ExponentialLR",
    ),
    "not a number": (
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, float("nan")),
        r"rate of parameter group 0 is nan at step 2, set by the schedule ExponentialLR",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stage", (0, 3))
def test_a_schedule_that_ends_is_told_with_its_step_and_the_remedy(stage, name):
    make, refusal = SCHEDULES[name]

    def work():
        model = make_model()
        config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = zerolab.initialize(
            model=model, optimizer=sgd, lr_scheduler=make, config=config
        )
        with pytest.raises(UsageError, match=refusal):
            for number in range(5):
                engine.backward(make_loss(engine, number) * 0)  # the weights stay finite
                engine.step()
        engine.lr_scheduler = None
        engine.set_lr(0.1)
        micro_step(engine, 0)
        return all(bool(value.isfinite().all()) for value in engine.module_state_dict().values())

    assert comm.run(work, 2) == [True, True]


def test_a_schedule_that_waits_for_a_value_is_refused_at_initialize():
    def work():
        with pytest.raises(UsageError, match=r"ReduceLROnPlateau needs.*scheduler.step\(value\)"):
            zerolab.initialize(
                model=make_model(),
                config=make_config(1),
                lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
            )

    comm.run(work, 2)


# -- what was there before initialize -------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9),
}


def stepped(make_optimizer):
    """A model and an optimizer that have taken one step together."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_an_optimizer_that_has_stepped_goes_on(stage, name):
    """Dropped in silence, the moments would begin at zero."""

    def train():
        model, optimizer = stepped(OPTIMIZERS[name])
        engine = build(model, stage, optimizer=optimizer)
        micro_step(engine, 0)
        return engine.module_state_dict()

    model, optimizer = stepped(OPTIMIZERS[name])
    optimizer.zero_grad()
    for rank in range(3):
        numbers = torch.Generator().manual_seed(rank)
        x, y = torch.randn(2, 4, 6, generator=numbers)
        ((model(x) - y).pow(2).mean() / 3).backward()
    optimizer.step()
    for state in comm.run(train, 3):
        torch.testing.assert_close(state, dict(model.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_states_of_whole_parameters_are_refused_after_initialize_and_own_ones_load(stage):
    def work():
        _, other = stepped(OPTIMIZERS["SGD"])
        engine = build(make_model(), stage)
        with pytest.raises(UsageError, match=r"of whole parameters.*load them before initialize"):
            engine.optimizer.load_state_dict(other.state_dict())
        micro_step(engine, 0)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        micro_step(engine, 1)
        engine.close()
        return engine.global_steps

    assert comm.run(work, 2) == [2, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_from_before_initialize_are_in_no_step(stage):
    """`optimizer.zero_grad()` in the loop no longer finds them."""

    def train(before):
        model = make_model()
        if before:
            model(torch.ones(2, 6)).sum().backward()
        engine = build(model, stage)
        engine.optimizer.zero_grad()
        micro_step(engine, 0)
        return full_params(engine)

    assert equal(comm.run(train, 2, args=(True,))[0], comm.run(train, 2, args=(False,))[0])
