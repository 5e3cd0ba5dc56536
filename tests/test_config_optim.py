"""Optimizer and scheduler blocks: the class, its arguments, and DeepSpeed's formulas."""

import json
from pathlib import Path

import pytest
import torch

from zerolab import config
from zerolab.config import optimizers, schedulers

SCHEDULES = json.loads((Path(__file__).parent / "data" / "config" / "schedules.json").read_text())
STEEP = {"lr_range_test_step_rate": 1e100, "lr_range_test_step_size": 1}


def load(optimizer=None, scheduler=None):
    raw = {"train_batch_size": 4}
    raw.update({"optimizer": optimizer} if optimizer else {})
    raw.update({"scheduler": scheduler} if scheduler else {})
    return config.load(raw, 2)


def built(kind, params=None, tensors=None, **arguments):
    cfg = load({"type": kind, "params": {**(params or {}), **arguments}})
    return config.build_optimizer(cfg, tensors or [torch.zeros(3, requires_grad=True)])


def trained(optimizer, tensors, grads):
    for step in grads:
        for tensor, grad in zip(tensors, step, strict=True):
            tensor.grad = grad.clone()
        optimizer.step()
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# --- optimizers -----------------------------------------------------------------------------


def test_every_torch_optimizer_is_either_sharded_or_refused_with_a_reason():
    kinds = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"optimizer"}
    assert kinds <= set(optimizers.ELEMENTWISE) | set(optimizers.LAYOUT_DEPENDENT)
    assert not set(optimizers.ELEMENTWISE) & set(optimizers.LAYOUT_DEPENDENT)


@pytest.mark.parametrize("kind", list(optimizers.ELEMENTWISE))
def test_elementwise_optimizers_do_not_see_where_a_parameter_is_cut(kind):
    torch.manual_seed(0)
    start = torch.randn(37, dtype=torch.float64)
    grads = [torch.randn(37, dtype=torch.float64) for _ in range(4)]
    whole = [start.clone().requires_grad_()]
    pieces = [piece.clone().requires_grad_() for piece in start.split([5, 0, 32])]
    params = {"lr": 0.01, "weight_decay": 0.1} if kind not in ("rprop",) else {"lr": 0.01}
    expected = trained(built(kind, params, whole), whole, [[grad] for grad in grads])
    cut = [grad.split([5, 0, 32]) for grad in grads]
    torch.testing.assert_close(trained(built(kind, params, pieces), pieces, cut), expected)


def test_adafactor_does_see_it_and_that_is_why_it_is_refused():
    torch.manual_seed(0)
    start, grad = torch.randn(6, 4), torch.randn(6, 4)
    whole = [start.clone().requires_grad_()]
    pieces = [piece.clone().requires_grad_() for piece in start.flatten().split([10, 14])]
    expected = trained(torch.optim.Adafactor(whole), whole, [[grad]])
    other = trained(torch.optim.Adafactor(pieces), pieces, [grad.flatten().split([10, 14])])
    assert (expected - other).abs().max() > 1e-4


@pytest.mark.parametrize("kind", list(optimizers.LAYOUT_DEPENDENT))
def test_refused_optimizers_say_why(kind):
    with pytest.raises(config.ConfigError) as caught:
        load({"type": kind, "params": {}})
    text = str(caught.value)
    assert optimizers.LAYOUT_DEPENDENT[kind] in text and "use AdamW" in text


