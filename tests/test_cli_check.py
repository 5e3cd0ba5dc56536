"""`zerolab check`: the learner's own notebook under nbval, one row an exercise; and the matrix."""

import json
from pathlib import Path

import nbformat
import pytest

from zerolab import cli
from zerolab.lab import exercise, results, whole_run

ROOT = Path(__file__).resolve().parents[1]
NAME = "00_start_here.ipynb"
COURSE = ROOT / "course" / NAME
BEGIN = 'from zerolab import lab\nlab.begin("00")'
RIGHT = """def {name}(numel, world_size{more}):
    padded = -(-numel // world_size) * world_size
    return {value}
lab.check("{id}", {name})"""
PADDED = RIGHT.format(name="padded_numel", more="", value="padded", id="0.2")
BOUNDS = RIGHT.format(
    name="shard_bounds",
    more=", rank",
    value="rank * padded // world_size, (rank + 1) * padded // world_size",
    id="0.1",
)
FLOORS = BOUNDS.replace("-(-numel // world_size)", "numel // world_size")
STARTER = 'def padded_numel(a, b):\n    raise NotImplementedError\nlab.check("0.2", padded_numel)'
WORLD = 'import os\nassert os.environ["ZEROLAB_WORLD"] == "gloo"'
RANKS = "import zerolab\nfrom zerolab import comm\nzerolab.run(comm.get_world, world_size=2)"


def write(folder, *sources, **ids):
    """Write the learner's notebook; ids give a source the id of a cell of the course."""
    cells = [nbformat.v4.new_markdown_cell("prose")]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    for name, source in ids.items():
        one = nbformat.v4.new_code_cell(source)
        one.id = name.replace("_", "-")
        cells.append(one)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / NAME)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))  # and as it was afterwards
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    return tmp_path


@pytest.mark.timeout(300)
def test_a_half_done_notebook_gets_one_row_an_exercise_and_exit_code_1(mine, capsys):
    # Neither an old output nor a tag decides: nbval would let the tagged cell pass.
    write(mine, BEGIN, FLOORS, STARTER, "1 / 0")
    node = nbformat.read(mine / NAME, as_version=4)
    for one in node.cells[1:]:
        one.metadata["tags"] = ["raises-exception"]
    nbformat.write(node, mine / NAME)
    before = (mine / NAME).read_bytes()
    assert cli.run(["check", "0", "--json", "--workspace", str(mine)]) == 1
    told = json.loads(capsys.readouterr().out)
    first, second = told["exercises"]
    assert (first["id"], first["outcome"]) == ("0.1", "failed")
    assert "elements 8 to 9 belong to nobody" in first["message"]
    assert (second["id"], second["outcome"]) == ("0.2", "not attempted")
    assert told["passed"] is False and told["failures"] == [], "a scratch cell is the learner's"
    assert (mine / NAME).read_bytes() == before
    assert [path.name for path in mine.glob("*.ipynb")] == [NAME]
    assert not list(mine.glob(".check-*")) and not (mine / "progress.jsonl").exists()

    assert cli.run(["check", "00", "--matrix", "--workspace", str(mine)]) == 0
    shown = capsys.readouterr().out
    assert "gloo: never run" in shown and "nccl: never run" in shown
    assert f"on {results.hardware('lockstep')}" in shown


