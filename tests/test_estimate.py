"""The closed forms against numbers worked out by hand, published tables and the engine's cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zerolab import bucket, gpt
from zerolab.errors import UsageError
from zerolab.records import KINDS
from zerolab.sim import estimate
from zerolab.sim.estimate import GB, GIB


class TwoBlocks(nn.Module):
    """Root: 5 elements. Two blocks of 6 + 3 = 9 elements each."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(5))
        self.blocks = nn.ModuleList(nn.Linear(2, 3) for _ in range(2))


# -- layouts ------------------------------------------------------------------------------------


def test_layout_matches_counting_by_hand():
    # Buckets of at most 8: root [5]; each block [bias 3], [weight 6], because 3 + 6 > 8.
    sizes = estimate.layout(TwoBlocks(), bucket_numel=8, world_size=4, rank=0)
    assert sizes.padded_numel == 8 + 2 * (4 + 8)
    assert sizes.numel == 23
    assert sizes.own_numel == 2 + 2 * (1 + 2)
    assert sizes.num_params == 5
    assert sizes.num_pieces == 3 + 2 * (3 + 3)  # borders at 2, 4; 1, 2; 2, 4
    last = estimate.layout(TwoBlocks(), bucket_numel=8, world_size=4, rank=3)
    assert last.own_numel == 0  # 5, 3 and 6 elements fill three shards of 2, 1 and 2


def test_pieces_do_not_count_a_border_at_the_end_of_a_parameter_twice():
    model = nn.Linear(2, 2)  # 2 + 4 elements in one bucket: shards of 3, 3; ends at 2, 6
    assert estimate.layout(model, 8, world_size=2).num_pieces == 3
    assert estimate.layout(model, 8, world_size=3).num_pieces == 3  # borders at 2 (an end), 4
    assert estimate.layout(model, 8, world_size=1).num_pieces == 2


def test_cut_matches_its_example():
    buckets = estimate.cut((4, 4, 9, 1, 2), bucket_numel=8, world_size=4)
    assert [each.numels for each in buckets] == [(2, 1), (9,), (4, 4)]
    assert [each.padded_numel for each in buckets] == [4, 12, 8]
    assert [each.pad_numel for each in buckets] == [1, 3, 0]


class Lengths(nn.Module):
    """A root and blocks with parameters of given lengths."""

    def __init__(self, units):
        super().__init__()
        root, *blocks = units
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in root)
        self.blocks = nn.ModuleList(_Block(numels) for numels in blocks)


class _Block(nn.Module):
    def __init__(self, numels):
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in numels)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@settings(deadline=None, max_examples=80)
@given(
    units=st.lists(lengths, min_size=3, max_size=5),
    limit=st.integers(1, 60),
    world_size=st.integers(1, 7),
    frozen=st.sets(st.integers(0, 29)),
    threshold=st.integers(0, 10),
)
def test_every_layout_is_the_cut_of_the_engine(units, limit, world_size, frozen, threshold):
    model = Lengths(units)
    params = list(model.parameters())
    for position in frozen.intersection(range(len(params))):
        params[position].requires_grad_(False)
    kept = {param for param in params if 0 < param.numel() <= threshold}
    for rank in range(world_size):
        cut = bucket.build_units(
            model,
            {param for param in params if param.requires_grad},
            limit=limit,
            dtype=None,
            world_size=world_size,
            rank=rank,
            persistent=kept,
        )
        form = estimate.layout(model, limit, world_size, rank, persistence_threshold=threshold)
        assert [[facts(each) for each in unit] for unit in form.units] == [
            [facts(each) for each in unit.buckets] for unit in cut
        ]
        by_index = sorted((b for unit in cut for b in unit.buckets), key=lambda each: each.index)
        assert [each.numel for each in form.buckets] == [each.numel for each in by_index]


def facts(each):
    """What a bucket and its layout have in common."""
    if isinstance(each, estimate.BucketLayout):
        numels, trained = each.numels, each.trained
    else:
        numels, trained = tuple(slot.numel for slot in each.slots), each.trainable
    return numels, each.numel, each.padded_numel, each.shard_numel, trained, each.persistent