def test_adam_decays_as_adamw_unless_adam_w_mode_is_false():
    torch.manual_seed(0)
    start, grads = torch.randn(11), [torch.randn(11) for _ in range(3)]
    arguments = {"lr": 0.1, "weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-6}

    def result(optimizer, tensor):
        return trained(optimizer, [tensor], [[grad] for grad in grads])

    def fresh():
        return start.clone().requires_grad_()

    tensor = fresh()
    decoupled = result(built("Adam", arguments, [tensor]), tensor)
    tensor = fresh()
    coupled = result(built("Adam", arguments, [tensor], adam_w_mode=False), tensor)
    tensor = fresh()
    torch.testing.assert_close(decoupled, result(torch.optim.AdamW([tensor], **arguments), tensor))
    tensor = fresh()
    torch.testing.assert_close(coupled, result(torch.optim.Adam([tensor], **arguments), tensor))
    assert (decoupled - coupled).abs().max() > 0.01


def test_weight_decay_of_adamw_is_deepspeeds_default_not_torchs():
    assert built("AdamW").param_groups[0]["weight_decay"] == 0.0
    assert built("AdamW", weight_decay=0.01).param_groups[0]["weight_decay"] == 0.01


def test_adamw_is_fused_where_torch_can_and_not_where_it_is_told_otherwise():
    assert built("AdamW").param_groups[0]["fused"] is True
    assert built("AdamW", fused=False).param_groups[0]["fused"] is False
    assert built("AdamW", foreach=True).param_groups[0]["fused"] is None
    groups = [{"params": iter([torch.zeros(2, requires_grad=True)]), "lr": 0.5}]
    optimizer = built("AdamW", tensors=groups)
    assert optimizer.param_groups[0]["fused"] is True
    assert (len(optimizer.param_groups[0]["params"]), optimizer.param_groups[0]["lr"]) == (1, 0.5)
    whole_numbers = [torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
    assert built("AdamW", tensors=whole_numbers).param_groups[0]["fused"] is None


def test_lion_follows_its_formula():
    torch.manual_seed(0)
    start, grads = torch.randn(7), [torch.randn(7) for _ in range(3)]
    tensor = start.clone().requires_grad_()
    optimizer = built("Lion", {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.2}, [tensor])
    result = trained(optimizer, [tensor], [[grad] for grad in grads])
    param, mean = start.clone(), torch.zeros(7)
    for grad in grads:
        update = torch.sign(0.9 * mean + 0.1 * grad)
        mean = 0.95 * mean + 0.05 * grad
        param = param - 0.1 * 0.2 * param - 0.1 * update
    torch.testing.assert_close(result, param)


def test_lion_skips_what_has_no_gradient_and_calls_the_closure():
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = built("Lion", tensors=tensors)

    def closure():
        loss = tensors[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert tensors[0][0] != 1 and tensors[1][0] == 1 and len(optimizer.state) == 1


@pytest.mark.parametrize(
    ("block", "must_say"),
    [
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "gradient_clipping at the root"),
        (
            {"type": "AdamW", "params": {"learning_rate": 1}},
            "params.learning_rate: is not an argument",
        ),
        ({"type": "AdamW", "params": {"beta": [0.9, 0.9]}}, "did you mean 'betas'"),
        ({"type": "AdamW", "params": {"lr": "1e-4"}}, "lr should look like 0.001"),
        ({"type": "AdamW", "params": {"lr": -1}}, "Invalid learning rate"),
        ({"type": "AdamW", "params": {"betas": 0.9}}, "betas should look like"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.5]}}, "Invalid beta"),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, 'write "type": "Adam"'),
        ({"type": "Adam", "params": {"bias_correction": False}}, "always corrects the bias"),
        ({"type": "SGD", "params": {"nesterov": True}}, "Nesterov momentum requires"),
        ({"type": "SGD", "params": {"adam_w_mode": True}}, "is not an argument of SGD"),
        ({"type": "Lion", "params": {"betas": [2, 0]}}, "must be two numbers in"),
        ({"type": "AdamW", "params": {"fused": True, "foreach": True}}, "are refused by AdamW"),
        (
            {"type": "Adam", "params": {"decoupled_weight_decay": True}},
            "is not an argument of Adam",
        ),
        ({"type": "SGD", "params": {"lr": 1, "differentiable": True}}, "differentiable: true is"),
        ({"type": "AdamW", "params": {"lr": 1e300}}, "lr: 1e+300 is refused by AdamW"),
        ({"type": "Adadelta", "params": {"weight_decay": 1e300}}, "decay: 1e+300 is refused"),
        ({"type": "Adagard", "params": {}}, "did you mean 'Adagrad'"),
        ({"type": "zzz"}, "take one of"),
    ],
)
def test_optimizer_arguments_are_checked_against_the_class(block, must_say):
    with pytest.raises(config.ConfigError) as caught:
        load(block)
    assert must_say in str(caught.value)


def test_max_grad_norm_moves_to_gradient_clipping_in_the_corrected_file():
    raw = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}}
    assert config.examine(raw, 2).corrected() == {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {}},
        "gradient_clipping": 0.5,
    }


