"""The configuration: the batch equation, names, types, and a status for every key."""

import base64
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from zerolab import config
from zerolab.config import keys, renamed, schema, triad
from zerolab.config.keys import Key, Status
from zerolab.errors import UsageError


def base(**more):
    adamw = {"type": "AdamW", "params": {"lr": 1e-4}}
    return {"train_batch_size": 16, "optimizer": adamw, "gradient_clipping": 1.0, **more}


def complaints(raw, world_size=4):
    with pytest.raises(config.ConfigError) as caught:
        config.load(raw, world_size)
    return str(caught.value)


# --- the batch equation -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((64, 4, 2), (64, 4, 2)),
        ((64, 4, None), (64, 4, 2)),
        ((64, None, 4), (64, 2, 4)),
        ((None, 4, 3), (96, 4, 3)),
        ((64, None, None), (64, 8, 1)),
        ((None, 4, None), (32, 4, 1)),
    ],
)
def test_triad_is_inferred_as_deepspeed_does_on_8_gpus(given, expected):
    names = (triad.TOTAL, triad.MICRO, triad.ACCUM)
    raw = {name: number for name, number in zip(names, given, strict=True) if number}
    cfg = config.load(raw, 8)
    assert (cfg.train_batch_size, cfg.micro_batch_size, cfg.accum_steps) == expected


@pytest.mark.parametrize(
    ("given", "must_say"),
    [
        (
            {"train_batch_size": 33},
            ["33 = micro x accum x 8 GPUs", "32 = 4 x 1 x 8", "40 = 5 x 1 x 8"],
        ),
        ({"train_batch_size": 4}, ["8 = 1 x 1 x 8", "or run on 1, 2 or 4 GPUs"]),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 4},
            ["16 = micro x 4 x 8 GPUs", "16 = 1 x 2 x 8", "16 = 2 x 1 x 8", "1, 2 or 4 GPUs"],
        ),
        (
            {
                "train_batch_size": 48,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": 4,
            },
            ["48 = 3 x 4 x 8 GPUs", "run on 4 GPUs"],
        ),
        (
            {"gradient_accumulation_steps": 4},
            ["only gradient_accumulation_steps = 4", "at least one"],
        ),
        ({}, ["no batch size", "train_micro_batch_size_per_gpu x gradient_accumulation_steps"]),
    ],
)
def test_triad_without_solution_shows_equation_and_choices(given, must_say):
    message = complaints(given, 8)
    assert all(words in message for words in must_say), message


def test_triad_choices_satisfy_the_equation_and_keep_the_total_when_they_can():
    for total in range(1, 50):
        for world_size in (1, 2, 3, 8):
            for micro, accum in ((None, 3), (2, None), (5, 7)):
                choices = triad.nearby(total, micro, accum, world_size)
                assert choices
                assert all(triad.solves(choice, world_size) for choice in choices)
                if total % world_size == 0:
                    assert {choice.total for choice in choices} == {total}


@pytest.mark.parametrize("wrong", ["16", 1.5, True, -4, 0, None, [16], float("nan"), 2**64])
def test_batch_size_of_the_wrong_kind_is_named(wrong):
    message = complaints({"train_batch_size": wrong})
    assert message.startswith("config: train_batch_size: ")
    if wrong is not None:
        assert "must be" in message


def test_auto_is_refused_for_batch_sizes_and_default_elsewhere():
    assert '"auto"' in complaints({"train_batch_size": "auto"})
    raw = base(
        gradient_clipping="auto",
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    )
    cfg = config.load(raw, 4)
    assert cfg.gradient_clipping == 0.0
    assert cfg.zero.reduce_bucket_size == 2**20
    assert cfg.optimizer.params == {}


# --- what the engine reads ----------------------------------------------------------------


def test_silent_file_has_our_defaults():
    cfg = config.load({"train_micro_batch_size_per_gpu": 2}, 4)
    assert cfg.stage == 0 and cfg.train_batch_size == 8
    assert cfg.zero.reduce_bucket_size == 2**20
    assert (cfg.zero.param_persistence_threshold, cfg.zero.max_live_parameters) == (0, 0)
    assert cfg.zero.max_reuse_distance == 0
    assert cfg.zero.overlap_comm is True
    assert (cfg.param_dtype, cfg.reduce_dtype, cfg.grad_accum_dtype) == (torch.float32,) * 3
    assert cfg.gradient_clipping == 0.0
    assert cfg.optimizer is None and cfg.scheduler is None and cfg.warnings == ()