@settings(deadline=None)
@given(units=st.lists(lengths, min_size=1, max_size=4), world_size=st.integers(1, 7))
def test_the_ranks_own_every_element_once_and_padding_is_less_than_a_rank_each(units, world_size):
    ranks = [estimate.layout_of(units, 16, world_size, rank) for rank in range(world_size)]
    total = sum(map(sum, units))
    assert sum(sizes.own_numel for sizes in ranks) == ranks[0].numel == total
    assert all(each.pad_numel < world_size for each in ranks[0].buckets)
    assert (ranks[0].padded_numel - total) == sum(each.pad_numel for each in ranks[0].buckets)


# -- model states -------------------------------------------------------------------------------

# One parameter of 1,000 elements and one of 201 on 4 ranks: two buckets, 1,000 and 204.
SIZES = estimate.layout_of([[201, 1000]], bucket_numel=1000, world_size=4)


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        (0, "bf16", {"param": 2408, "grad": 2408, "master": 4816, "optimizer": 9640}),
        (1, "bf16", {"param": 2408, "grad": 2408, "master": 1204, "optimizer": 2416}),
        (2, "bf16", {"param": 2408, "grad": 602, "master": 1204, "optimizer": 2416}),
        (3, "bf16", {"param": 602, "grad": 602, "master": 1204, "optimizer": 2416}),
        (0, "fp32", {"param": 4816, "grad": 4816, "master": 0, "optimizer": 9640}),
        (1, "fp32", {"param": 4816, "grad": 4816, "master": 0, "optimizer": 2416}),
        (2, "fp32", {"param": 4816, "grad": 1204, "master": 0, "optimizer": 2416}),
        (3, "fp32", {"param": 1204, "grad": 1204, "master": 0, "optimizer": 2416}),
    ],
)
def test_state_bytes_match_numbers_worked_out_by_hand(stage, dtype, expected):
    # 8 pieces at stage 0; the own 250 + 51 elements in 2 segments at the others
    assert estimate.state_bytes(stage, dtype, SIZES) == expected


# ZeRO's table of 7.5B, 128B and 1T, computed anew: model, ranks, then GB a rank at stages 1 to 3.
PAPER = [
    (7.5, 1, 120, 120, 120),
    (7.5, 4, 52.5, 41.3, 30),
    (7.5, 16, 35.6, 21.6, 7.5),
    (7.5, 64, 31.4, 16.6, 1.88),
    (7.5, 256, 30.4, 15.4, 0.47),
    (7.5, 1024, 30.1, 15.1, 0.12),
    (128, 4, 896, 704, 512),
    (128, 64, 536, 284, 32),
    (128, 1024, 513, 258, 2),
    (1000, 16, 4750, 2875, 1000),
    (1000, 1024, 4012, 2014, 15.6),
]


@pytest.mark.parametrize(("billions", "world_size", "one", "two", "three"), PAPER)
def test_model_states_reproduce_the_papers_table(billions, world_size, one, two, three):
    numel = round(billions * 1e9)
    assert estimate.model_state_bytes(numel) == 16 * numel
    for stage, published in ((1, one), (2, two), (3, three)):
        total = estimate.model_state_bytes(numel, world_size, stage) / GB
        assert total == pytest.approx(published, rel=2e-3, abs=0.05 if published > 1 else 5e-3)


def test_model_states_of_the_headline_example():
    totals = [estimate.model_state_bytes(7_500_000_000, 64, stage) / GB for stage in range(4)]
    assert totals == [120.0, 31.40625, 16.640625, 1.875]


def test_a_shard_is_rounded_up_as_one_padded_bucket_is():
    sizes = estimate.layout_of([[1001]], bucket_numel=2000, world_size=4)
    exact = estimate.state_bytes(2, "bf16", sizes)
    assert estimate.model_states(1001, 4, 2) == exact | {"param": 2 * 1001, "optimizer": 8 * 251}
    assert exact["param"] == 2 * 1004  # whole, but in a padded bucket
    assert exact["optimizer"] == 8 * 251 + 4  # and AdamW's count of steps


def test_sixteen_bytes_in_mixed_precision_and_in_fp32():
    mixed, single = (estimate.bytes_per_param(precision) for precision in ("bf16", "fp32"))
    assert mixed == {"param": 2, "grad": 2, "master": 4, "optimizer": 8}
    assert single == {"param": 4, "grad": 4, "master": 0, "optimizer": 8}
    assert sum(mixed.values()) == sum(single.values()) == 16
    assert (mixed["master"] + mixed["optimizer"]) / mixed["param"] == 6  # not "2 to 4 times"


