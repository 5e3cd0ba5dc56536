"""Data parallelism on one page, and the engine's stage 0: each is the other's second opinion."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerolab
from zerolab import comm
from zerolab.two_layers import data_parallel

STEPS = 4


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def batches(rank):
    luck = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 5, generator=luck), torch.randn(4, 2, generator=luck)) for _ in range(STEPS)
    ]


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def weights(model):
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def on_one_page():
    model = two_layers(seed=comm.get_rank())  # rank 0's weights must win
    data_parallel.train_data_parallel(model, batches(comm.get_rank()), adamw)
    return weights(model), [e.elements for e in comm.records().collectives if e.purpose == "data"]


def with_the_engine():
    model = two_layers(seed=comm.get_rank())
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
    engine, *_ = zerolab.initialize(model=model, config=config, optimizer=adamw(model.parameters()))
    for inputs, targets in batches(comm.get_rank()):
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()
    return weights(model)


def in_one_process(world_size):
    model = two_layers(seed=0)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [
            F.mse_loss(model(inputs), targets)
            for inputs, targets in (batches(rank)[step] for rank in range(world_size))
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_page_the_engine_and_one_process_train_the_same(world_size):
    alone = in_one_process(world_size)
    page = comm.run(on_one_page, world_size)
    engine = comm.run(with_the_engine, world_size)
    for (trained, sent), theirs in zip(page, engine, strict=True):
        assert torch.allclose(trained, alone, atol=1e-6)
        assert torch.allclose(trained, theirs, atol=1e-6)
        assert sent == [26] * STEPS  # one all-reduce of all gradients a step
        assert torch.equal(trained, page[0][0])


def test_the_page_has_at_most_forty_lines_of_code():
    import inspect

    source = inspect.getsource(data_parallel.train_data_parallel)
    body = source.split('"""')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40
