"""The command line's promises: exit codes, one-line errors, clean streams."""

import subprocess
import sys

import pytest
import torch
import typer

from zerolab import cli, comm
from zerolab.cli import execute
from zerolab.errors import DeadlockError, MismatchError, PeerError, RankError, UsageError

NANO = ["train", "--model", "gpt-nano", "--steps", "1", "--gpus", "2"]


def run(capsys, *args):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    code = cli.run(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("args", "value", "remedy"),
    [
        (["--gpus", "0"], "--gpus 0", "give 1 or more"),
        (["--gpus", "-3"], "--gpus -3", "give 1 or more"),
        (["--gpus", "65"], "65", "64"),
        (["--gpus", "four"], "'four'", "whole number"),
        (["--gpu-memory", "160MB"], "'160MB'", "MiB"),
        (["--gpu-memory", "-1"], "'-1'", "160MiB"),
        (["--gpu-memory", "0"], "'0'", "160MiB"),
        (["--gpu-memory", "lots"], "'lots'", "160MiB"),
        (["--model", "gpt-10mm"], "'gpt-10mm'", "did you mean 'gpt-10m'"),
        (["--model", "gpt-170b", "--gpus", "64"], "64 ranks", "smaller --model"),
        (["--stage", "4"], "stage: 4", "0, 1, 2 or 3"),
        (["--dtype", "int8"], "'int8'", "fp32, bf16, fp16"),
        (["--world", "mars"], "'mars'", "lockstep"),
        (["--steps", "0"], "--steps 0", "give 1 or more"),
        (["--micro-batch", "0"], "--micro-batch 0", "give 1 or more"),
        (["--sample", "-1"], "--sample -1", "give 0 or more"),
        (["--data", "no/such/file"], "'no/such/file'", "readable text file"),
        (["--config", "no/such.json"], "no/such.json", "path"),
        (["--timeout", "0"], "timeout 0", "above 0"),
        (["--shards", "4"], "--shards", "zerolab train --help"),
    ],
)
def test_bad_values_end_in_one_line_and_exit_code_2(capsys, args, value, remedy):
    if args[0] == "--config":
        args = [args[0], str(args[1])]
    code, out, err = run(capsys, *NANO, *args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert value in err
    assert remedy in err


def test_a_bad_value_leaves_no_traceback_in_a_real_process():
    command = [sys.executable, "-m", "zerolab", *NANO, "--data", "/"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "'/'" in done.stderr


def test_empty_and_short_files_are_bad_usage(capsys, tmp_path):
    for text, says in [("", "is empty"), ("too short", "9 bytes")]:
        path = tmp_path / "data.txt"
        path.write_text(text)
        code, out, err = run(capsys, *NANO, "--data", str(path))
        assert (code, out) == (2, "")
        assert says in err


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_torchrun_environment_is_bad_usage(capsys, monkeypatch, missing):
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    code, out, err = run(capsys, *NANO)
    assert (code, out) == (2, "")
    assert missing in err
    assert err.count("\n") == 1


def test_flags_that_contradict_torchrun_are_bad_usage(monkeypatch):
    monkeypatch.setattr(comm, "init_process_group", lambda: None)
    monkeypatch.setattr(comm, "get_world_size", lambda: 8)
    assert execute.join(None, None) == execute.join(8, "gloo") == 8
    with pytest.raises(UsageError, match="--gpus 4 contradicts torchrun, which started 8"):
        execute.join(4, None)
    with pytest.raises(UsageError, match="lockstep"):
        execute.join(None, "lockstep")


def test_under_torchrun_only_the_first_rank_reports_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr(execute, "TORCHRUN", ())
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, *NANO, "--steps", "0") == (2, "", "")


def skip_the_barrier(job):
    """Rank 1 goes home while rank 0 waits for it."""
    if comm.get_rank() == 0:
        comm.barrier()


def disagree(job):
    """Rank 1 sends more than rank 0."""
    comm.all_reduce(torch.zeros(1 + comm.get_rank()))


@pytest.mark.parametrize("rank_program", [skip_the_barrier, disagree])
def test_a_deadlock_ends_in_a_table_and_exit_code_4(capsys, monkeypatch, rank_program):
    monkeypatch.setattr(execute, "train_rank", rank_program)
    code, _out, err = run(capsys, *NANO)
    assert code == 4
    assert "test_cli.py" in err  # the line that waits
    assert "Traceback" not in err


def test_other_failures_show_their_traceback_and_exit_code_1(capsys, monkeypatch):
    def fail(job):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(execute, "train_rank", fail)
    code, _out, err = run(capsys, *NANO)
    assert code == 1
    assert "ZeroDivisionError: a bug" in err
    assert "in fail" in err
    assert "typer" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (torch.OutOfMemoryError("x"), 3),
        (DeadlockError("x"), 4),
        (MismatchError("x"), 4),
        (PeerError("x"), 1),
        (RankError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert cli.exit_code(error) == code


def test_ctrl_c_ends_without_a_traceback(capsys, monkeypatch):
    def interrupt(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "train_rank", interrupt)
    code, out, err = run(capsys, *NANO)
    assert (code, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


def test_without_a_command_the_help_is_shown(capsys):
    code, out, err = run(capsys)
    assert code == 2
    for command in ("train", "demo", "doctor", "learn", "config"):
        assert command in out + err
    assert "error" not in err


def test_every_command_explains_itself(capsys):
    for command in ("train", "demo", "doctor"):
        code, out, _err = run(capsys, command, "--help")
        assert code == 0
        assert "--help" in out


def test_help_does_not_wait_for_torch():
    program = "import sys, zerolab.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_base_of_typed_mistakes_is_typers_own():
    assert issubclass(typer.BadParameter, cli._TypedWrong)
    assert not issubclass(UsageError, cli._TypedWrong)
