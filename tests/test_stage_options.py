"""What the keys of stage 3 and of the traffic change, and what they must not change."""

import pytest
from stage_runs import make_config, train

from zerolab import comm


def run(name, stage, **zero):
    config = make_config(stage)
    config["zero_optimization"] |= zero
    return comm.run(train, 3, args=(name, config))[0]


@pytest.fixture(scope="module")
def plain():
    return {name: run(name, 3) for name in ("odd", "gpt-nano")}


KEEP_ALL = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
OPTIONS = [
    ({"overlap_comm": False}, 2),
    ({"stage3_prefetch_bucket_size": 0}, 2),
    ({"stage3_prefetch_bucket_size": 10**9}, 2),
    ({"stage3_max_live_parameters": 10**9}, None),  # only the last unit's turns touch each other
    (KEEP_ALL, 1),
    (KEEP_ALL | {"stage3_max_live_parameters": 1}, 2),  # no room
]


@pytest.mark.parametrize(("zero", "gathers"), OPTIONS)
def test_options_change_traffic_and_never_a_bit(plain, zero, gathers):
    for name, expected in plain.items():
        result = run(name, 3, **zero)
        assert result["losses"] == expected["losses"]
        assert result["state_bytes"] == expected["state_bytes"]
    psi = result["counts"]["padded"]
    moved = result["traffic"][-1]["all_gather"]
    assert moved == gathers * psi if gathers is not None else psi < moved < 2 * psi


def test_small_parameters_stay_whole_and_enter_the_closed_form(plain):
    result = run("odd", 3, stage3_param_persistence_threshold=40)
    assert result["losses"] == plain["odd"]["losses"]
    # Larger than 40: the blocks' weights and the frozen weight, 49 elements each (51 padded),
    # a bucket apiece. Smaller: root 35 + 7 + 1 + 9 + 3 + 35 + 5 = 95 trained (96 padded) and
    # 7 frozen (9 padded); three biases of 7 (9 padded).
    sharded, whole = 4 * 51 // 3, 96 + 9 + 3 * 9
    trained_whole = whole - 9
    assert result["state_bytes"]["param"] == 4 * (sharded + whole)
    assert result["state_bytes"]["grad"] == 4 * (3 * 51 + trained_whole) // 3


def test_at_most_so_many_elements_stay_whole():
    none = run("odd", 3)
    result = run(
        "odd", 3, stage3_param_persistence_threshold=40, stage3_model_persistence_threshold=0
    )
    assert result["state_bytes"] == none["state_bytes"]


@pytest.mark.parametrize("stage", [1, 2])
def test_without_reduce_scatter_the_traffic_is_deepspeeds(plain, stage):
    result = run("odd", stage, reduce_scatter=False)
    psi = result["counts"]["padded"]
    assert result["losses"] == plain["odd"]["losses"]
    assert result["traffic"][-1] == {"all_reduce": psi, "all_gather": psi}


def test_the_sum_of_gradients_is_world_size_times_their_mean():
    def sgd(op):
        config = make_config(2) | {"gradient_allreduce_op": op}
        config["optimizer"] = {"type": "SGD", "params": {"lr": {"sum": 0.01, "mean": 0.03}[op]}}
        return train("odd", config)["losses"]

    summed, meaned = (comm.run(sgd, 3, args=(op,))[0] for op in ("sum", "mean"))
    assert summed == pytest.approx(meaned, rel=1e-6)
