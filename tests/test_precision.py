"""The loss scale, overflow on one rank, and what travels in which dtype."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from stage_runs import full_params, make_batches, make_config, make_model, train
from torch import nn

import zerolab
from zerolab import comm
from zerolab.errors import UsageError
from zerolab.precision import (
    LossScaler,
    any_rank,
    clip_factor,
    is_finite,
    square_sum,
    step_factor,
)
from zerolab.two_layers import mixed_precision

INF = float("inf")


def scales(scaler, overflows):
    """The scale in use at every step."""
    seen = []
    for overflow in overflows:
        seen.append(scaler.scale)
        scaler.update(overflow)
    return seen


def test_scale_doubles_after_every_window_of_good_steps():
    scaler = LossScaler(scale=8.0, dynamic=True, window=2)
    assert scales(scaler, [False] * 5) == [8, 8, 16, 16, 32]


def test_hysteresis_bears_overflows_before_the_scale_halves():
    scaler = LossScaler(scale=64.0, dynamic=True, window=100, hysteresis=3)
    assert scales(scaler, [True] * 5) == [64, 64, 64, 32, 16]


def test_budget_is_refilled_when_the_scale_grows_or_at_every_good_step():
    outcomes = [True, False, True, True]
    once = LossScaler(scale=64.0, dynamic=True, window=100, hysteresis=2)
    assert scales(once, outcomes) == [64, 64, 64, 32]
    always = LossScaler(
        scale=64.0, dynamic=True, window=100, hysteresis=2, consecutive_hysteresis=True
    )
    assert scales(always, outcomes) == [64, 64, 64, 64]


def test_scale_never_falls_below_its_minimum_and_a_static_one_never_moves():
    falling = LossScaler(scale=4.0, dynamic=True, hysteresis=1, min_scale=2.0)
    assert scales(falling, [True] * 4) == [4, 2, 2, 2]
    assert scales(LossScaler(scale=138.0), [True, False, True]) == [138] * 3
    with pytest.raises(UsageError, match="loss scale 0"):
        LossScaler(scale=0)


def test_norm_and_clipping_match_torch():
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    expected = values.double().square().sum()
    torch.testing.assert_close(square_sum(values), expected, rtol=1e-12, atol=0)
    param = nn.Parameter(torch.zeros(1000))
    param.grad = values[:1000].clone()
    norm = torch.nn.utils.clip_grad_norm_([param], 0.5)
    ours = values[:1000] * clip_factor(norm.double(), 0.5).float()
    torch.testing.assert_close(ours, param.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_infinity_or_nan_anywhere_is_seen_and_a_large_sum_is_none(dtype):
    largest = torch.finfo(dtype).max
    for values, finite in (
        ([1.0, -1.0, 0.0], True),
        ([largest, largest, largest], True),
        ([INF, -INF, 1.0], False),
        ([float("nan"), 1.0, 2.0], False),
        ([], True),
    ):
        bucket = SimpleNamespace(reduced=torch.tensor(values, dtype=dtype))
        assert is_finite(bucket) is finite


class Line(nn.Module):
    """loss = mean of w: every gradient is 1 / numel, exactly, whatever the scale."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self):
        return self.w.float().mean()