def test_precision_blocks_decide_the_dtypes():
    cfg = config.load(base(bf16={"enabled": True}, communication_data_type="fp32"), 4)
    assert (cfg.param_dtype, cfg.reduce_dtype) == (torch.bfloat16, torch.float32)
    cfg = config.load(base(fp16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}), 4)
    assert (cfg.param_dtype, cfg.grad_accum_dtype) == (torch.float16, torch.float32)
    assert (cfg.fp16.initial_scale_power, cfg.fp16.loss_scale, cfg.fp16.window) == (16, 0, 1000)
    both = complaints(base(fp16={"enabled": True}, bf16={"enabled": True}))
    assert "fp16 and bf16 are both on" in both


@pytest.mark.parametrize(
    ("stage", "block", "expected"),
    [
        (1, {}, False),
        (2, {}, True),
        (3, {}, True),
        (3, {"reduce": "boundary"}, False),
        (0, {"reduce": "micro_step"}, True),
    ],
)
def test_reduction_is_every_micro_step_from_stage_2_unless_said_otherwise(stage, block, expected):
    raw = base(zero_optimization={"stage": stage}, zerolab=block)
    assert config.load(raw, 4).reduce_every_micro_step is expected


def test_loaded_config_is_passed_through_or_resolved_for_another_world_size():
    cfg = config.load(base(), 4)
    assert config.load(cfg, 4) is cfg
    again = config.load(cfg, 2)
    assert (again.world_size, again.micro_batch_size) == (2, 8)


def test_given_dict_is_neither_kept_nor_changed():
    raw = base(zero_optimization={"cpu_offload": False, "stage": 1})
    before = json.dumps(raw)
    cfg = config.load(raw, 4)
    raw["zero_optimization"]["stage"] = 3
    assert cfg.raw["zero_optimization"]["stage"] == 1
    raw["zero_optimization"]["stage"] = 1
    assert json.dumps(raw) == before


# --- the text -------------------------------------------------------------------------------


def test_hjson_file_with_comments_and_trailing_commas_is_read(tmp_path):
    file = tmp_path / "ds.hjson"
    file.write_text(
        """{
        # the batch
        "train_batch_size": 8, // all GPUs
        /* stage
           two */ "zero_optimization": {"stage": 2,},
        optimizer: {
            type: AdamW
            params: {lr: 1e-3}
        }
    }"""
    )
    cfg = config.load(file, 4)
    assert (cfg.stage, cfg.optimizer.type, cfg.optimizer.params) == (2, "AdamW", {"lr": 1e-3})
    assert config.load(str(file), 4).stage == 2


def test_base64_of_json_is_read():
    text = base64.b64encode(json.dumps(base(zero_optimization={"stage": 1})).encode()).decode()
    assert config.load(text, 4).stage == 1


def test_duplicate_keys_are_found_wherever_they_stand(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 2},'
        ' "train_batch_size": 4}'
    )
    message = complaints(file)
    assert "2 problems" in message
    assert "zero_optimization.stage: stands twice" in message
    assert "train_batch_size: stands twice" in message


