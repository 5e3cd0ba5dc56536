"""`zerolab config check`, `keys` and `make` as a user types them."""

import json
from pathlib import Path

import pytest

from zerolab import cli, config
from zerolab.cli import config as command

DATA = Path(__file__).parent / "data" / "config"


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys, *args):
    code = cli.run(["config", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_explains_every_key_and_prints_the_corrected_file(capsys):
    code, out, _ = run(capsys, "check", DATA / "b_typical.json", "--gpus", 8)
    assert code == 2
    for words in ("b_typical.json on 8 GPUs", "gradient_accumulation_steps", "no effect"):
        assert words in out
    assert "16 = micro x 4 x 8 GPUs has no solution" in out
    corrected = json.loads(out.split("The corrected file:")[1])
    assert config.examine(corrected, 8).stoppers == ()


def test_check_of_a_valid_file_shows_the_batch_and_succeeds(capsys):
    code, out, _ = run(capsys, "check", DATA / "b_typical.json", "--gpus", 2)
    assert code == 0
    assert "Batch: 16 = 2 x 4 x 2" in out and "This file is valid." in out


def test_check_says_what_has_to_be_filled_in(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": "xyz"}}))
    code, out, _ = run(capsys, "check", file, "--gpus", 2)
    assert code == 2 and "Fill in zero_optimization.stage: 0 stands there, the default" in out
    told = json.loads(run(capsys, "check", file, "--gpus", 2, "--json")[1])
    assert set(told["fill_in"]) == {"zero_optimization.stage"}


def test_check_json_is_one_json_object(capsys):
    code, out, _ = run(capsys, "check", DATA / "c_activation.json", "--gpus", 4, "--json")
    data = json.loads(out)
    assert code == 2 and data["gpus"] == 4 and data["valid"] is False
    keys = {problem["key"] for problem in data["problems"]}
    assert "activation_checkpointing.partitioned_activations" in keys


def test_check_lets_the_script_bring_the_optimizer(capsys):
    file = DATA / "a_zero1.json"
    assert run(capsys, "check", file, "--gpus", 8)[0] == 2
    assert run(capsys, "check", file, "--gpus", 8, "--optimizer-in-code")[0] == 0


def test_check_shows_placeholders_as_they_are_written(capsys):
    assert "[true|false]" in run(capsys, "check", DATA / "c_activation.json", "--gpus", 4)[1]


@pytest.mark.parametrize("args", [("check", "nowhere.json", "--gpus", 2), ("keys", "xyzzy")])
def test_bad_usage_is_one_line_and_code_2(capsys, args):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and err.startswith("error: ") and "Traceback" not in err


def test_unreadable_file_is_refused_with_line_and_column(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8,\n "fp16": {')
    code, _, err = run(capsys, "check", file, "--gpus", 2)
    assert code == 2 and "ds.json: line 2, column" in err


def test_keys_lists_every_key_with_both_defaults(capsys):
    code, out, _ = run(capsys, "keys", "reduce_bucket_size")
    assert code == 0 and "1048576" in out and "500000000" in out and "works" in out
    code, out, _ = run(capsys, "keys", "--json")
    entries = json.loads(out)
    assert code == 0 and len(entries) > 150
    by_key = {entry["key"]: entry for entry in entries}
    assert by_key["zero_optimization.allgather_partitions"]["status"] == "no effect"
    assert by_key["gradient_clipping"]["deepspeed"] == "1.0"


def test_make_without_a_terminal_takes_flags_and_defaults(capsys):
    args = ("--gpus", 4, "--batch", 24, "--stage", 3, "--precision", "fp16", "--warmup", 10)
    code, out, _ = run(capsys, "make", *args)
    cfg = config.load(json.loads(out), 4)
    assert code == 0
    assert (cfg.train_batch_size, cfg.micro_batch_size, cfg.accum_steps, cfg.stage) == (24, 6, 1, 3)
    assert cfg.fp16.enabled and cfg.scheduler.type == "WarmupLR" and cfg.warnings == ()


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 30, 31, 64, 100])
def test_make_suggests_a_micro_batch_that_fits(capsys, batch):
    code, out, err = run(capsys, "make", "--gpus", 3, "--batch", 3 * batch)
    assert code == 0, err
    assert config.load(json.loads(out), 3).micro_batch_size <= 8


def test_make_asks_on_a_terminal_for_what_no_flag_says(capsys, monkeypatch):
    asked = []
    answers = {"How many GPUs": 2, "ZeRO stage": 1}

    def prompt(question, default, err):
        asked.append(question)
        return next(
            (value for text, value in answers.items() if question.startswith(text)), default
        )

    monkeypatch.setattr(command, "interactive", lambda: True)
    monkeypatch.setattr(command.typer, "prompt", prompt)
    code, out, _ = run(capsys, "make", "--batch", 12, "--lr", 0.5)
    cfg = config.load(json.loads(out), 2)
    assert code == 0 and cfg.stage == 1 and cfg.optimizer.params == {"lr": 0.5}
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("args", "must_say"),
    [
        (("--gpus", 4, "--batch", 10), "10 = 2 x accum x 4 GPUs has no solution"),
        (("--stage", 4), "4 is not a ZeRO stage"),
        (("--precision", "fp8"), "take one of bf16, fp16, fp32"),
        (("--optimizer", "Muon"), "cannot be sharded"),
        (("--lr", -1.0), "Invalid learning rate"),
    ],
)
def test_make_refuses_answers_that_do_not_fit(capsys, args, must_say):
    code, out, err = run(capsys, "make", *args)
    assert code == 2 and out == "" and must_say in err


def test_make_writes_a_file_and_does_not_overwrite_one(capsys, tmp_path):
    file = tmp_path / "ds.json"
    assert run(capsys, "make", "-o", file)[0] == 0
    before = file.read_text()
    assert config.load(file, 4).stage == 2
    code, _, err = run(capsys, "make", "-o", file, "--stage", 1)
    assert code == 2 and "--force" in err and file.read_text() == before
    assert run(capsys, "make", "-o", file, "--stage", 1, "--force")[0] == 0
    assert config.load(file, 4).stage == 1


@pytest.mark.parametrize("place", ["missing/ds.json", "."])
def test_a_place_that_cannot_be_written_is_refused_without_a_traceback(capsys, tmp_path, place):
    code, out, err = run(capsys, "make", "--force", "--output", tmp_path / place)
    assert (code, out) == (2, "") and "cannot be written" in err and "Traceback" not in err


def test_brackets_in_names_are_shown_as_they_stand(capsys, tmp_path):
    file = tmp_path / "a[b].json"
    file.write_text('{"train_batch_size": 8, "[red]x[/blue]": "[/bold]"}')
    code, out, _ = run(capsys, "check", file, "--gpus", 2)
    assert code == 2
    for words in ("a[b].json on 2 GPUs", "[red]x[/blue]: is not a key", "[/bold]"):
        assert words in out


@pytest.mark.parametrize(("stage", "verdict"), [(0, "no effect"), (1, "works")])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_key_that_does_nothing_at_the_stage_is_not_said_to_work(
    capsys, tmp_path, stage, verdict, overlap
):
    file = tmp_path / "ds.json"
    zero = {"stage": stage, "overlap_comm": overlap}
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero}))
    _, out, _ = run(capsys, "check", file, "--gpus", 2, "--json", "--optimizer-in-code")
    report = json.loads(out)
    statuses = {row["key"]: row["status"] for row in report["keys"]}
    assert statuses["zero_optimization.overlap_comm"] == verdict
    warned = any("acts at stage" in problem["message"] for problem in report["problems"])
    assert not (warned and verdict == "works")