def fp16_updates(stage):
    """How far SGD moves a weight in each step, while the dynamic scale doubles every step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1},
    }
    engine, *_ = zerolab.initialize(model=Line(), config=config)
    values, scale = [0.0], []
    for _ in range(4):
        scale.append(engine.scaler.scale)
        engine.backward(engine())
        engine.step()
        values.append(float(full_params(engine)["w"][0]))
    return [before - after for before, after in itertools.pairwise(values)], scale


@pytest.mark.parametrize("stage", range(4))
def test_the_scale_that_multiplied_is_the_one_that_divides_also_when_it_grows(stage):
    for moved, scale in comm.run(fp16_updates, 2, args=(stage,)):
        assert scale == [16, 32, 64, 128]
        assert moved == [0.125] * 4


def poisoned(stage, dtype, bad_rank):
    """Train with an infinity in one rank's second batch; return what every step did."""
    more = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
    }
    config = make_config(stage) | more[dtype]
    engine, *_ = zerolab.initialize(model=make_model("odd"), config=config)
    rank, history = comm.get_rank(), []
    target = engine.config.param_dtype
    for number, (x, y) in enumerate(make_batches("odd", rank, comm.get_world_size(), 2, 4)):
        poison = INF if number == 1 and rank == bad_rank else 1.0
        engine.backward(engine(x.to(target), y.to(target)) * poison)
        engine.step()
        history.append((full_params(engine), engine.skipped_steps, engine.scaler.scale))
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    return history, steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_overflow_on_one_rank_skips_that_step_on_all_and_only_that_step(stage, dtype):
    for history, steps in comm.run(poisoned, 3, args=(stage, dtype, 2)):
        params = [values for values, _, _ in history]
        assert [skipped for _, skipped, _ in history] == [0, 1, 1, 1]
        assert all(torch.equal(params[0][name], params[1][name]) for name in params[0])
        assert not torch.equal(params[1]["first.weight"], params[2]["first.weight"])
        assert all(bool(torch.isfinite(value).all()) for value in params[3].values())
        assert steps == {3}
        if dtype == "fp16":
            assert [scale for _, _, scale in history] == [16, 8, 8, 8]


def test_a_nan_that_bf16_may_not_check_goes_through():
    config = make_config(1) | {"bf16": {"enabled": True, "check_grad_overflow": False}}

    def run():
        engine, *_ = zerolab.initialize(model=make_model("odd"), config=config)
        (x, y), *_ = make_batches("odd", comm.get_rank(), comm.get_world_size(), 2, 1)
        engine.backward(engine(x.bfloat16(), y.bfloat16()) * INF)
        engine.step()
        return engine.skipped_steps

    assert comm.run(run, 2) == [0, 0]


def test_gradients_may_travel_in_fp32_while_parameters_are_bf16():
    more = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    config = make_config(2, "bf16") | more
    results = comm.run(train, 2, args=("odd", config, "bf16"))
    events = comm.run(_reduced_dtypes, 2, args=(config,))[0]
    assert events == {"float32"}
    counts = results[0]["counts"]
    assert results[0]["state_bytes"]["grad"] == 4 * counts["padded"] // 2
    rounded = comm.run(train, 2, args=("odd", make_config(2, "bf16"), "bf16"))
    assert results[0]["losses"] != rounded[0]["losses"]
    assert results[0]["losses"] == pytest.approx(rounded[0]["losses"], rel=2e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("wire", "accum", "expected"),
    [
        (None, None, "bfloat16"),
        (None, "fp32", "float32"),
        ("bf16", "fp32", "bfloat16"),
        ("fp32", None, "float32"),
    ],
)
def test_gradients_travel_in_the_type_that_was_asked_for(stage, wire, accum, expected):
    config = make_config(stage, "bf16")
    config |= {"communication_data_type": wire} if wire else {}
    config |= {"data_types": {"grad_accum_dtype": accum}} if accum else {}
    assert comm.run(_reduced_dtypes, 2, args=(config,)) == [{expected}] * 2


def _reduced_dtypes(config):
    engine, *_ = zerolab.initialize(model=make_model("odd"), config=config)
    (x, y), *_ = make_batches("odd", comm.get_rank(), comm.get_world_size(), 2, 1)
    engine.backward(engine(x.bfloat16(), y.bfloat16()))
    engine.step()
    reductions = [e for e in engine.records().collectives if e.purpose == "data"]
    return {e.dtype for e in reductions if e.op in ("reduce_scatter", "all_reduce")}


def test_fp16_trains_close_to_fp32_at_every_stage():
    expected = comm.run(train, 2, args=("gpt-nano", make_config(0)))[0]["losses"]
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    first = None
    for stage in range(4):
        losses = comm.run(train, 2, args=("gpt-nano", make_config(stage) | fp16))[0]["losses"]
        first = first or losses
        assert losses == first
        assert losses == pytest.approx(expected, rel=5e-3)