def test_saving_factors_are_below_their_limits_for_every_number_of_ranks():
    published = {2: (1.60, 1.78), 4: (2.29, 2.91), 8: (2.91, 4.27), 64: (3.82, 7.21)}
    for world_size, (one, two) in published.items():
        factors = [estimate.saving_factor(stage, world_size) for stage in (1, 2)]
        assert factors == pytest.approx([one, two], abs=6e-3)
        assert factors[0] < 4 and factors[1] < 8
        assert estimate.saving_factor(3, world_size) == world_size
    assert estimate.saving_factor(1, 10**9) == pytest.approx(4)
    assert estimate.saving_factor(2, 10**9) == pytest.approx(8)


@settings(deadline=None)
@given(
    num_params=st.integers(1, 10**6),
    memory=st.integers(1, 10**8),
    stage=st.integers(0, 3),
    optimizer=st.sampled_from(sorted(estimate.OPTIMIZERS)),
    precision=st.sampled_from(sorted(estimate.PARAM_BYTES)),
)
def test_gpus_needed_is_the_smallest_number_that_fits(
    num_params, memory, stage, optimizer, precision
):
    needed = estimate.gpus_needed(num_params, memory, stage, precision, optimizer)

    def fits(world_size):
        total = estimate.model_state_bytes(num_params, world_size, stage, precision, optimizer)
        return total <= memory

    if needed is None:
        assert not fits(num_params)  # one element a rank is the smallest shard
    else:
        assert fits(needed)
        assert needed == 1 or not fits(needed - 1)


def test_the_smallest_stage_that_fits_is_the_cheapest():
    stage = [estimate.smallest_stage(7_500_000_000, 64, n * GB) for n in (130, 120, 40, 20, 2, 1)]
    assert stage == [0, 0, 1, 2, 3, None]


def test_states_of_an_engine_sized_model_match_the_papers_table():
    with torch.device("meta"):
        model = gpt.GPT(gpt.preset("gpt-7.5b"))
    sizes = estimate.layout(model, bucket_numel=2**20, world_size=64)
    totals = [sum(estimate.state_bytes(stage, "bf16", sizes).values()) for stage in range(4)]
    assert totals == pytest.approx([120e9, 31.4e9, 16.6e9, 1.9e9], rel=0.02)


# -- traffic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "accum_steps", "times"),
    [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 4, 2), (1, 4, 2), (2, 4, 5), (3, 4, 12)],
)
def test_elements_moved_are_whole_multiples_of_the_padded_parameters(stage, accum_steps, times):
    assert estimate.elements_moved(stage, 1200, accum_steps) == times * 1200
    sizes = estimate.layout_of([[1200]], 1200, 4)
    assert estimate.elements_moved_by(sizes, stage, accum_steps) == times * 1200


def ring_pass(slices, first, combine):
    """Send slices round a ring N - 1 times; rank r begins with slice r + first. Count what is sent.

    Args:
        slices: [rank][slice], changed in place.
    """
    world_size = len(slices)
    sent = [0] * world_size
    for turn in range(world_size - 1):
        on_the_way = []
        for rank in range(world_size):
            which = (rank + first - turn) % world_size
            on_the_way.append(((rank + 1) % world_size, which, slices[rank][which]))
            sent[rank] += slices[rank][which].numel()
        for receiver, which, values in on_the_way:
            slices[receiver][which] = combine(slices[receiver][which], values)
    return sent


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_a_ring_all_reduce_sends_its_two_times_n_minus_one_nth(world_size):
    numel = 5 * world_size
    values = torch.arange(world_size * numel).reshape(world_size, numel)
    slices = [list(own.split(5)) for own in values]
    sent = ring_pass(slices, 0, torch.add)  # reduce-scatter: rank r ends with slice r + 1
    again = ring_pass(slices, 1, lambda mine, came: came)  # all-gather
    for own in slices:
        assert torch.equal(torch.cat(own), values.sum(0))
    moved = estimate.elements_moved(0, numel)
    for rank in range(world_size):
        assert sent[rank] + again[rank] == moved * estimate.ring_factor(world_size)
        assert 2 * (sent[rank] + again[rank]) == estimate.sent_bytes(moved, world_size, "bf16")


