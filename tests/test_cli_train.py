"""`zerolab train` on a tiny model: one schema, equal losses, closed forms, every world."""

import json
import os
import subprocess
import sys

import pytest
import torch

from zerolab import cli, gpt
from zerolab.cli import compare, job, tables
from zerolab.sim import estimate

NANO = ["train", "--model", "gpt-nano", "--steps", "3", "--gpus", "4"]
STATES = {"param", "grad", "master", "optimizer"}


def run(capsys, *args):
    code = cli.run([*NANO, *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *args):
    """Run with --json and return the object on the last line."""
    code, out, _err = run(capsys, "--json", *args)
    assert code == 0
    return json.loads(out.splitlines()[-1])


def layouts(world_size=4):
    with torch.device("meta"):
        model = gpt.GPT(gpt.preset("gpt-nano"))
    return [estimate.layout(model, 2**20, world_size, rank) for rank in range(world_size)]


def test_json_has_exactly_the_promised_fields(capsys):
    result = run_json(capsys, "--stage", "2")
    assert set(result) == {"stage", "world_size", "dtype", "losses", "step_seconds", "ranks"}
    assert (result["stage"], result["world_size"], result["dtype"]) == (2, 4, "bf16")
    assert len(result["losses"]) == len(result["step_seconds"]) == 3
    assert all(seconds > 0 for seconds in result["step_seconds"])
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    for rank in result["ranks"]:
        assert set(rank) == {"rank", "peak_bytes", "state_bytes", "comm"}
        assert set(rank["state_bytes"]) == STATES
        assert set(rank["comm"]) == {"reduce_scatter", "all_gather"}
        assert all(set(total) == {"calls", "elements", "bytes"} for total in rank["comm"].values())
        assert rank["peak_bytes"] > sum(rank["state_bytes"].values())


FP16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}  # too high: 2**40 overflows


def scaled_config(tmp_path, **fp16):
    path = tmp_path / "fp16.json"
    path.write_text(json.dumps({"train_batch_size": 8, "fp16": FP16 | fp16}))
    return str(path)


@pytest.mark.parametrize("world", ["lockstep", "gloo"])
def test_fp16_says_how_many_steps_were_skipped_and_where_the_loss_scale_is(capsys, tmp_path, world):
    path = scaled_config(tmp_path)
    result = run_json(capsys, "--config", path, "--world", world, "--stage", "3")
    assert (result["skipped_steps"], result["loss_scale"]) == (3, 2.0**37)
    assert result["losses"][0] == pytest.approx(result["losses"][-1], abs=0.2)


def test_the_summary_names_skipped_steps_with_fp16_only(capsys, tmp_path):
    _code, out, _err = run(capsys, "--config", scaled_config(tmp_path))
    assert "fp16: 3 of 3 steps skipped on overflow, loss scale 137,438,953,472 at the end" in out
    _code, out, _err = run(capsys, "--config", scaled_config(tmp_path, initial_scale_power=8))
    assert "fp16: no step skipped, loss scale 256 at the end" in out
    _code, out, _err = run(capsys, "--dtype", "bf16")
    assert "overflow" not in out and "loss scale" not in out