def test_the_norm_that_clips_is_that_of_unscaled_gradients():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.125,
        "fp16": {"enabled": True, "initial_scale_power": 4},
    }

    def run():
        engine, *_ = zerolab.initialize(model=Line(), config=config)
        engine.backward(engine())
        engine.step()
        return engine.get_global_grad_norm(), float(full_params(engine)["w"][0])

    for norm, weight in comm.run(run, 2):
        assert norm == pytest.approx(8**0.5 / 8)
        assert -weight == pytest.approx(0.125 / 8**0.5, rel=1e-3)  # the clipped norm, spread evenly


def by_hand(batches):
    """Scales and fp16 weights of the loop on one page."""
    model = two_linears()
    scales = mixed_precision.train_mixed_precision(
        model, batches[comm.get_rank()], lambda ps: torch.optim.SGD(ps, lr=0.5), 16.0, 2
    )
    return scales, [p.detach().clone() for p in model.parameters()]


def by_engine(batches, stage):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {
            "enabled": True,
            "initial_scale_power": 4,
            "loss_scale_window": 2,
            "hysteresis": 1,
        },
    }
    engine, *_ = zerolab.initialize(model=two_linears(), config=config)
    scales = []
    for x, y in batches[comm.get_rank()]:
        scales.append(engine.loss_scale())
        engine.backward(nn.functional.mse_loss(engine(x.half()).float(), y))
        engine.step()
    return scales, list(engine.module_state_dict().values())


def two_linears():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize("stage", range(4))
def test_the_engine_equals_the_loop_on_one_page_to_the_last_bit(stage):
    numbers = torch.Generator().manual_seed(2)
    batches = [
        [(torch.randn(4, 5, generator=numbers), torch.randn(4, 3, generator=numbers))] * 2
        + [(torch.randn(4, 5, generator=numbers), torch.randn(4, 3, generator=numbers) * bad)]
        + [(torch.randn(4, 5, generator=numbers), torch.randn(4, 3, generator=numbers))] * 3
        for bad in (1.0, 1e6, 1.0)
    ]
    expected = comm.run(by_hand, 3, args=(batches,))
    found = comm.run(by_engine, 3, args=(batches, stage))
    for (scales, ours), (theirs_scales, theirs) in zip(found, expected, strict=True):
        assert scales == theirs_scales == [16, 16, 32, 16, 16, 32]
        assert all(torch.equal(a.half(), b) for a, b in zip(ours, theirs, strict=True))


def test_any_rank_asks_all_questions_in_one_small_message():
    def ask():
        rank = comm.get_rank()
        answers = any_rank([rank == 2, False, rank < 2, True], torch.device("cpu"))
        return answers, [(e.op, e.nbytes, e.purpose) for e in comm.records().collectives]

    for answers, events in comm.run(ask, 3):
        assert answers == [True, False, True, True]
        assert events == [("all_reduce", 4, "control")]


@pytest.mark.parametrize("norm", [1e-6, 0.5, 3000.0])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0])
def test_one_factor_unscales_and_clips_as_torch_does_in_two_passes(norm, scale, max_norm):
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.full((1,), norm * scale, dtype=torch.float64) / scale
    torch.nn.utils.clip_grad_norm_([param], max_norm)
    scaled = torch.tensor(norm * scale, dtype=torch.float64)
    factor = step_factor(scaled, scale, max_norm)
    assert factor.dtype == torch.float32
    assert float(scaled * factor.double()) == pytest.approx(param.grad.item(), rel=1e-6)


def test_without_clipping_the_factor_is_the_scale_alone_or_nothing():
    assert step_factor(None, 1.0, 0.0) is None
    assert step_factor(None, 16.0, 0.0).item() == 1 / 16


def test_scales_are_those_of_torchs_grad_scaler():
    outcomes = [False, False, True, False, False, False, True, True, False]
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    param = nn.Parameter(torch.zeros(1))
    optimizer, expected = torch.optim.SGD([param], lr=1.0), []
    for overflow in outcomes:
        expected.append(theirs.get_scale())
        param.grad = theirs.scale(torch.full((1,), INF if overflow else 1.0))
        theirs.step(optimizer)
        theirs.update()
    ours = LossScaler(scale=64.0, dynamic=True, window=2, hysteresis=1)
    assert scales(ours, outcomes) == expected