def corrected(block):
    raw = {"train_batch_size": 4, "gradient_clipping": 1.0, "optimizer": block}
    report = config.examine(raw, 2)
    fixed = report.corrected()
    assert config.examine(fixed, 2).stoppers == ()
    return fixed["optimizer"], report.to_fill_in()


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        (
            {"type": "AdamWW", "params": {"lr": 0.02, "weight_decayy": 0.1}},
            {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        ),
        (
            {"type": "AdamW", "params": {"lr": 0.02, "fused": True, "foreach": True}},
            {"type": "AdamW", "params": {"lr": 0.02, "fused": True}},
        ),
        (
            {"type": "OneBitAdam", "params": {"lr": 0.02, "freeze_step": 400}},
            {"type": "AdamW", "params": {"lr": 0.02}},
        ),
        (
            {"type": "AdamW", "params": {"lr": "2e-2", "eps": "1e-6"}},
            {"type": "AdamW", "params": {"lr": 0.02, "eps": 1e-6}},
        ),
        (
            {"type": "AdamW", "params": {"lr": 0.02, "lrr": 7, "foo": 1}},
            {"type": "AdamW", "params": {"lr": 0.02}},
        ),
    ],
)
def test_corrected_block_keeps_what_is_right(block, kept):
    assert corrected(block) == (kept, {})


def test_a_refused_argument_becomes_the_default_and_has_to_be_filled_in():
    block, left = corrected({"type": "AdamW", "params": {"lr": -1, "betas": [2, 0], "eps": 1e-6}})
    assert block == {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-6}}
    assert set(left) == {"optimizer.params.lr", "optimizer.params.betas"}
    assert left["optimizer.params.lr"].startswith("0.001 stands there, the default")


def test_arguments_that_need_each_other_are_judged_together():
    block = {"type": "SGD", "params": {"lr": 0.1, "nesterov": True, "momentum": 0.9}}
    cfg = config.load({"train_batch_size": 4, "optimizer": block}, 2)
    assert cfg.optimizer.params == block["params"]


def test_the_engine_and_the_file_refuse_by_one_list():
    from zerolab import elementwise, optim

    assert optimizers.LAYOUT_DEPENDENT is optim.LAYOUT_DEPENDENT is elementwise.LAYOUT_DEPENDENT
    for name in elementwise.LAYOUT_DEPENDENT:
        with pytest.raises(config.ConfigError.__base__, match="cannot run on shards"):
            optim.refuse_layout_dependent(type(name.upper(), (), {}))


def test_building_reports_what_the_class_finds_only_with_the_parameters():
    cfg = load({"type": "AdamW", "params": {}})
    with pytest.raises(config.ConfigError, match="empty parameter list"):
        config.build_optimizer(cfg, [])


# --- schedules --------------------------------------------------------------------------------


def scheduled(kind, params, steps, lr=0.003, optimizer="AdamW"):
    cfg = load({"type": optimizer, "params": {"lr": lr}}, {"type": kind, "params": params})
    optimizer = config.build_optimizer(cfg, [torch.zeros(1, requires_grad=True)])
    scheduler = config.build_scheduler(cfg, optimizer)
    group = optimizer.param_groups[0]
    lrs, betas = [float(group["lr"])], [group["betas"][0]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        lrs.append(float(group["lr"]))
        betas.append(group["betas"][0])
    return lrs, betas, scheduler


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case["type"])
def test_schedule_matches_numbers_recorded_from_deepspeed(case):
    lrs, betas, scheduler = scheduled(case["type"], case["params"], len(case["lr"]) - 1)
    assert lrs == pytest.approx(case["lr"], rel=1e-12, abs=1e-18)
    assert betas == pytest.approx(case["beta1"], rel=1e-12)
    assert scheduler.get_last_lr() == lrs[-1:]


def test_schedule_resumes_from_its_state():
    params = {"total_num_steps": 20, "warmup_num_steps": 5}
    lrs, _, scheduler = scheduled("WarmupDecayLR", params, 12)
    _, _, other = scheduled("WarmupDecayLR", params, 0)
    state = scheduler.state_dict()
    assert state == {"last_batch_iteration": 11}
    scheduler.step(3)
    other.load_state_dict(state)
    other.step(11)
    assert other.get_last_lr() == [lrs[12]]
    assert scheduler.get_last_lr() == [lrs[4]]