# -- activations, offload -----------------------------------------------------------------------


def test_paper_activations_reproduce_published_sizes():
    # Korthikanti et al., table 3 and section 4.1: GPT-3 175B, s 2048, b 1, h 12288, a 96.
    layer = estimate.paper_activation_bytes(2048, 1, 12288, 96)
    assert 5 * 96 * 2048 / 12288 == 80  # "5as/h = 80 for GPT-3"
    assert layer == 2048 * 12288 * (34 + 80)
    assert pytest.approx(0.70, abs=5e-3) == 80 / (34 + 80)  # "saves 70 % of GPT-3's activations"


def test_offload_leaves_two_psi_on_the_gpu_and_puts_fourteen_on_the_host():
    gpu, host = estimate.offload_states(13_000_000_000)
    assert gpu == {"param": 26 * GB}  # ZeRO-Offload: 13B on one V100 of 32 GB
    assert sum(gpu.values()) < 32 * GB
    assert sum(host.values()) == 14 * 13 * GB == estimate.host_bytes(13_000_000_000)
    assert estimate.bus_bytes(13_000_000_000) == 4 * 13 * GB


def test_a_hundred_billion_on_eight_gpus_are_a_question_of_the_host():
    numel = 100 * GB
    assert estimate.model_state_bytes(numel, 8, 3) == 200 * GB  # no card has that
    ours = estimate.host_bytes(numel, 8, ranks_per_node=8, stage=3, offload_param=True)
    theirs, _, _ = estimate.estimate_zero3_model_states_mem_needs(numel, 1, num_gpus_per_node=8)
    assert (ours, theirs) == (1600 * GB, 2700 * GB)


def test_offload_of_what_is_not_sharded_is_refused():
    with pytest.raises(UsageError, match="offload needs stage 1 to 3, not 0"):
        estimate.offload_states(1, stage=0)
    with pytest.raises(UsageError, match="offload_param needs stage 3, not 2"):
        estimate.offload_states(1, stage=2, offload_param=True)


# -- what puts formulas together ----------------------------------------------------------------


def test_memory_breakdown_has_every_kind_and_adds_up():
    parts = estimate.memory_breakdown(7_500_000_000, 64, 2)
    assert tuple(parts) == KINDS
    states = estimate.model_states(7_500_000_000, 64, 2)
    assert {kind: parts[kind] for kind in states} == states
    assert parts["bucket"] == 2 * 2 * 2**20
    assert sum(parts.values()) == sum(states.values()) + parts["bucket"]


def test_memory_breakdown_shows_only_what_a_stage_has():
    parts = [
        estimate.memory_breakdown(1000, 4, stage, "fp32", gathered_numel=300, activation=7)
        for stage in range(4)
    ]
    assert [each["gathered"] for each in parts] == [0, 0, 0, 1200]
    assert [each["bucket"] for each in parts] == [0, 0, 4000, 4000]  # never more than the model
    assert {each["activation"] for each in parts} == {7}
    assert {each["master"] for each in parts} == {0}


def test_the_articles_arithmetic_is_right_and_its_gigabytes_are_decimal():
    for stage in range(4):
        ours = estimate.model_state_bytes(7_500_000_000, 8, stage)
        assert estimate.article_estimate(7.5, 8, stage) == pytest.approx(ours / GB)
        assert estimate.article_estimate(7.5, 8, stage) > ours / GIB


def test_what_the_article_leaves_out_can_be_most_of_the_memory():
    config = gpt.preset("gpt-7.5b")
    numel = gpt.num_params(config)
    said = estimate.article_estimate(numel / 1e9, 64, 3) * GB
    with torch.device("meta"):
        sizes = estimate.layout(gpt.GPT(config), 2**20, 64)
    gathered = estimate.gathered_peak_numel(sizes.unit_numels())
    activation = estimate.activation_bytes(config, batch=1)
    parts = estimate.memory_breakdown(numel, 64, 3, gathered_numel=gathered, activation=activation)
    assert sum(parts.values()) > 4 * said


