"""lab.predict: a number is committed before it is measured, and both are kept."""

import math

import pytest

from zerolab import gpt, lab
from zerolab.errors import UsageError
from zerolab.lab import prediction, progress
from zerolab.lab.prediction import Prediction
from zerolab.sim import estimate


@pytest.fixture
def asked(monkeypatch):
    """Two predictions of which nothing is known to the course; notes whether one was measured."""
    measured = []

    def measure():
        measured.append(1)
        return 80.0

    known = (
        Prediction("7.1", "How many?", "MiB", measure, "Ten of eight."),
        Prediction("7.2", "And now?", "passes", lambda: 0.0, "Nothing moves."),
    )
    monkeypatch.setattr(prediction, "every", lambda: known)
    return measured


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (80, "error      none"),
        (81.0, "error      +1 MiB (+1.2%)"),
        (60, "error      -20 MiB (-25.0%)"),
        (400, "error      +320 MiB (5 times too much)"),
        (8, "error      -72 MiB (10 times too little)"),
        (-8, "error      -88 MiB"),
    ],
)
def test_card_lays_prediction_measurement_and_error_side_by_side(asked, capsys, value, error):
    lab.predict("7.1", value)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["MEASURED  7.1 prediction", "How many?"]
    assert lines[2:] == [
        f"predicted  {value:g} MiB",
        "measured   80 MiB",
        error,
        "why        Ten of eight.",
    ]


def test_without_a_number_nothing_is_measured_shown_or_kept(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    lab.predict("7.1", None)
    text = capsys.readouterr().out
    assert text.startswith("NOT YET TRIED  7.1") and "How many?" in text and "in MiB" in text
    assert "80" not in text and "Ten of eight" not in text
    assert asked == [] and not (tmp_path / progress.FILE).exists()


def test_a_measurement_of_zero_has_no_percentage(asked, capsys):
    lab.predict("7.2", 3)
    assert "error      +3 passes\n" in capsys.readouterr().out


def test_what_was_predicted_first_stays_in_the_log(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    for value in (10, 80):
        lab.predict("7.1", value)
    entries = list(progress.read(tmp_path / progress.FILE))
    assert [(e["event"], e["exercise"]) for e in entries] == [("prediction", "7.1")] * 2
    assert [(e["predicted"], e["measured"]) for e in entries] == [(10.0, 80.0), (80.0, 80.0)]


@pytest.mark.parametrize("value", ["72 MiB", True, math.nan, math.inf, [72]])
def test_what_is_no_number_is_refused_before_anything_runs(asked, value):
    with pytest.raises(UsageError, match=r"no number; give one in MiB"):
        lab.predict("7.1", value)
    assert asked == []


def test_unknown_ids_name_those_that_exist():
    with pytest.raises(UsageError, match=r"'9\.9' is unknown; use one of '0\.3'"):
        lab.predict("9.9", 1)


def test_predictions_of_the_course_come_out_as_the_formulas_say(monkeypatch):
    monkeypatch.delenv("ZEROLAB_WORKSPACE", raising=False)
    psi, ranks = gpt.num_params(gpt.preset("gpt-10m")), lab.world_size()
    formulas = {"0.3": (2 + 2 + 12 / ranks) * psi / 2**20, "0.4": 3.0}
    small, block = gpt.num_params(gpt.preset("gpt-1m")), 198_272  # of which five, and the root
    root = small - 5 * block
    slices = 5 * block / ranks  # of all blocks; the root is still whole when the last one comes
    beside = estimate.activation_bytes(gpt.preset("gpt-1m"), batch=8)
    rest = beside + 2 * 8 * 128 * 256 * 4 + 3 * 8 * 128 * 8  # temporaries of the loss, the batch
    stage_3 = 14 * small / ranks + 2 * (block + root)  # no gradients yet; two units gathered
    formulas |= {"1.5": beside / (2 * small), "1.6": (14 * small + rest) / (stage_3 + rest)}
    formulas |= {"2.8": 8 - 1, "2.9": 2 * (ranks - 1) / ranks}
    formulas |= {"3.8": 6 - 1, "3.9": 2 * 4 * small / 1e6}
    formulas |= {"4.7": 12 * (1 - 1 / ranks), "4.8": 2.0}
    formulas |= {"5.6": 2 * (slices + 2 * block + root) / 2**20, "5.7": 4 + 1}
    formulas |= {"6.8": 2 * (root + 2 * block) / 2**10, "6.9": 3 * 4}
    formulas |= {"7.8": 0.0, "7.9": 4**0.5}
    known = prediction.every()
    assert {found.id for found in known} == set(formulas)
    for found in known:
        assert found.measure() == pytest.approx(formulas[found.id], rel=0.001)
        assert found.what.endswith("?") and found.unit and found.why