def test_result_goes_to_stdout_and_news_to_stderr(capsys):
    code, out, err = run(capsys, "--json")
    assert code == 0
    assert out.count("\n") == 1
    assert [f"step {number}/3" in err for number in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_all_stages_lose_the_same_and_meet_their_closed_forms(capsys, dtype):
    results = [run_json(capsys, "--stage", str(k), "--dtype", dtype) for k in range(4)]
    assert all(result["losses"] == results[0]["losses"] for result in results)
    for stage, result in enumerate(results):
        for rank, sizes in zip(result["ranks"], layouts(), strict=True):
            assert rank["state_bytes"] == estimate.state_bytes(stage, dtype, sizes)
            comm = {op: total["elements"] for op, total in rank["comm"].items()}
            moved = sum(comm.values()) + comm.get("all_reduce", 0)
            assert moved == estimate.elements_moved(stage, sizes.padded_numel)


def test_accumulation_moves_what_its_closed_form_says(capsys):
    for stage in range(4):
        result = run_json(capsys, "--stage", str(stage), "--accum-steps", "3")
        comm = {op: total["elements"] for op, total in result["ranks"][0]["comm"].items()}
        moved = sum(comm.values()) + comm.get("all_reduce", 0)
        assert moved == estimate.elements_moved(stage, layouts()[0].padded_numel, accum_steps=3)


def test_the_global_batch_is_the_same_for_every_number_of_gpus(capsys):
    first_losses = [
        run_json(capsys, "--gpus", str(n), "--micro-batch", str(12 // n), "--dtype", "fp32")
        for n in (1, 3, 4)
    ]
    for result in first_losses[1:]:
        assert result["losses"] == pytest.approx(first_losses[0]["losses"], rel=1e-5)


def test_the_text_and_the_seed_decide_the_losses(capsys, tmp_path):
    path = tmp_path / "abc.txt"
    path.write_text("abc" * 1000)
    novel = run_json(capsys)["losses"]
    assert run_json(capsys)["losses"] == novel
    assert run_json(capsys, "--seed", "1")["losses"] != novel
    abc = run_json(capsys, "--data", str(path), "--steps", "8", "--lr", "0.01")["losses"]
    assert abc[-1] < abc[0] / 2


def test_a_config_file_decides_what_flags_leave_open(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    content = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    path.write_text(json.dumps(content))
    assert run_json(capsys, "--config", str(path))["stage"] == 3
    code, out, err = run(capsys, "--config", str(path), "--stage", "1")
    assert (code, out) == (2, "")
    assert "contradicts" in err


def test_fp16_by_flag_keeps_what_the_file_says_of_its_loss_scale(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "fp16": {"initial_scale_power": 8}}))
    result = run_json(capsys, "--config", str(path), "--dtype", "fp16")
    assert result["dtype"] == "fp16" and result["losses"][-1] < result["losses"][0]
    path.write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}}))
    code, _out, err = run(capsys, "--config", str(path), "--dtype", "fp16")
    assert code == 2 and "--dtype fp16 contradicts the config file" in err


