"""`zerolab estimate`: the numbers of the paper, a configuration that loads, good refusals."""

import json

import pytest
import torch

from zerolab import cli, config, gpt
from zerolab.sim import estimate

PSI = ["--psi", "7.5", "--gpus", "64"]


def run(capsys, *args):
    code = cli.run(["estimate", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *args):
    code, out, _err = run(capsys, *args, "--json")
    assert code == 0
    return json.loads(out.splitlines()[-1])


def rows_of(out, title):
    """The cells of a table, by the first word of each row."""
    body = out.split(title)[1].split("\n")[4:]
    rows = {}
    for line in body:
        if not line.strip():
            break
        first, *cells = line.split()
        rows[first] = cells
    return rows


def test_the_headline_numbers_are_the_papers(capsys):
    code, out, _err = run(capsys, *PSI)
    assert code == 0
    rows = rows_of(out, "model states on one GPU")
    assert [rows[stage][4] for stage in "0123"] == ["120.0", "31.4", "16.6", "1.88"]  # GB
    assert [rows[stage][5] for stage in "0123"] == ["111.8", "29.2", "15.5", "1.75"]  # GiB
    assert [rows[stage][6] for stage in "0123"] == ["no", "yes", "yes", "yes"]
    traffic = rows_of(out, "traffic of one step")
    assert [traffic[stage][:2] for stage in "0123"] == [[n, "Psi"] for n in "2223"]
    theirs = rows_of(out, "DeepSpeed's estimate")
    assert theirs == {"2": ["17.1", "15.9", "16.6"], "3": ["2.11", "1.96", "1.88"]}
    assert "18 bytes" in out
    assert "stage 1 is the cheapest that fits" in out


def test_json_says_the_same_in_bytes(capsys):
    result = run_json(capsys, *PSI)
    assert (result["num_params"], result["gpus"], result["stage"]) == (7_500_000_000, 64, 1)
    for row in result["stages"]:
        stage = row["stage"]
        states = estimate.model_states(7_500_000_000, 64, stage)
        assert row["bytes"] == states
        assert row["state_bytes"] == row["total_bytes"] == sum(states.values())
        assert row["gb"] == row["state_bytes"] / 1e9
        assert row["gib"] == row["state_bytes"] / 2**30
        assert row["elements_moved"] == estimate.elements_moved(stage, 7_500_000_000)
        assert row["sent_bytes"] == row["elements_moved"] * 2 * 63 // 64
    assert [row["deepspeed_bytes"] for row in result["stages"]] == [
        None,
        None,
        17_109_375_000,
        2_109_375_000,
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", list(estimate.OPTIMIZERS))
def test_every_precision_and_optimizer_writes_a_file_that_loads(
    capsys, tmp_path, precision, optimizer
):
    path = tmp_path / "ds_config.json"
    flags = ["--precision", precision, "--optimizer", optimizer, "--config-out", str(path)]
    more = ["--micro-batch", "2", "--accum-steps", "3"]
    result = run_json(capsys, *PSI, *flags, *more)
    loaded = config.load(path, 64)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    cheapest = estimate.smallest_stage(7_500_000_000, 64, 80 * 2**30, precision, optimizer)
    assert loaded.stage == result["stage"] == cheapest
    assert (loaded.param_dtype, loaded.warnings) == (dtype, ())
    assert (loaded.micro_batch_size, loaded.accum_steps) == (2, 3)
    assert loaded.train_batch_size == 2 * 3 * 64
    made = config.build_optimizer(loaded, [torch.zeros(4, requires_grad=True)])
    made.param_groups[0]["params"][0].grad = torch.ones(4)
    made.step()
    held = [v for state in made.state.values() for v in state.values() if v is not None]
    remembered = estimate.OPTIMIZERS[optimizer]
    nbytes = sum(v.numel() * v.element_size() for v in held if torch.is_tensor(v))
    assert nbytes == 4 * remembered.bytes_per_param + remembered.bytes_per_segment


def test_the_given_stage_is_written_even_if_it_does_not_fit(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    code, out, err = run(capsys, *PSI, "--stage", "0", "--config-out", str(path))
    assert (code, config.load(path, 64).stage) == (0, 0)
    assert "stage 0 does not fit" in out
    assert err == f"wrote {path}\n"
    _, out, _ = run(capsys, *PSI, "--stage", "3")
    assert "stage 3 fits" in out


def test_less_memory_asks_for_a_higher_stage(capsys):
    sizes = ("112GiB", "30GiB", "16GiB", "2GiB", "1GiB")
    stages = [run_json(capsys, *PSI, "--gpu-memory", size)["stage"] for size in sizes]
    assert stages == [0, 1, 2, 3, None]


def test_where_nothing_fits_no_file_is_written_and_the_remedy_is_a_number(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    code, out, err = run(capsys, "--psi", "100", "--gpus", "8", "--config-out", str(path))
    needed = estimate.gpus_needed(100 * 10**9, 80 * 2**30)
    assert (code, out) == (2, "")
    assert f"need {needed}" in err and err.count("\n") == 1
    assert not path.exists()
    assert run_json(capsys, "--psi", "100", "--gpus", str(needed))["stage"] == 3


def test_a_model_adds_what_its_shape_decides(capsys):
    flags = ["--model", "gpt-7.5b", "--gpus", "64", "--micro-batch", "4"]
    result = run_json(capsys, *flags)
    shape = gpt.preset("gpt-7.5b")
    assert result["num_params"] == gpt.num_params(shape)
    with torch.device("meta"):
        model = gpt.GPT(shape)
    sizes = estimate.layout(model, estimate.BUCKET_NUMEL, 64)
    for row in result["stages"]:
        parts, stage = row["bytes"], row["stage"]
        assert parts["activation"] == estimate.activation_bytes(shape, 4)
        assert parts["gathered"] == estimate.gathered_peak_bytes(stage, sizes, "bf16")
        assert row["total_bytes"] == sum(parts.values())
        assert row["fits"] == (row["total_bytes"] <= 80 * 2**30)
    largest = 4 * max(4 * shape.dim**2 + 4 * shape.dim, shape.vocab_size * shape.dim)
    third = result["stages"][3]
    assert third["deepspeed_bytes"] == largest + int(18 * result["num_params"] / 64)
    _, out, _ = run(capsys, *flags)
    assert "stage 1 is the cheapest that fits" in out and "give --model" not in out


def test_accumulation_shows_in_the_traffic(capsys):
    _, out, _ = run(capsys, *PSI, "--accum-steps", "4")
    traffic = rows_of(out, "traffic of one step of 4 micro-batches")
    assert [traffic[stage][0] for stage in "0123"] == ["2", "2", "5", "12"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give either --psi"),
        (["--psi", "1", "--model", "gpt-nano"], "give either --psi"),
        (["--psi", "0"], "0 billion parameters"),
        (["--psi", "-1"], "-1 billion parameters"),
        (["--psi", "nan"], "nan billion parameters"),
        (["--psi", "1e300"], "1e300 billion parameters"),
        (["--psi", "7,5"], "'7,5' is no number"),
        (["--psi", "7.5B"], "'7.5B' is no number"),
        (["--psi", "1", "--gpus", "0"], "--gpus 0 is below 1"),
        (["--psi", "1", "--gpus", "two"], "'two' is no whole number"),
        (["--psi", "1", "--micro-batch", "0"], "--micro-batch 0"),
        (["--psi", "1", "--accum-steps", "-2"], "--accum-steps -2"),
        (["--psi", "1", "--stage", "4"], "stage 4 is unknown"),
        (["--psi", "1", "--precision", "fp8"], "'fp8' is unknown"),
        (["--psi", "1", "--optimizer", "lamb"], "'lamb' is unknown"),
        (["--psi", "1", "--gpu-memory", "80GB"], "GB"),
        (["--psi", "1", "--gpu-memory", "-1GiB"], "-1GiB"),
        (["--model", "gpt-7b"], "did you mean 'gpt-7.5b'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(capsys, args, words):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_files_are_neither_overwritten_nor_lost(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text("mine")
    code, _, err = run(capsys, *PSI, "--config-out", str(path))
    assert (code, path.read_text()) == (2, "mine")
    assert "exists" in err
    assert run(capsys, *PSI, "--config-out", str(path), "--force")[0] == 0
    assert config.load(path, 64).stage == 1
    for bad in (tmp_path, tmp_path / "nowhere" / "file.json"):
        code, out, err = run(capsys, *PSI, "--config-out", str(bad), "--force")
        assert (code, out) == (2, "")
        assert "cannot be written" in err and err.count("\n") == 1
