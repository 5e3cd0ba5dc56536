"""The closed forms against numbers worked out by hand and against the ZeRO paper's table."""

import pytest
import torch
from torch import nn

from zerolab import gpt
from zerolab.errors import UsageError
from zerolab.sim import estimate


class TwoBlocks(nn.Module):
    """Root: 5 elements. Two blocks of 6 + 3 = 9 elements each."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(5))
        self.blocks = nn.ModuleList(nn.Linear(2, 3) for _ in range(2))


def test_layout_matches_counting_by_hand():
    # Buckets of at most 8: root [5]; each block [bias 3], [weight 6], because 3 + 6 > 8.
    sizes = estimate.layout(TwoBlocks(), bucket_numel=8, world_size=4, rank=0)
    assert sizes == estimate.Layout(
        world_size=4,
        padded_numel=8 + 2 * (4 + 8),
        numel=23,
        own_numel=2 + 2 * (1 + 2),
        num_params=5,
        num_pieces=3 + 2 * (3 + 3),  # borders at 2, 4; 1, 2; 2, 4
    )
    last = estimate.layout(TwoBlocks(), bucket_numel=8, world_size=4, rank=3)
    assert last.own_numel == 0  # 5, 3 and 6 elements fill three shards of 2, 1 and 2


def test_pieces_do_not_count_a_border_at_the_end_of_a_parameter_twice():
    model = nn.Linear(2, 2)  # 2 + 4 elements in one bucket: shards of 3, 3; ends at 2, 6
    assert estimate.layout(model, 8, world_size=2).num_pieces == 3
    assert estimate.layout(model, 8, world_size=3).num_pieces == 3  # borders at 2 (an end), 4
    assert estimate.layout(model, 8, world_size=1).num_pieces == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_ranks_own_every_element_once(world_size):
    model = TwoBlocks()
    ranks = [estimate.layout(model, 8, world_size, rank) for rank in range(world_size)]
    assert sum(sizes.own_numel for sizes in ranks) == 23


SIZES = estimate.Layout(
    world_size=4, padded_numel=1200, numel=1000, own_numel=300, num_params=7, num_pieces=12
)


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        (0, "bf16", {"param": 2400, "grad": 2400, "master": 4800, "optimizer": 8048}),
        (1, "bf16", {"param": 2400, "grad": 2400, "master": 1200, "optimizer": 2428}),
        (2, "bf16", {"param": 2400, "grad": 600, "master": 1200, "optimizer": 2428}),
        (3, "bf16", {"param": 600, "grad": 600, "master": 1200, "optimizer": 2428}),
        (0, "fp32", {"param": 4800, "grad": 4800, "master": 0, "optimizer": 8048}),
        (1, "fp32", {"param": 4800, "grad": 4800, "master": 0, "optimizer": 2428}),
        (2, "fp32", {"param": 4800, "grad": 1200, "master": 0, "optimizer": 2428}),
        (3, "fp32", {"param": 1200, "grad": 1200, "master": 0, "optimizer": 2428}),
    ],
)
def test_state_bytes_match_numbers_worked_out_by_hand(stage, dtype, expected):
    assert estimate.state_bytes(stage, dtype, SIZES) == expected


def test_state_bytes_of_7_5b_on_64_gpus_match_the_papers_table():
    with torch.device("meta"):
        model = gpt.GPT(gpt.preset("gpt-7.5b"))
    sizes = estimate.layout(model, bucket_numel=2**20, world_size=64)
    totals = [sum(estimate.state_bytes(stage, "bf16", sizes).values()) for stage in range(4)]
    paper = [120e9, 31.4e9, 16.6e9, 1.9e9]  # ZeRO, figure 1
    assert totals == pytest.approx(paper, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "accum_steps", "times"),
    [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 4, 2), (1, 4, 2), (2, 4, 5), (3, 4, 12)],
)
def test_elements_moved_are_whole_multiples_of_the_padded_parameters(stage, accum_steps, times):
    assert estimate.elements_moved(stage, 1200, accum_steps) == times * 1200


def test_unknown_stages_and_dtypes_are_usage_errors():
    with pytest.raises(UsageError, match="stage 4"):
        estimate.state_bytes(4, "bf16", SIZES)
    with pytest.raises(UsageError, match="int8"):
        estimate.state_bytes(0, "int8", SIZES)
