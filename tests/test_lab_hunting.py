"""lab.bug_hunt: the evidence tells bugs apart; only the right name and the right remedy pass."""

import sys

import pytest

from zerolab import flat, lab
from zerolab.errors import UsageError
from zerolab.lab import exercise, hunting, plug, progress
from zerolab.lab.cards import CheckFailed
from zerolab.lab.outcome import Outcome, Report

HUNTS = [found for found in exercise.every() if found.hunted]
FOUND = exercise.find("0.1")


@pytest.fixture(autouse=True)
def a_learner(monkeypatch, tmp_path):
    """Nothing plugged in, a workspace, and fixes evaluated without the child process."""
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("zerolab.lab.checking.strict", lambda: False)
    plug.reset()
    yield
    plug.reset()


def letter_of(mutant, found=FOUND):
    return next(letter for letter, m in hunting.labels_of(found).items() if m is mutant)


def right(numel, world_size, rank):
    n = -(-numel // world_size)
    return rank * n, (rank + 1) * n


def hunts_in(folder):
    keys = ("mutant", "named", "outcome")
    entries = progress.read(folder / progress.FILE)
    return [tuple(e[key] for key in keys) for e in entries if e["event"] == "hunt"]


@pytest.mark.parametrize("found", HUNTS, ids=[found.id for found in HUNTS])
def test_evidence_of_a_bug_is_unlike_that_of_any_other_and_of_the_reference(found):
    reference = hunting.evidence_of(found.target, plug.running(found.target))
    seen = {m.name: hunting.evidence_of(found.target, m.function) for m in found.mutants}
    assert len(found.hunted) >= 3 and set(found.hunted) <= set(seen)
    for name in found.hunted:
        others = [lines for other, lines in seen.items() if other != name]
        assert seen[name] not in others and seen[name] != reference


def test_evidence_is_the_same_again_and_blind_to_what_is_plugged_in():
    bug = hunting.hunted(FOUND)[0]
    before = hunting.evidence_of(FOUND.target, bug.function)
    plug.plug("zerolab.flat:padded_numel", lambda numel, world_size: 64, verified=False)
    plug.plug(FOUND.target, right, verified=True)
    mine = flat.shard_bounds
    assert hunting.evidence_of(FOUND.target, bug.function) == before
    assert flat.shard_bounds is mine and flat.padded_numel(1, 1) == 64
    assert plug.status("00") == "running on: your shard_bounds, your padded_numel (unverified)"


def test_the_case_shows_evidence_and_every_label_but_neither_name_nor_code(capsys):
    lab.bug_hunt("0.1", number=2)
    text = capsys.readouterr().out
    bug = hunting.hunted(FOUND)[1]
    assert text.startswith("BUG 2 of 5  0.1 shard_bounds")
    for line in hunting.evidence_of(FOUND.target, bug.function):
        assert line in text
    for mutant in FOUND.mutants:
        assert mutant.misconception in text and mutant.name not in text
    assert 'lab.bug_hunt("0.1", "LETTER", number=2)' in text


def test_a_wrong_name_fails_and_shows_what_it_would_have_left(capsys, tmp_path):
    bug = hunting.hunted(FOUND)[0]
    other = next(m for m in FOUND.mutants if m is not bug)
    with pytest.raises(CheckFailed) as caught:
        lab.bug_hunt("0.1", letter_of(other), right)
    text = capsys.readouterr().out
    assert "FAIL  0.1 bug hunt" in text and other.misconception in text
    assert bug.misconception not in text
    assert "FAIL  0.1 bug hunt" in str(caught.value)
    ours = hunting.evidence_of(FOUND.target, bug.function)
    theirs = hunting.evidence_of(FOUND.target, other.function)
    assert any(a != b and a in text and b in text for a, b in zip(ours, theirs, strict=True))
    assert hunts_in(tmp_path) == [(bug.name, other.name, "FAIL")]


def test_the_right_name_shows_the_code_and_asks_for_the_remedy(capsys, tmp_path):
    bug = hunting.hunted(FOUND)[0]
    lab.bug_hunt("0.1", letter_of(bug).lower())
    text = capsys.readouterr().out
    assert text.startswith("FOUND  0.1 bug hunt") and bug.misconception in text
    assert "def shard_bounds(numel: int" in text and bug.name not in text
    assert f'lab.bug_hunt("0.1", "{letter_of(bug)}", shard_bounds)' in text
    assert hunts_in(tmp_path) == [(bug.name, bug.name, "UNATTEMPTED")]


def test_named_and_mended_passes_and_plugs_in(capsys, tmp_path):
    bug = hunting.hunted(FOUND)[0]
    lab.bug_hunt("0.1", letter_of(bug), right)
    assert "PASS  0.1 bug hunt" in capsys.readouterr().out
    assert hunts_in(tmp_path) == [(bug.name, bug.name, "PASS")]
    assert plug.whose(FOUND.target) == "your shard_bounds"
    assert progress.passed(tmp_path / progress.FILE) == set(), "it was no attempt at the exercise"


def test_named_but_not_mended_fails(monkeypatch, capsys, tmp_path):
    bug = hunting.hunted(FOUND)[0]
    failing = Report("0.1", Outcome.FAIL, "nobody owns element 0.")
    monkeypatch.setattr("zerolab.lab.hunting.shared.run", lambda *args: failing)
    with pytest.raises(CheckFailed):
        lab.bug_hunt("0.1", letter_of(bug), bug.function)
    text = capsys.readouterr().out
    assert "nobody owns element 0." in text and "not mended yet" in text
    assert hunts_in(tmp_path) == [(bug.name, bug.name, "FAIL")]
    assert plug.running(FOUND.target) is plug.reference(FOUND.target)


def test_shown_code_behaves_like_the_bug():
    for found in HUNTS:
        for bug in hunting.hunted(found):
            namespace = {**vars(sys.modules[bug.function.__module__]), **vars(found.module)}
            exec(hunting.code_of(bug, found.name), namespace)
            if found is not FOUND:
                continue
            args = (10, 4, 2)[: bug.function.__code__.co_argcount]
            assert namespace[found.name](*args) == bug.function(*args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("9.9",), "'9.9' is unknown"),
        (("0.1", "Z"), "'Z' is no label; give one letter of A, B"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        lab.bug_hunt(*arguments)


def test_numbers_of_bugs_end_and_a_fix_is_a_function():
    with pytest.raises(UsageError, match=r"bug 6 of 0\.1 does not exist; use number=1 to 5"):
        lab.bug_hunt("0.1", number=6)
    with pytest.raises(UsageError, match="not its result"):
        lab.bug_hunt("0.1", letter_of(hunting.hunted(FOUND)[0]), (0, 3))