@pytest.fixture(scope="module")
def between():
    """A memory that stage 0 overflows and stage 3 does not: the middle of their peaks."""

    trials = [compare.run(stage, None, "gpt-nano", 4, 2) for stage in (0, 3)]
    return str(sum(trial.outcome.reports[0].peak_bytes for trial in trials) // 2)


def test_out_of_memory_is_exit_code_3_with_breakdown_and_peaks(capsys, between):
    code, out, err = run(capsys, "--stage", "0", "--gpu-memory", between, "--json")
    assert code == 3
    result = json.loads(out.splitlines()[-1])
    assert "out of memory" in result["error"]
    assert len(result["ranks"]) == 4
    assert all(0 < rank["peak_bytes"] <= int(between) for rank in result["ranks"])
    assert "Of the allocated memory" in err
    assert "param" in err
    assert "Traceback" not in err


def test_stage_3_fits_where_stage_0_does_not(capsys, between):
    code, _out, _err = run(capsys, "--stage", "3", "--gpu-memory", between)
    assert code == 0


def test_out_of_memory_before_the_first_step_is_reported_too(capsys):
    code, out, _err = run(capsys, "--gpu-memory", "100KiB", "--json")
    assert code == 3
    result = json.loads(out.splitlines()[-1])
    assert result["losses"] == []
    assert result["ranks"][0]["peak_bytes"] <= 100 * 2**10
    assert "gpt.py:" in result["error"]  # the line of the model that asked


def test_people_get_tables_and_a_sample(capsys):
    code, out, _err = run(capsys, "--stage", "1", "--sample", "8")
    assert code == 0
    for word in ("rank", "peak", "reduce_scatter", "tokens/s", "stage 1, 4 ranks, bf16"):
        assert word in out
    sample = out[out.index("together") + len("together") :]
    assert sample.strip("\n")


def test_a_sharded_model_writes_what_a_whole_one_writes(capsys):
    samples = []
    for stage in ("0", "3"):
        _code, out, _err = run(capsys, "--stage", stage, "--sample", "8")
        samples.append(out[out.index("together") :])
    assert samples[0] == samples[1]


def test_gloo_processes_lose_the_same_as_lockstep(capsys):
    lockstep = run_json(capsys, "--stage", "2", "--gpus", "2")
    gloo = run_json(capsys, "--stage", "2", "--gpus", "2", "--world", "gloo")
    assert gloo["losses"] == lockstep["losses"]
    for ours, theirs in zip(gloo["ranks"], lockstep["ranks"], strict=True):
        assert ours["state_bytes"] == theirs["state_bytes"]
        assert ours["comm"] == theirs["comm"]


def test_torchrun_joins_the_ranks_and_rank_0_speaks(capsys):
    expected = run_json(capsys, "--stage", "3", "--gpus", "2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "zerolab", "train", "--model", "gpt-nano"]
    command += ["--steps", "3", "--stage", "3", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["losses"] == expected["losses"]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert result["ranks"][1]["state_bytes"] == expected["ranks"][1]["state_bytes"]


def test_losses_are_averaged_in_rank_order():
    from zerolab import comm

    values = [0.1, 0.2, 0.3, 1e16]
    expected = (((0.1 + 0.2) + 0.3) + 1e16) / 4
    results = comm.run(lambda: job.mean_over_ranks(values[comm.get_rank()]), 4)
    assert results == [expected] * 4


def test_a_config_that_warns_says_so(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "prescale_gradients": True}))
    code, _out, err = run(capsys, "--config", str(path))
    assert code == 0
    assert err.startswith("warning: prescale_gradients")


# What cannot be written, what is refused, what broke off.

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110


@FULL
@pytest.mark.parametrize("words", [["--json"], []])
def test_a_full_disk_is_one_line(words):
    command = [sys.executable, "-m", "zerolab", *NANO, "--steps", "1", *words]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "error: the result cannot be written: No space left on device"
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--stage", "7"], "stage"), (["--steps", "x"], "whole number"), (["--nonsense"], "nonsense")],
)
def test_bad_usage_with_json_is_a_json_object(capsys, args, said):
    code, out, err = run(capsys, "--json", *args)
    told = json.loads(out)
    assert code == 2 and told["exit_code"] == 2 and said in told["error"]
    assert told["error"] in err, "people read the same"


def test_after_out_of_memory_the_table_says_which_step_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    whole = run_json(capsys, "--stage", "1")
    peak = whole["ranks"][0]["peak_bytes"]
    first = run_json(capsys, "--stage", "1", "--steps", "1")["ranks"][0]["peak_bytes"]
    assert first < peak, "Adam's averages come with the first step: the second needs more"
    code, out, _ = run(capsys, "--stage", "1", "--gpu-memory", str((first + peak) // 2))
    assert code == 3
    assert "MiB on each rank when gradients were ready in step 1" in out
    titles = ("1, the last whole one", "2, cut short")  # rank 0 may not have begun it
    assert any(f"collectives of step {words}" in " ".join(out.split()) for words in titles)
    cut_short = job.RankReport(0, losses=[1.0], traffic_step=2)
    assert tables.traffic_table(cut_short, True).title == "collectives of step 2, cut short"
    assert tables.traffic_table(cut_short).title == "collectives of the last step"
    code, out, _ = run(capsys, "--stage", "1", "--gpu-memory", str(first // 2))
    assert code == 3 and "gradients were never ready" in out
