"""The empty pages of chapters 04 and 05: a second opinion on stages 1 and 2, forty lines each."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerolab
from zerolab import comm, device
from zerolab.bucket import Bucket
from zerolab.lab.evidence import weights_of
from zerolab.sim import estimate, traffic
from zerolab.two_layers import gradient_sharding, optimizer_sharding
from zerolab.zero2 import keep_own_slice

STEPS, MICRO = 3, 2
ADAMW = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PAGES = (optimizer_sharding.train_sharded_optimizer, gradient_sharding.train_sharded_gradients)


def make_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(number):
    luck = torch.Generator().manual_seed(10 * number + comm.get_rank())
    return torch.randn(4, 7, generator=luck), torch.randn(4, 3, generator=luck)


def on_the_page(stage, accum):
    model = make_model()
    steps = [[batch(accum * step + micro) for micro in range(accum)] for step in range(STEPS)]
    given = [micro_batches[0] for micro_batches in steps] if stage == 1 else steps
    PAGES[stage - 1](model, given, lambda params: torch.optim.AdamW(params, **ADAMW))
    total = {}
    for event in comm.records().collectives:
        total[event.op] = total.get(event.op, 0) + event.elements
    return weights_of(model), total


def with_the_engine(stage, accum):
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accum,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    engine, *_ = zerolab.initialize(model=model, config=config)
    for number in range(STEPS * accum):
        inputs, targets = batch(number)
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()
    engine.close()
    return weights_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("stage", "accum"), [(1, 1), (2, 1), (2, MICRO)])
def test_the_stage_computes_what_the_page_computes(stage, accum, world_size):
    pages = comm.run(on_the_page, world_size, args=(stage, accum))
    engines = comm.run(with_the_engine, world_size, args=(stage, accum))
    for (page, _), engine in zip(pages, engines, strict=True):
        assert page.allclose(engine, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stage", "accum"), [(1, 1), (2, 1), (2, MICRO)])
def test_the_page_moves_what_the_formula_says(stage, accum):
    numels = [param.numel() for param in make_model().parameters()]
    padded = sum(-(-numel // 3) * 3 for numel in ([sum(numels)] if stage == 1 else numels))
    _, total = comm.run(on_the_page, 3, args=(stage, accum))[0]
    assert total == {"reduce_scatter": accum * padded * STEPS, "all_gather": padded * STEPS}
    assert sum(total.values()) == STEPS * estimate.elements_moved(stage, padded, accum)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_at_most_forty_lines_of_code(page):
    source = inspect.getsource(page)
    code = source.replace(f'"""{page.__doc__}"""', "")
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def test_the_kept_slice_is_all_that_stays():
    gpu = device.VirtualGPU()
    with gpu:
        whole = torch.arange(12.0)
        bucket = Bucket(0, "b", [], torch.float32, torch.device("cpu"), 4, 1, True)
        bucket.incoming = whole[3:6]
        kept = keep_own_slice(bucket)
        bucket.incoming = None
        del whole
        assert kept.tolist() == [3.0, 4.0, 5.0] and gpu.by_kind() == {"grad": 12}


@pytest.mark.parametrize(
    ("stage", "accum", "every", "all_reduce", "passes"),
    [(0, 4, None, False, 2), (1, 4, None, False, 1), (2, 4, None, False, 4), (1, 4, True, True, 8)],
)
def test_how_often_reductions_move_the_model(stage, accum, every, all_reduce, passes):
    assert traffic.reduction_passes(stage, accum, every, all_reduce) == passes
