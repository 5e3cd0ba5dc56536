"""lab.train: a run to look at, whatever ends it; a picture that is fed while it goes on."""

import pytest

from zerolab import flat, lab
from zerolab.errors import UsageError
from zerolab.lab import plug, training
from zerolab.lab.table import Table


class Picture:
    """Notes how it is called."""

    capacity = 0

    def __init__(self):
        self.shown, self.finished = [], None

    def show(self, held, phases, peaks):
        self.shown.append((held, phases, peaks))

    def finish(self, ranks, failed=None, message=""):
        self.finished = (ranks, failed, message)


def train(**settings):
    return lab.train(**{"model": "gpt-nano", "dtype": "fp32", **settings})


@pytest.fixture(scope="module")
def stages():
    return [train(stage=stage) for stage in (0, 1, 2, 3)]


def test_all_stages_compute_the_same_losses(stages):
    assert all(run.fits for run in stages)
    assert len({tuple(run.losses) for run in stages}) == 1
    assert len(stages[0].losses) == 2
    assert lab.compare(*stages).identical


def test_each_stage_holds_less_than_the_one_before(stages):
    states = [sum(run.fullest.state_bytes.values()) for run in stages]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4


def test_elements_moved_are_2_2_2_3_times_the_padded_parameters(stages):
    moved = [run.fullest.elements_moved for run in stages]
    assert moved[0] == moved[1] == moved[2] and moved[3] * 2 == moved[0] * 3


def test_out_of_memory_is_a_result(stages):
    ceiling = (stages[0].peak_bytes + stages[1].peak_bytes) // 2
    run = train(stage=0, gpu_memory=ceiling)
    assert not run.fits and run.failed_rank in range(4)
    assert "CUDA out of memory" in repr(run) and "stopped" in run._repr_html_()
    assert run.fullest.rank == run.failed_rank and run.peak_bytes <= ceiling
    assert train(stage=1, gpu_memory=ceiling).fits


def test_picture_is_fed_and_finished(monkeypatch):
    monkeypatch.setattr("zerolab.lab.live.REDRAW_SECONDS", 0.002)
    picture = Picture()
    run = train(stage=1, gpu_memory="160MiB", watch=picture)
    ranks, failed, message = picture.finished
    assert picture.capacity == 160 * 2**20 and failed is None and message == ""
    assert [records.rank for records in ranks] == [0, 1, 2, 3]
    assert any(len(held) == 4 and held[0] for held, _, _ in picture.shown)
    assert max(event.total for event in ranks[0].memory) == run.ranks[0].peak_bytes


def test_picture_learns_which_rank_failed():
    picture = Picture()
    run = train(stage=0, gpu_memory="1MiB", watch=picture)
    _, failed, message = picture.finished
    assert failed == run.failed_rank and "Tried to allocate" in message


def test_an_unverified_function_that_breaks_the_engine_ends_in_a_result():
    with plug.plugged("zerolab.flat:shard_bounds", lambda numel, world_size, rank: (1, 2)):
        run = train(stage=1)
    assert not run.fits and run.failed_rank is None
    assert flat.shard_bounds(10, 4, 3) == (9, 12)


def test_neighbours_slice_trains_without_an_error_and_hardly_learns(stages):
    mine = flat.shard_bounds
    with plug.plugged("zerolab.flat:shard_bounds", lambda n, w, r: mine(n, w, (r + 1) % w)):
        wrong = train(stage=1)
    assert wrong.fits and wrong.losses[0] == stages[1].losses[0]
    assert wrong.losses[1] > stages[1].losses[1]


def test_table_shows_a_row_a_run_and_a_verdict(stages):
    table = lab.compare(*stages)
    assert [row[0] for row in table.rows()] == ["MiB per GPU", *(f"stage {k}" for k in range(4))]
    assert "identical to the last bit" in repr(table)
    assert table._repr_html_().count("<tr>") == 5
    other = train(stage=1, steps=1)
    assert "not the same" in Table([stages[0], other]).verdict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage 4 is no ZeRO stage"),
        ({"steps": 0}, "steps=0"),
        ({"dtype": "fp8"}, "dtype 'fp8'"),
        ({"model": "gpt-9m"}, "gpt-9m"),
        ({"gpu_memory": "160MB"}, "MiB"),
    ],
)
def test_bad_values_are_refused_before_ranks_start(settings, message):
    with pytest.raises(UsageError, match=message):
        train(**settings)


def test_nothing_to_compare_is_refused():
    with pytest.raises(UsageError):
        lab.compare()


def test_world_size_is_four_or_the_number_of_gpus(monkeypatch):
    monkeypatch.delenv("ZEROLAB_WORLD", raising=False)
    assert lab.world_size() == 4
    monkeypatch.setenv("ZEROLAB_WORLD", "nccl")
    monkeypatch.setattr(training.torch.cuda, "device_count", lambda: 2)
    assert lab.world_size() == 2


def test_stopped_run_says_on_how_many_gpus_it_began(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("the ranks are gone")

    monkeypatch.setattr(training.comm, "run", lost)  # no rank lives to hand anything in
    run = train()
    assert run.ranks == [] and not run.fits
    assert run.card().heading == "stage 0 on 4 GPUs: stopped"
    assert "the ranks are gone" in repr(run)
