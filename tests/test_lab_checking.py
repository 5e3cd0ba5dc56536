"""check, hint, solution: what is shown, raised, plugged in and written down."""

import json

import pytest

from zerolab import comm, flat, lab
from zerolab.errors import UsageError
from zerolab.lab import cards, exercise, plug, progress
from zerolab.lab.checking import CheckFailed, strict
from zerolab.lab.outcome import Outcome, Report

TARGET = "zerolab.flat:shard_bounds"


def right(numel, world_size, rank):
    n = -(-numel // world_size)
    return rank * n, (rank + 1) * n


def floors(numel, world_size, rank):
    n = numel // world_size
    return rank * n, (rank + 1) * n


def untried(numel, world_size, rank):
    raise NotImplementedError("Exercise: shard_bounds")


@pytest.fixture(autouse=True)
def a_learner(monkeypatch):
    """Nothing plugged in, and nobody watching: PYTEST_CURRENT_TEST would make checks strict."""
    monkeypatch.setattr("zerolab.lab.checking.strict", lambda: False)
    plug.reset()
    yield
    plug.reset()


def check(answer):
    lab.check("0.1", answer, debug=True)


def test_pass_shows_what_was_proven_and_plugs_in(capsys):
    check(right)
    text = capsys.readouterr().out
    assert text.startswith("PASS  0.1 shard_bounds")
    assert "8 layouts" in text and "bytes held" in text and "elements moved" in text
    assert "running on: your shard_bounds, reference padded_numel" in text
    assert flat.shard_bounds(10, 4, 3) == (9, 12) and flat.shard_bounds is not right


def test_failure_raises_a_short_card_and_plugs_in_unverified(capsys):
    with pytest.raises(CheckFailed) as caught:
        check(floors)
    text = capsys.readouterr().out
    for part in (
        "FAIL  0.1 shard_bounds",
        "elements 8 to 9 belong to nobody",
        "the last slice stops at 12",
        "shard_bounds(10, 4, 3)",
        "Floor division forgets the remainder",
        'lab.hint("0.1")',
        "your shard_bounds (unverified)",
    ):
        assert part in text
    assert caught.value._render_traceback_() == ["FAIL  0.1 shard_bounds. The card above says why."]
    assert "elements 8 to 9" in str(caught.value), "what nbval reports"
    assert flat.shard_bounds(10, 4, 3) == (6, 8)


def test_untried_goes_on_with_the_reference(capsys):
    check(right)
    check(untried)
    assert "NOT YET TRIED  0.1 shard_bounds" in capsys.readouterr().out
    assert plug.running(TARGET) is plug.reference(TARGET)


def test_untried_raises_when_strict(monkeypatch, capsys):
    monkeypatch.setattr("zerolab.lab.checking.strict", lambda: True)
    with pytest.raises(CheckFailed) as caught:
        check(untried)
    assert "replace the line" in "\n".join(caught.value._render_traceback_())


def test_strict_under_nbval_and_on_request(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv("ZEROLAB_STRICT", raising=False)
    assert not strict()
    monkeypatch.setenv("ZEROLAB_STRICT", "1")
    assert strict()
    monkeypatch.delenv("ZEROLAB_STRICT")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "solutions/00.ipynb::Cell 3 (call)")
    assert strict()


def test_an_answer_that_would_hang_the_kernel_is_not_plugged_in(monkeypatch, capsys):
    hanging = Report("0.1", Outcome.TIMEOUT, "It did not come back.", usable=False)
    monkeypatch.setattr("zerolab.lab.checking.shared.run", lambda *args: hanging)
    with pytest.raises(CheckFailed):
        lab.check("0.1", right)
    assert plug.running(TARGET) is plug.reference(TARGET)


def test_result_instead_of_function_is_refused():
    with pytest.raises(UsageError, match="without calling it"):
        lab.check("0.1", (0, 3))
    with pytest.raises(UsageError, match=r'write lab\.check\("0\.1", shard_bounds\)$'):
        lab.check("0.1")
    with pytest.raises(UsageError, match="unknown"):
        lab.check("1.7", right)


def test_calling_itself_through_the_package_is_named():
    from zerolab.lab.evaluate import evaluate

    def circle(numel, world_size, rank):
        return flat.shard_bounds(numel, world_size, rank)

    report = evaluate(exercise.find("0.1"), circle)
    assert report.outcome is Outcome.FAIL and not report.usable
    assert report.message == (
        "This calls zerolab.flat.shard_bounds, the function that you are asked to write: while it "
        "is checked that is your answer, which calls itself. Compute the answer yourself."
    )
    assert plug.running(TARGET) is plug.reference(TARGET)


def test_misuse_renders_short_and_still_fails_the_cell(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    done = shell.run_cell("from zerolab import lab\n\nlab.check('0.1')\n")
    text = capsys.readouterr().out
    assert isinstance(done.error_in_exec, UsageError)
    assert "line 3: lab.check('0.1')" in text and "UsageError: lab.check needs" in text
    assert "checking.py" not in text and text.count("\n") <= 4


def test_misuse_on_a_rank_names_the_users_line_and_the_rank():
    def rank():
        lab.hint("0.1", 9)

    with pytest.raises(UsageError) as caught:
        comm.run(rank, 2, "lockstep")
    lines = caught.value._render_traceback_()
    assert lines[0].endswith('lab.hint("0.1", 9)') and "hint 9 of 0.1" in lines[1]


def test_hints_come_one_after_the_other(capsys):
    lab.begin("00")
    found = exercise.find("0.1")
    for text in (*found.hints, found.hints[-1]):
        lab.hint("0.1")
        assert text in capsys.readouterr().out
    lab.hint("0.1", 1)
    assert found.hints[0] in capsys.readouterr().out
    with pytest.raises(UsageError, match="there are 1 to 3"):
        lab.hint("0.1", 4)


def test_solution_is_the_package_text_even_when_plugged(capsys):
    plug.plug(TARGET, floors, verified=False)
    lab.solution("0.1")
    assert "padded_numel(numel, world_size) // world_size" in capsys.readouterr().out


def test_begin_starts_with_the_reference_engine():
    plug.plug(TARGET, floors, verified=False)
    lab.begin("00")
    assert plug.status("00") == "running on: reference shard_bounds, reference padded_numel"


def test_card_html_escapes_and_names_no_colour():
    report = Report("0.1", Outcome.FAIL, "<b> & `code`", observed="<script>", rank=2)
    html = cards.card_of(report, exercise.find("0.1"), "running on: x")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert "#" not in html.replace("&#x27;", ""), "colours come from JupyterLab's theme"
    assert 'role="status"' in html and ">FAIL" in html


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_stripe_and_a_card(outcome):
    card = cards.card_of(Report("0.1", outcome, "m"), exercise.find("0.1"), "s")
    assert card.stripe.startswith("--jp-") and "0.1 shard_bounds" in repr(card)


def test_progress_is_written_only_into_a_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ZEROLAB_WORKSPACE", raising=False)
    check(right)
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    check(right)
    with pytest.raises(CheckFailed):
        check(floors)
    lab.hint("0.1", 2)
    log = tmp_path / progress.FILE
    with log.open("a") as file:
        file.write('{"cut sho')  # a crash
    entries = list(progress.read(log))
    assert [e.get("outcome") for e in entries] == ["PASS", "FAIL", None]
    assert entries[1]["mutant"] == "drops_the_rest" and entries[2]["number"] == 2
    assert progress.passed(log) == {"0.1"}
    assert all(json.dumps(e) for e in entries)