@pytest.mark.parametrize(
    ("text", "must_say"),
    [
        ('{"train_batch_size": 8,\n "fp16": {"enabled": true}\n', "line 3"),
        ('{"train_batch_size": 8 "x": 1}', "line 1"),
        ("[1, 2]", "holds [1, 2], which is no object"),
        ("7", "holds 7, which is no object"),
        (" ", "holds nothing"),
        (" " * (2**20 + 1), "has 1048577 bytes"),
        (
            '{"fp16": {"enabled": True}, "train_batch_size": 8}',
            "True is Python, not JSON; write true",
        ),
        ('{"optimizer": {"type": AdamW}, "train_batch_size": 8}', "AdamW has no quotes"),
        ('{"gradient_clipping": NaN, "train_batch_size": 8}', "NaN is no number of JSON"),
        ('{"gradient_clipping": -Infinity}', "-Infinity is no number of JSON"),
        ('{"gradient_clipping": 1e999}', "number 1e999 is too large"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "number 99999999999999999... is too large"),
        ('{"optimizer": {"type": "SGD", "params": {"lr": 1' + "0" * 400 + "}}}", "lr: 1000"),
        ('{"a": ' * 60 + "1" + "}" * 60, "ds.json: has blocks more than 20 deep; flatten it"),
        ('{"a":' * 5000, "blocks more than 20 deep"),
        ("{ /* no end", "is not closed"),
        ('{"train_batch_size": 8, "\\u001b[31m": 1}', r'"\u001b[31m": is not a key'),
        ('{"train_batch_size": 8, "": 1}', '"": is not a key'),
    ],
)
def test_broken_text_says_where_and_what(tmp_path, text, must_say):
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert must_say in complaints(file)


@pytest.mark.parametrize(
    ("blocks", "must_say"),
    [
        ({"optimizer": "auto"}, "there is no optimizer block"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type: is missing"),
        ({"scheduler": {"type": "auto", "params": {}}}, "scheduler.type: is missing"),
    ],
)
def test_auto_where_no_default_can_run_is_an_error_before_the_training(blocks, must_say):
    raw = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}} | blocks
    report = config.examine(raw, 4)
    assert must_say in "\n".join(map(str, report.stoppers))
    assert config.examine(report.corrected(), 4).stoppers == ()


def test_scalars_of_numpy_and_torch_are_the_numbers_they_hold():
    raw = {
        "train_batch_size": np.int64(8),
        "gradient_clipping": np.float32(0.5),
        "bf16": {"enabled": np.bool_(True)},
        "optimizer": {"type": "AdamW", "params": {"lr": torch.tensor(0.25)}},
    }
    cfg = config.load(raw, 4)
    assert (cfg.train_batch_size, cfg.gradient_clipping, cfg.bf16.enabled) == (8, 0.5, True)
    assert cfg.optimizer.params == {"lr": 0.25}


def test_the_encodings_that_editors_write_are_read_and_others_named(tmp_path):
    file, text = tmp_path / "ds.json", '{"train_batch_size": 8}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text(text, encoding=encoding)
        assert config.load(file, 4).train_batch_size == 8
    file.write_bytes(b'{"caf\xe9": 1}')
    with pytest.raises(UsageError, match=r"ds.json: is not text in UTF-8: byte 5 is 0xe9; save it"):
        config.load(file, 4)


def test_half_a_character_does_not_reach_screen_or_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "log_level": "a\\ud800"}')
    assert config.load(file, 4).raw["log_level"] == "a\ufffd"


@pytest.mark.parametrize("source", ["no/such/file.json", 5, None, "{}"])
def test_what_is_no_configuration_is_refused(source):
    with pytest.raises(UsageError, match="give a dict or "):
        config.load(source, 4)


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "must_say"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: is not a key .* mean 'zero_optimization'"),
        ({"train_batchsize": 8}, "did you mean 'train_batch_size'"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge: .* did you mean 'stage'"),
        ({"zero_optimization": {"stage3_max_live_params": 1}}, "'stage3_max_live_parameters'"),
        ({"stage": 2}, "it belongs in zero_optimization"),
        ({"zero_optimization": {"loss_scale": 0}}, "it belongs in fp16"),
        ({"lunch": 1}, "lunch: is not a key of the root of the file.*delete it"),
    ],
)
def test_unknown_key_is_an_error_that_suggests(raw, must_say):
    with pytest.raises(config.ConfigError, match=f"(?s){must_say}"):
        config.load(base(**raw), 4)


def test_value_of_a_misspelt_key_is_checked_as_well():
    message = complaints(base(zero_optimization={"stge": 7}))
    assert "did you mean 'stage'" in message and "7 is not a ZeRO stage" in message