def test_the_articles_other_errors_are_errors():
    sgd = estimate.model_state_bytes(7_500_000_000, 8, 1, "bf16", "sgd")
    assert estimate.article_estimate(7.5, 8, 1) * GB > sgd
    assert estimate.article_estimate(7.5, 8, 9) == estimate.article_estimate(7.5, 8, 3)
    with pytest.raises(UsageError, match="stage 9"):
        estimate.model_states(7_500_000_000, 8, 9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimate.state_bytes(4, "bf16", SIZES), "stage 4 is unknown"),
        (lambda: estimate.state_bytes(0, "int8", SIZES), "int8"),
        (lambda: estimate.state_bytes(0, "bf16", SIZES, optimizer="muon"), "muon"),
        (lambda: estimate.model_states(0), "num_params 0 is below 1"),
        (lambda: estimate.model_states(1, 0), "world_size 0 is below 1"),
        (lambda: estimate.elements_moved(5, 1), "stage 5"),
        (lambda: estimate.elements_moved(0, 1, 0), "accum_steps 0"),
        (lambda: estimate.ring_factor(0), "world_size 0"),
        (lambda: estimate.cut([1], 0, 1), "bucket_numel 0"),
        (lambda: estimate.layout_of([[1]], 1, 0), "world_size 0"),
    ],
)
def test_what_has_no_formula_is_a_usage_error(call, words):
    with pytest.raises(UsageError, match=words):
        call()


# -- DeepSpeed's estimators ---------------------------------------------------------------------

# Computed with DeepSpeed 0.19.8's own functions: host bytes, GPU bytes.
ZERO2 = [
    ((7_500_000_000, 8, 8, True), (2_880_000_000_000, 15_000_000_000)),
    ((7_500_000_000, 8, 8, False), (360_000_000_000, 17_109_375_000)),
    ((2_851_000_003, 8, 3, True), (410_544_000_432, 5_702_000_006)),
    ((2_851_000_003, 8, 3, False), (136_848_000_144, 7_840_250_008)),
    ((10_795_008, 1, 1, True), (259_080_192, 21_590_016)),
    ((10_795_008, 1, 1, False), (64_770_048, 215_900_160)),
]
# Three nodes of 8 GPUs, 2,851,000,003 parameters, 95,033,333 in the largest layer.
ZERO3 = [
    ((True, True, True), (25_659_000_027, 380_133_332)),
    ((True, True, False), (136_848_000_144, 380_133_332)),
    ((True, False, True), (22_808_000_024, 617_716_665)),
    ((True, False, False), (136_848_000_144, 617_716_665)),
    ((False, False, True), (4_561_599_984, 2_518_383_334)),
    ((False, False, False), (136_848_000_144, 2_518_383_334)),
]


@pytest.mark.parametrize(("args", "expected"), ZERO2)
def test_zero2_estimator_gives_deepspeeds_numbers(args, expected):
    assert estimate.estimate_zero2_model_states_mem_needs(*args) == expected


@pytest.mark.parametrize(("options", "expected"), ZERO3)
def test_zero3_estimator_gives_deepspeeds_numbers(options, expected):
    sizes = (2_851_000_003, 95_033_333, 8, 3)
    found = estimate.estimate_zero3_model_states_mem_needs(*sizes, *options)
    assert found == (*expected, 4 * 95_033_333)


def test_zero3_estimator_rounds_in_deepspeeds_order():
    # 18 / 125 first would give 21,599,999,999: floats round, then are cut to integers.
    found = estimate.estimate_zero3_model_states_mem_needs(10**11, 14_285_714_286, 1, 125)
    assert found == (21_600_000_000, 57_142_857_144, 57_142_857_144)


def test_deepspeed_counts_four_bytes_more_at_stage_2_and_two_at_stage_3():
    numel = 64 * 10**6
    for stage, more in ((2, 4), (3, 2)):
        ours = estimate.model_state_bytes(numel, 64, stage)
        if stage == 2:
            _, theirs = estimate.estimate_zero2_model_states_mem_needs(numel, 64, 1, False)
        else:
            _, theirs, _ = estimate.estimate_zero3_model_states_mem_needs(numel, 0, 64, 1, False)
        assert theirs - ours == more * numel // 64


def test_models_are_counted_with_each_storage_once():
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = gpt.GPT(gpt.PRESETS["gpt-nano"])
        shape = model.config
        assert estimate.model_to_params(model) == (
            gpt.num_params(shape),
            max(shape.vocab_size * shape.dim, 4 * shape.dim**2 + 4 * shape.dim),
        )