def test_schedule_sets_every_group_its_own_rate_and_keeps_tensor_rates_tensors():
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    rate = torch.tensor(0.5)
    groups = [{"params": tensors[:1], "lr": 0.1}, {"params": tensors[1:], "lr": rate}]
    optimizer = torch.optim.SGD(groups)
    params = {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [0.2, 0.4], "warmup_num_steps": 4}
    scheduler = schedulers.KINDS["WarmupLR"](optimizer, **params)
    for _ in range(6):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 0.4]
    assert optimizer.param_groups[1]["lr"] is rate and float(rate) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="3 values for 2 parameter groups"):
        schedulers.KINDS["WarmupLR"](optimizer, warmup_min_lr=[1.0, 2.0, 3.0])


def test_one_cycle_leaves_the_momentum_of_an_optimizer_without_betas_alone():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], momentum=0.5)
    scheduler = schedulers.KINDS["OneCycle"](optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert "betas" not in optimizer.param_groups[0]


def test_every_torch_schedule_is_either_built_or_refused_with_a_reason():
    module = torch.optim.lr_scheduler
    kinds = {
        name for name in module.__all__ if name not in ("LRScheduler",) and not name.startswith("_")
    }
    assert kinds == set(schedulers.TORCH) | set(schedulers.REFUSED)


def test_torch_schedule_by_name_is_torchs():
    lrs, _, scheduler = scheduled("StepLR", {"step_size": 2, "gamma": 0.5}, 4, lr=1.0)
    assert lrs == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert config.build_scheduler(load(), None) is None


@pytest.mark.parametrize(
    ("block", "must_say"),
    [
        ({"type": "WarmUpLR2"}, "did you mean 'WarmupLR'"),
        ({"type": "LambdaLR"}, "a file cannot hold; build it in the script"),
        ({"type": "SequentialLR"}, "built from other schedulers"),
        ({"type": "ReduceLROnPlateau"}, "needs the validation loss"),
        ({"params": {}}, "scheduler.type: is missing"),
        ({"type": "WarmupDecayLR"}, "total_num_steps: is missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 5}}, "did you mean 'warmup_num_steps'"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "0 must be a positive whole"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "neither 'log' nor 'linear'"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": "x"}}, "refused by"),
        (
            {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e300, **STEEP}},
            "becomes inf",
        ),
        ({"type": "StepLR", "params": {"step_size": 0}}, "are refused by StepLR"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "NaN"}}, "'NaN' must be a number, or a"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": []}}, "0 values for 1 parameter groups"),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": [1, 2], "warmup_max_lr": [1, 2, 3]}},
            "2 values for 3 parameter groups",
        ),
    ],
)
def test_scheduler_block_is_checked(block, must_say):
    with pytest.raises(config.ConfigError) as caught:
        load({"type": "AdamW", "params": {"lr": 1.0}}, block)
    assert must_say in str(caught.value)


def test_the_one_argument_to_blame_is_named_and_left_out_on_one_line():
    params = {"step_size": 5, "last_epoch": 3}
    raw = {"train_batch_size": 4, "optimizer": {"type": "SGD"}}
    report = config.examine(raw | {"scheduler": {"type": "StepLR", "params": params}}, 2)
    (problem,) = report.stoppers
    assert problem.key == "scheduler.params.last_epoch" and "\n" not in str(problem)
    assert report.corrected()["scheduler"]["params"] == {"step_size": 5}
    assert set(report.to_fill_in()) == {"scheduler.params.last_epoch"}


def test_a_rate_for_each_group_needs_the_script_to_make_the_groups():
    """Which groups there are only the script knows: the file is valid, and a note says so."""
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.2, 0.4], "warmup_num_steps": 2}}
    raw = {"train_batch_size": 4, "optimizer": {"type": "SGD"}, "scheduler": block}
    cfg, report = config.load(raw, 2), config.examine(raw, 2)
    assert "2 values, one for each parameter group" in "\n".join(map(str, report.problems))
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [tensor]} for tensor in tensors]
    scheduler = config.build_scheduler(cfg, config.build_optimizer(cfg, groups))
    for _ in range(4):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 0.4]
    one_group = config.build_optimizer(cfg, tensors)
    with pytest.raises(
        config.ConfigError, match=r"scheduler.params: .* 1 parameter groups; change"
    ):
        config.build_scheduler(cfg, one_group)