def test_all_problems_of_a_file_come_at_once():
    raw = {
        "train_batch_size": 30,
        "zero_optimization": {"stage": 5, "reduce_bucket_size": -1, "overlap_com": True},
        "fp16": {"enabled": "yes"},
        "optimizer": {"type": "AdamV", "params": {}},
        "amp": {},
        "gradient_clipping": "1.0",
    }
    message = complaints(raw)
    assert "8 problems" in message
    for words in ("30 = micro", "5 is not a ZeRO stage", "-1 must be at least 1", "'overlap_comm'"):
        assert words in message
    for words in ('"yes" must be true or false', "'Adam'", "0.19.8", '"1.0" must be a number'):
        assert words in message


@pytest.mark.parametrize("bare", ["prefetch_bucket_size", "param_persistence_threshold"])
def test_stage3_prefix_is_optional_and_not_both(bare):
    raw = base(zero_optimization={"stage": 3, bare: 77})
    assert getattr(config.load(raw, 4).zero, bare) == 77
    raw["zero_optimization"][f"stage3_{bare}"] = 78
    assert f"says again what {bare!r} says" in complaints(raw)


def test_old_spellings_are_translated_with_a_warning():
    cfg = config.load(base(zero_optimization=True, bfloat16={"enabled": True}), 4)
    assert cfg.stage == 1 and cfg.param_dtype == torch.bfloat16
    assert any("oldest form" in text for text in cfg.warnings)
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    report = config.examine(base(zero_optimization=old), 4)
    offload = report.reading.file.zero_optimization.offload_optimizer
    assert (offload.device, offload.pin_memory) == ("cpu", False)
    assert any("is deprecated; write" in str(problem) for problem in report.problems)
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert "stands beside 'offload_optimizer'" in complaints(base(zero_optimization=both))
    save = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    assert config.load(base(zero_optimization=save), 4).zero.gather_16bit_weights_on_model_save


@pytest.mark.parametrize("path", list(renamed.GONE))
def test_removed_keys_say_so(path):
    raw = base(**{path[0]: {}}) if len(path) == 1 else base(zero_optimization={path[1]: 1})
    assert f"{'.'.join(path)}: {renamed.GONE[path]}; delete the key" in complaints(raw)


# --- every key of DeepSpeed 0.19.8 --------------------------------------------------------------

