"""Configurations as three popular articles print them: what is wrong, why, the corrected file."""

import json
from pathlib import Path

import pytest

from zerolab import config
from zerolab.config import explain

DATA = Path(__file__).parent / "data" / "config"
FRAGMENTS = sorted(path.name for path in DATA.iterdir() if path.name[1] == "_")


def examine(name, world_size=8):
    return config.examine(DATA / name, world_size)


def said(report, key, severity):
    found = [p for p in report.problems if p.key == key and p.severity == severity]
    assert found, [str(p) for p in report.problems]
    return str(found[0])


def test_all_fragments_are_here():
    assert len(FRAGMENTS) == 8


@pytest.mark.parametrize("name", FRAGMENTS)
def test_no_fragment_runs_as_printed_and_every_corrected_one_does(name):
    report = examine(name)
    assert report.stoppers
    corrected = json.loads(json.dumps(report.corrected()))
    assert config.examine(corrected, 8).stoppers == ()
    assert config.load(corrected, 8).optimizer is not None


@pytest.mark.parametrize("stage", [1, 2])
def test_a13_stage_1_or_2_without_an_optimizer(stage):
    report = examine(f"a_zero{stage}.json")
    text = said(report, "optimizer", "needs")
    assert f"stage {stage} has nothing to shard" in text and "AssertionError" in text
    assert '"type": "AdamW"' in text and "pass optimizer= to initialize" in text
    assert "the run is in fp32" in said(report, "", "note")
    assert report.corrected() == {
        "train_batch_size": 32,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def test_a13_is_no_problem_when_the_script_brings_the_optimizer():
    raw = json.loads((DATA / "a_zero1.json").read_text())
    cfg = config.load(raw, 8)
    assert cfg.stage == 1
    assert config.examine(raw, 8, optimizer_in_code=True).stoppers == ()
    with pytest.raises(config.ConfigError, match="stage 1 has nothing to shard"):
        config.build_optimizer(cfg, [])


def test_a14_stage_3_without_an_optimizer_and_with_offload():
    report = examine("a_zero3.json")
    text = said(report, "optimizer", "needs")
    assert "inference engine without a word" in text and "backward fails" in text
    for block in ("offload_param", "offload_optimizer"):
        said(report, f"zero_optimization.{block}", "error")
    assert "optimizer" in report.corrected()
    assert "offload_param" not in report.corrected()["zero_optimization"]


def test_b2_batch_16_with_4_micro_steps_has_no_micro_batch_on_8_gpus():
    report = examine("b_typical.json")
    text = said(report, "train_batch_size", "error")
    assert "16 = micro x 4 x 8 GPUs has no solution" in text
    assert "run on 1, 2 or 4 GPUs" in text
    fixed = report.corrected()
    assert (fixed["train_batch_size"], fixed["gradient_accumulation_steps"]) == (16, 2)
    for world_size, micro in ((1, 4), (2, 2), (4, 1)):
        assert config.load(DATA / "b_typical.json", world_size).micro_batch_size == micro


def test_b3_untested_optimizer_flag_is_not_needed_for_adamw():
    report = examine("b_typical.json")
    assert "AdamW too" in said(report, "zero_allow_untested_optimizer", "warning")
    assert "zero_allow_untested_optimizer" not in report.corrected()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_b2_generated_file_fails_the_same_way_at_every_stage(stage, tmp_path):
    text = (DATA / "b_typical.json").read_text().replace('"stage": 2', f'"stage": {stage}')
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert "16 = micro x 4 x 8" in said(config.examine(file, 8), "train_batch_size", "error")


def test_b_generator_is_python_and_says_so():
    report = examine("b_make_config.txt")
    texts = [str(p) for p in report.problems if p.severity == "error"]
    assert any("True is Python, not JSON; write true" in text for text in texts)
    assert any("stage has no quotes" in text for text in texts)
    assert any("16 = micro x 4 x 8" in text for text in texts)


def test_c6_partitioned_activations_is_a_misspelling():
    report = examine("c_activation.json")
    text = said(report, "activation_checkpointing.partitioned_activations", "error")
    assert "did you mean 'partition_activations'" in text
    assert "ignores it without a word" in text
    assert report.corrected()["activation_checkpointing"]["partition_activations"] is False


def test_c10_activation_block_alone_does_nothing():
    report = examine("c_activation.json")
    text = said(report, "activation_checkpointing", "warning")
    assert "does nothing by itself" in text and "configure" in text and "checkpoint(...)" in text


def test_c_manual_choices_are_no_values():
    report = examine("c_activation.json")
    for name in ("cpu_checkpointing", "profile", "contiguous_memory_optimization"):
        text = said(report, f"activation_checkpointing.{name}", "error")
        assert "[true|false]" in text and "write false" in text


def test_c7_partitioning_cuts_across_model_parallel_ranks():
    raw = {"activation_checkpointing": {"partition_activations": True}}
    key = "activation_checkpointing.partition_activations"
    assert "saves nothing" in said(config.examine(raw, 8), key, "note")


def test_c9_contiguous_memory_needs_the_other_two():
    raw = {"activation_checkpointing": {"contiguous_memory_optimization": True}}
    key = "activation_checkpointing.contiguous_memory_optimization"
    assert "number_checkpoints" in said(config.examine(raw, 8), key, "error")


def test_c13_dead_and_idle_keys_of_the_complete_configuration():
    report = examine("c_zero2.json")
    assert "dead" in said(report, "zero_optimization.allgather_partitions", "warning")
    for name in ("allgather_bucket_size", "round_robin_gradients"):
        said(report, f"zero_optimization.{name}", "warning")
    assert "0.93 GiB" in said(report, "zero_optimization.reduce_bucket_size", "note")
    assert "no batch size" in said(report, "train_batch_size", "error")
    assert "not yet in this version" in said(report, "zero_optimization.offload_optimizer", "error")
    kept = report.corrected()["zero_optimization"]
    assert kept["stage"] == 2 and "allgather_partitions" not in kept


def test_c15_one_gpu_shards_nothing():
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    text = said(config.examine(raw, 1), "zero_optimization.stage", "note")
    assert "a shard is the whole" in text


def test_explanation_has_a_row_for_every_key_of_the_file():
    report = examine("c_zero2.json")
    rows = {row.key: row for row in explain.rows(report)}
    assert len(rows) == 12
    assert rows["zero_optimization.stage"].status == "works"
    assert rows["zero_optimization.allgather_partitions"].status == "no effect"
    assert rows["zero_optimization.offload_optimizer.device"].status == "not yet"
    assert rows["zero_optimization.offload_optimizer.pin_memory"].value == "true"


def test_explanation_tells_what_a_file_asks_from_what_it_repeats():
    raw = {
        "train_batch_size": 8,
        "wall_clock_breakdown": False,
        "steps_per_print": 10,
        "gradient_clipping": "auto",
        "zero_optimization": {"contiguous_gradients": True, "offload_param": {"device": "none"}},
    }
    rows = {row.key: row.status for row in explain.rows(config.examine(raw, 2))}
    assert rows == {
        "train_batch_size": "works",
        "wall_clock_breakdown": "default",
        "steps_per_print": "not yet heard",
        "gradient_clipping": "default",
        "zero_optimization.contiguous_gradients": "always so",
        "zero_optimization.offload_param.device": "default",
    }


def test_report_as_json_is_json_and_holds_the_corrected_file():
    data = json.loads(json.dumps(explain.as_json(examine("c_activation.json"))))
    assert data["valid"] is False and data["gpus"] == 8
    assert config.examine(data["corrected"], 8).stoppers == ()
    values = {row["key"]: row["value"] for row in data["keys"]}
    assert "[true|false]" in values["activation_checkpointing.profile"]
    valid = explain.as_json(config.examine(data["corrected"], 8))
    assert valid["valid"] is True and valid["corrected"] is None
    assert valid["batch"].startswith("8 = 1 x 1 x 8")
