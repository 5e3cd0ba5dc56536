"""Flags beside a ds_config.json: what is silent is filled in, what contradicts is refused."""

import json

import pytest
import torch

from zerolab.cli.merge import Flags, merge
from zerolab.errors import UsageError


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_without_a_file_the_first_run_is_bf16_with_adamw():
    settings = merge(None, Flags(), 4)
    assert settings.stage == 0
    assert settings.param_dtype == torch.bfloat16
    assert (settings.micro_batch_size, settings.accum_steps) == (2, 1)
    assert settings.train_batch_size == 8
    assert settings.optimizer.type == "AdamW"
    assert settings.optimizer.params["lr"] == 1e-3


def test_flags_are_heard():
    settings = merge(None, Flags(3, "fp32", micro_batch=5, accum_steps=2, lr=0.5), 3)
    assert settings.stage == 3
    assert settings.param_dtype == torch.float32
    assert (settings.micro_batch_size, settings.accum_steps) == (5, 2)
    assert settings.train_batch_size == 30
    assert settings.optimizer.params["lr"] == 0.5


def test_a_file_is_heard_and_its_silence_means_fp32(write):
    path = write({"train_batch_size": 12, "zero_optimization": {"stage": 2}})
    settings = merge(path, Flags(), 4)
    assert settings.stage == 2
    assert settings.param_dtype == torch.float32
    assert settings.micro_batch_size == 3


def test_flags_fill_in_what_the_file_leaves_open(write):
    path = write({"zero_optimization": {"reduce_bucket_size": 1000}, "optimizer": {"type": "SGD"}})
    settings = merge(path, Flags(1, "bf16", micro_batch=4, lr=0.1), 2)
    assert settings.stage == 1
    assert settings.zero.reduce_bucket_size == 1000
    assert settings.param_dtype == torch.bfloat16
    assert settings.optimizer.type == "SGD"
    assert settings.optimizer.params["lr"] == 0.1


def test_flags_that_repeat_the_file_are_fine(write):
    path = write(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        }
    )
    settings = merge(path, Flags(2, "bf16", 4, 3, 0.25), 2)
    assert (settings.stage, settings.train_batch_size) == (2, 24)


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ({"zero_optimization": {"stage": 2}}, Flags(stage=1), "--stage 1 .*stage is 2"),
        ({"bf16": {"enabled": True}}, Flags(dtype="fp32"), "--dtype fp32 .* bf16/fp16 is bf16"),
        ({"bfloat16": {"enabled": False}}, Flags(dtype="bf16"), "--dtype bf16 .* is fp32"),
        ({"fp16": {"enabled": True}}, Flags(dtype="bf16"), "--dtype bf16 .* is fp16"),
        (
            {"train_micro_batch_size_per_gpu": 4},
            Flags(micro_batch=2),
            "--micro-batch 2 .* train_micro_batch_size_per_gpu is 4",
        ),
        (
            {"gradient_accumulation_steps": 4},
            Flags(accum_steps=2),
            "--accum-steps 2 .* gradient_accumulation_steps is 4",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            Flags(lr=0.2),
            "--lr 0.2 .* optimizer.params.lr is 0.1",
        ),
    ],
)
def test_contradictions_are_refused(write, content, flags, says):
    with pytest.raises(UsageError, match=says):
        merge(write({"train_batch_size": 8} | content), flags, 2)


def test_the_batch_equation_holds_for_file_and_flags_together(write):
    with pytest.raises(UsageError, match="ds_config"):
        merge(write({"train_batch_size": 7}), Flags(micro_batch=2), 2)


def test_mistakes_in_the_file_name_the_file(write):
    with pytest.raises(UsageError, match=r"ds_config\.json: .*zero_optimisation.*did you mean"):
        merge(write({"train_batch_size": 8, "zero_optimisation": {"stage": 2}}), Flags(), 2)


def test_files_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": ')
    with pytest.raises(UsageError, match=r"ds_config\.json"):
        merge(path, Flags(), 2)