ROOT = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    managed_gradient_accumulation zero_optimization fp16 bf16 data_types torch_autocast optimizer
    scheduler gradient_clipping communication_data_type seq_parallel_communication_data_type
    prescale_gradients gradient_predivide_factor gradient_allreduce_op steps_per_print
    wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last disable_python_gc
    disable_allgather vocabulary_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    timers pipeline activation_checkpointing comms_logger tensorboard csv_monitor wandb comet
    flops_profiler checkpoint aio log_level""".split()
ZERO = """stage contiguous_gradients reduce_scatter reduce_bucket_size
    use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
    compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer
    zenflow sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
    legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
    zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    leaf_module""".split()
ALL = list(keys.all_keys(schema.File))


def test_every_key_of_deepspeed_is_known():
    known = {key.path for key in ALL}
    assert known >= {(name,) for name in ROOT} | {("zero_optimization", name) for name in ZERO}
    assert {key.path[0] for key in ALL} == {*ROOT, "zerolab"}


def test_every_key_says_what_it_does_and_why_not():
    for key in ALL:
        assert key.does, key.path
        assert bool(key.why) == (key.status not in (Status.WORKS, Status.DETAIL)), key.path


PACKAGE = Path(config.__file__).parents[1]
ENGINE = sorted(PACKAGE.glob("*.py"))
BLOCK_READERS = [
    PACKAGE / "config" / f"{name}.py" for name in ("rules", "optimizers", "schedulers")
]
READ_AS = {  # the attribute of Config under which the engine reads a key
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accum_steps",
    "communication_data_type": "reduce_dtype",
    "enabled": "param_dtype",
    "reduce": "reduce_every_micro_step",
}


def test_keys_that_say_they_work_are_read_outside_the_schema():
    engine = "".join(file.read_text() for file in ENGINE)
    blocks = "".join(file.read_text() for file in BLOCK_READERS)
    working = [key for key in ALL if key.status is Status.WORKS and key.block is None]
    assert len(working) > 20
    for key in working:
        attribute = READ_AS.get(key.name, key.name).removeprefix("stage3_")
        text = blocks if key.path[0] in CHECKED_HERE else engine
        assert re.search(rf"\.{attribute}\b", text), key.path


# blocks that this package itself turns into objects, and keys that are only checked
CHECKED_HERE = ("optimizer", "scheduler", "vocabulary_size")


def other_value(key: Key):
    """A valid value that is not the default."""
    special = {
        "train_batch_size": 64,
        "stage": 2,
        "communication_data_type": "fp16",
        "seq_parallel_communication_data_type": "bf16",
        "grad_accum_dtype": "fp32",
        "param_dtype": "fp32",
        "buffer_dtype": "fp32",
        "gradient_allreduce_op": "sum",
        "zenflow": {"topk_ratio": 0.1},
        "keep_in_fp32_modules": ["norm"],
        "vocabulary_size": 64,
        "overlap_comm": False,
        "stage3_prefetch_bucket_size": 1000,
        "reduce": "boundary",
        "unit_modules": ["blocks"],
        "steps_per_print": 10,
        "log_level": "info",
        "type": "AdamW",
        "params": {"lr": 1e-3},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    if key.name in special:
        return special[key.name]
    if isinstance(key.default, bool):
        return not key.default
    return key.default - 1 if key.default == 2**63 - 1 else key.default + 1


BLOCKS_ON = {
    "torch_autocast": {"enabled": True},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "comms_logger": {"enabled": True},
    "tensorboard": {"enabled": True},
    "csv_monitor": {"enabled": True},
    "wandb": {"enabled": True},
    "comet": {"enabled": True},
    "flops_profiler": {"enabled": True},
    "timers": {"throughput": {"enabled": False}},
    "aio": {"queue_depth": 16},
    "checkpoint": {"tag_validation": "fail"},
    "pipeline": {"seed_layers": True},
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "leaf_module": {"names": ["experts"]},
}
ONE_BY_ONE = [
    key
    for key in ALL
    if key.status is not Status.DETAIL and (key.block is None or key.name in BLOCKS_ON)
]


@pytest.mark.parametrize("key", ONE_BY_ONE, ids=lambda key: ".".join(key.path))
def test_asking_for_a_key_has_the_consequence_of_its_status(key):
    raw = base(gradient_clipping=0, zero_optimization={"stage": max(key.stages)})
    raw["scheduler"] = {"type": "WarmupLR", "params": {}}
    block = raw
    for name in key.path[:-1]:
        block = block.setdefault(name, {})
    block[key.name] = BLOCKS_ON[key.name] if key.block else other_value(key)
    if key.path == ("scheduler", "type"):
        block["type"] = "WarmupCosineLR"
        block["params"] = {"total_num_steps": 9}
    if key.path == ("scheduler", "params"):
        block["params"] = {"warmup_num_steps": 5}
    report = config.examine(raw, 4)
    about = [p for p in report.problems if p.path == key.path and p.severity != "note"]
    if key.status is Status.WORKS:
        assert about == [] and report.config is not None
    elif key.status in keys.STOPS:
        assert [p.severity for p in about] == ["error"] and key.why in about[0].message
        assert report.config is None
    else:
        assert [p.severity for p in about] == ["warning"] and key.why in about[0].message
        assert any(key.why in text for text in report.config.warnings)


def test_default_values_written_out_are_no_reason_to_stop():
    raw = base()
    for key in ALL:
        if key.path[0] == "zero_optimization" and key.block is None and len(key.path) == 2:
            raw.setdefault("zero_optimization", {})[key.name] = key.default
    raw["zero_optimization"]["stage"] = 3
    cfg = config.load(raw, 4)
    dead = [text for text in cfg.warnings if "dead" in text]
    assert dead and "allgather_partitions" in dead[0]


# --- several keys at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "must_say"),
    [
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "needs partition_activations and number_checkpoints",
        ),
        (
            {
                "zero_optimization": {"stage": 2, "compute_grad_norm": False},
                "gradient_clipping": 1.0,
            },
            "gradient_clipping needs the norm",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "nvme_path: is missing",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            },
            "only stage 3 can do",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, "disagrees with the precision block"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "must be above 0"),
        ({"fp16": {"loss_scale": True}}, "true must be a number"),
        ({"fp16": {"loss_scale": float("inf")}}, "must be finite"),
        ({"optimizer": {}}, "optimizer.type: is missing"),
        ({"optimizer": None, "zero_optimization": None}, "must be a block"),
        ({"fp16": {"initial_scale_power": 128}}, "fp32's largest"),
        ({"communication_data_type": "fp8"}, 'write "fp32", "bf16" or "fp16"'),
        ({"checkpoint": {"tag_validation": "WRAN"}}, "did you mean 'WARN'"),
    ],
)
def test_keys_at_odds_are_errors(raw, must_say):
    assert must_say in complaints(base(**raw))


def test_offload_at_a_stage_that_cannot_use_it_is_a_warning():
    raw = base(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
    warnings = config.load(raw, 4).warnings
    assert any("acts at stage 3 only, and the stage is 2" in text for text in warnings)


def test_offload_block_with_device_none_runs():
    raw = base(zero_optimization={"stage": 3, "offload_optimizer": {"device": "none"}})
    assert config.load(raw, 4).warnings == ()


def test_vocabulary_that_is_no_multiple_of_8_is_a_warning():
    assert "pad it to 50264" in config.load(base(vocabulary_size=50257), 4).warnings[0]


# --- the corrected file keeps what is right, and says what it cannot know ------------------


def mended(raw, world_size=4):
    report = config.examine(raw, world_size)
    corrected = json.loads(json.dumps(report.corrected()))
    assert config.examine(corrected, world_size).stoppers == ()
    return corrected, report.to_fill_in()


@pytest.mark.parametrize(
    ("stage", "meant"),
    [("three", 3), ("stage 2", 2), ("ZeRO-3", 3), (4, 3), (-1, 0), (2.6, 3), ("stage two", 2)],
)
def test_a_stage_in_other_words_is_understood(stage, meant):
    corrected, left = mended(base(zero_optimization={"stage": stage, "reduce_bucket_size": 99}))
    assert corrected["zero_optimization"] == {"stage": meant, "reduce_bucket_size": 99}
    assert left == {}


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("gradient_clipping", "1.0", 1.0),
        ("gradient_clipping", "5e-1", 0.5),
        ("gradient_clipping", -3, 0),
        ("train_batch_size", "16", 16),
        ("train_batch_size", 15.7, 16),
        ("dataloader_drop_last", "True", True),
        ("dataloader_drop_last", 1, True),
        ("gradient_allreduce_op", "SUMM", "sum"),
    ],
)
def test_the_nearest_valid_value_takes_the_place_of_a_wrong_one(key, value, meant):
    corrected, left = mended(base(**{key: value}))
    assert corrected[key] == meant and left == {}


def test_what_says_nothing_becomes_the_default_and_has_to_be_filled_in():
    raw = base(zero_optimization={"stage": "xyz"}, gradient_clipping=[], train_batch_size="many")
    corrected, left = mended(raw)
    assert corrected["zero_optimization"] == {"stage": 0}
    assert corrected["gradient_clipping"] == 0.0
    assert "0 stands there, the default" in left["zero_optimization.stage"]
    assert left["train_batch_size"] == "was left out, since its value says nothing"
    assert corrected["optimizer"] == raw["optimizer"]


def test_of_two_precisions_one_is_kept_and_named():
    raw = base(bf16={"enabled": True}, fp16={"enabled": True, "loss_scale_window": 500})
    report = config.examine(raw, 4)
    assert any("keep bf16" in p.remedy and "switch fp16 off" in p.remedy for p in report.stoppers)
    corrected, left = mended(raw)
    assert corrected["bf16"] == {"enabled": True} and corrected["fp16"]["enabled"] is False
    assert left == {} and config.load(corrected, 4).param_dtype == torch.bfloat16


def test_an_error_travels_from_a_rank_process_as_it_is():
    with pytest.raises(config.ConfigError) as caught:
        config.load({"train_batch_size": 33, "zero_optimization": {"stage": 5}}, 4)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.problems == caught.value.problems