@pytest.mark.timeout(300)
def test_a_finished_notebook_passes_on_gloo_ranks(mine, capsys):
    write(mine, BEGIN, WORLD, BOUNDS, PADDED, RANKS + ' == ["gloo", "gloo"] or 1 / 0')
    assert cli.run(["check", "00", "--world", "gloo", "--workspace", str(mine)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("passed") == 2 and "chapter 00, gloo" in shown
    assert cli.run(["check", "00", "--matrix", "--json", "--workspace", str(mine)]) == 0
    rows = json.loads(capsys.readouterr().out)["exercises"]
    assert [row["worlds"]["lockstep"] for row in rows] == [None, None]
    assert [row["worlds"]["gloo"]["outcome"] for row in rows] == ["passed", "passed"]
    assert rows[0]["worlds"]["gloo"]["hardware"] == results.hardware("gloo")


CARD = "FAIL  0.1 shard_bounds\nThe slices overlap.\n  call  shard_bounds(10, 4, 3)"


def rows_of(cells, raised, *outcomes):
    fields = {"event": "attempt", "exercise": "0.1", "reason": "too few GPUs"}
    entries = [{**fields, "outcome": outcome} for outcome in outcomes]
    return whole_run._row(exercise.find("0.1"), cells, raised, entries)


@pytest.mark.parametrize(
    ("source", "raised", "logged", "outcome", "message"),
    [
        ('lab.check("0.1", f)', "", ["PASS"], "passed", ""),
        ('lab.check("0.1", f)', CARD, ["PASS", "FAIL"], "failed", "The slices overlap."),
        ('lab.check("0.1", f)', "", ["FAIL", "PASS"], "passed", ""),
        ('# lab.check("0.1", f)', "", [], "not attempted", "its cell never calls lab.check"),
        ('lab.check("0.1", g)', "x\nNameError: g", [], "failed", "NameError: g"),
        ('lab.check("0.1", f)', "", ["SKIPPED"], "skipped", "too few GPUs"),
        ('lab.check("0.10", f)', "", [], "not attempted", "no cell of the notebook checks it"),
    ],
)
def test_the_log_of_the_run_decides(source, raised, logged, outcome, message):
    row = rows_of([{"id": "x", "source": source}], [raised], *logged)
    assert (row.outcome, row.message) == (outcome, message)


def test_a_failing_cell_of_the_course_counts_and_is_named(mine, monkeypatch, capsys):
    write(mine, BEGIN, stage_1="1 / 0")
    raised = ["", "ZeroDivisionError: division by zero"]
    monkeypatch.setattr(whole_run, "_execute", lambda *args: raised)
    assert cli.run(["check", "00", "--workspace", str(mine)]) == 1
    assert "cell stage-1 failed: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["00", "--world", "mpi"], "--world 'mpi' is unknown; give lockstep, gloo, nccl"),
        (["99"], "chapter '99' does not exist"),
        (["00"], f"has no {NAME}; `zerolab learn` puts one there"),
        (["00", "--workspace", "nowhere"], "is no folder"),
    ],
)
def test_bad_usage_is_one_line(mine, monkeypatch, capsys, words, said):
    if "--world" in words:
        write(mine, BEGIN)
    monkeypatch.chdir(mine)
    assert cli.run(["check", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_nccl_without_gpus_is_refused(mine, monkeypatch, capsys):
    write(mine, BEGIN)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.run(["check", "00", "--world", "nccl"]) == 2
    assert "there are none; use gloo" in capsys.readouterr().err


def test_a_damaged_notebook_is_named_and_left_alone(mine, capsys):
    (mine / NAME).write_text("{")
    assert cli.run(["check", "00"]) == 2
    assert ".zerolab/backup" in capsys.readouterr().err
    assert (mine / NAME).read_text() == "{"


def test_matrix_says_why_something_was_skipped(mine, capsys, monkeypatch):
    rows = [
        whole_run.Row(one, "f", whole_run.SKIPPED, "It trains on 4 GPUs and this machine has 2.")
        for one in ("0.1", "0.2")
    ]
    run = whole_run.WholeRun("00", "nccl", 1.0, rows)
    assert run.passed, "what cannot run here is no failure"
    monkeypatch.setattr(results, "hardware", lambda world: "2 x a GPU")
    results.record(mine, run)
    assert cli.run(["check", "00", "--matrix", "--workspace", str(mine)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("It trains on 4 GPUs") == 1 and "  skipped 0.1, 0.2: It trains" in shown
    assert cli.run(["check", "00", "--matrix", "--json", "--workspace", str(mine)]) == 0
    told = json.loads(capsys.readouterr().out)["exercises"][0]["worlds"]
    assert told["nccl"]["outcome"] == "skipped" and "4 GPUs" in told["nccl"]["message"]


def test_matrix_shows_the_newest_run_of_each_world(mine):
    for outcome in (whole_run.FAILED, whole_run.PASSED):
        run = whole_run.WholeRun("00", "gloo", 1.0, [whole_run.Row("0.1", "f", outcome)])
        results.record(mine, run)
    found = results.latest(mine, "00")
    assert list(found) == [("0.1", "gloo")] and found["0.1", "gloo"].outcome == "passed"
    assert results.latest(mine, "01") == {}
