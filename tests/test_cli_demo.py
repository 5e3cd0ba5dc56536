"""`zerolab demo` on a tiny model: the same claims, and it notices when one is false."""

import dataclasses

import pytest

from zerolab import cli
from zerolab.cli import compare

SMALL = ["demo", "--model", "gpt-nano", "--steps", "2", "--gpu-memory", "1700KiB"]


@pytest.fixture(scope="module")
def trials():
    return [
        compare.run(stage, limit, "gpt-nano", 4, 2)
        for stage, limit in ((0, 1700 * 2**10), (0, None), (1, None), (3, None))
    ]


def test_demo_shows_who_fits_and_that_all_is_as_predicted(capsys):
    assert cli.run(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if " measured " in line]
    fits = [" ".join(words).removesuffix(" measured") for words in rows]
    assert fits == ["0 no", "0 no limit", "1 yes", "2 yes", "3 yes"]
    assert out.count(" formula ") == 7, "five rows, a heading, and the sentence below them"
    assert "as the formula says, to the byte: stages 0 no limit, 1, 2, 3" in out
    assert "Of the allocated memory" in out
    assert "the same to the last bit" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_finished_trials_meet_their_closed_forms(trials):
    assert [trial.fits for trial in trials] == [False, True, True, True]
    assert compare.all_as_predicted(trials)
    assert all(trial.difference_bytes() == 0 for trial in trials if trial.fits)


def tampered(trial, **changes):
    """Give rank 0 another report than it made."""
    first, *others = trial.outcome.reports
    reports = [dataclasses.replace(first, **changes), *others]
    return dataclasses.replace(trial, outcome=dataclasses.replace(trial.outcome, reports=reports))


def test_one_byte_too_much_is_noticed(trials, capsys):
    states = trials[1].outcome.reports[0].state_bytes
    wrong = tampered(trials[1], state_bytes={**states, "grad": states["grad"] + 1})
    assert wrong.difference_bytes() == 1
    assert not compare.all_as_predicted([wrong])
    compare.show([wrong])
    assert "stage 0 no limit DIFFERS by 1 bytes" in capsys.readouterr().out


def test_one_element_too_much_is_noticed(trials):
    moved = {"all_gather": {"calls": 1, "elements": 1, "bytes": 2}}
    assert not compare.all_as_predicted([tampered(trials[2], traffic=moved)])


def test_losses_that_differ_in_the_last_bit_are_noticed(trials, capsys):
    losses = trials[2].outcome.reports[0].losses
    wrong = tampered(trials[2], losses=[*losses[:-1], losses[-1] * (1 + 2**-52)])
    assert not compare.losses_agree([trials[1], wrong])
    compare.show([trials[1], wrong])
    assert "DIFFER" in capsys.readouterr().out


def test_a_wrong_prediction_makes_the_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(compare, "all_as_predicted", lambda trials: False)
    assert cli.run([*SMALL, "--steps", "1"]) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--gpus", "0"], "--gpus 0"),
        (["--gpu-memory", "160MB"], "MiB"),
        (["--model", "gpt"], "'gpt'"),
    ],
)
def test_bad_values_are_refused(capsys, args, says):
    assert cli.run([*SMALL, *args]) == 2
    assert says in capsys.readouterr().err
