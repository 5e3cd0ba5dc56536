"""The ladder of ceilings: each lower ceiling defeats a stage, and the next one still fits."""

import pytest
import torch
from stage_runs import make_config

import zerolab
from zerolab import comm, data, device, gpt

# Eight small blocks and short sequences: states, not activations, decide what fits.
SHAPE = gpt.GPTConfig(vocab_size=256, seq_len=16, dim=128, num_heads=4, num_layers=8)
RANKS, STEPS = 4, 2


def climb(stage):
    """Train two steps and return the peak of this rank."""
    config = make_config(stage, "bf16", micro=1)
    config["zero_optimization"]["reduce_bucket_size"] = 50_000
    torch.manual_seed(0)
    engine, *_ = zerolab.initialize(model=gpt.GPT(SHAPE), config=config)
    rank = comm.get_rank()
    stream = data.batches(data.load_text(), rank, RANKS, 1, SHAPE.seq_len, seed=0)
    for _ in range(STEPS):
        engine.backward(engine(*next(stream)))
        engine.step()
    return device.current().peak_bytes


@pytest.fixture(scope="module")
def peaks():
    return [max(comm.run(climb, RANKS, args=(stage,))) for stage in range(4)]


@pytest.mark.parametrize("stage", range(3))
def test_each_ceiling_defeats_one_stage_and_the_next_one_fits(peaks, stage):
    ceiling = (peaks[stage] + peaks[stage + 1]) // 2
    assert peaks[stage + 1] < ceiling < peaks[stage]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        comm.run(climb, RANKS, gpu_memory=ceiling, args=(stage,))
    assert sum(caught.value.breakdown.values()) == caught.value.allocated <= ceiling
    assert max(comm.run(climb, RANKS, gpu_memory=ceiling, args=(stage + 1,))) <= ceiling
