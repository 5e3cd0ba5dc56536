"""Chapter 12: one configuration out of a ds_config.json and the flags beside it.

Owns the table of which flag stands for which key. A flag fills in what the file leaves open; a
flag that contradicts the file is refused, because either of the two may be the mistake. What
neither says gets the defaults of a first run: stage 0, bf16, 2 samples a rank, AdamW.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import config as config_
from ..config import ConfigError, reading, settings, source
from ..errors import UsageError

DEFAULT_MICRO_BATCH = 2
DEFAULT_LR = 1e-3
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None where it is silent."""

    stage: int | None = None
    dtype: str | None = None
    micro_batch: int | None = None
    accum_steps: int | None = None
    lr: float | None = None


KEYS = {  # flag, its attribute in Flags, its key in the file
    "--stage": ("stage", ("zero_optimization", "stage")),
    "--micro-batch": ("micro_batch", ("train_micro_batch_size_per_gpu",)),
    "--accum-steps": ("accum_steps", ("gradient_accumulation_steps",)),
    "--lr": ("lr", ("optimizer", "params", "lr")),
}


def merge(path: Path | None, flags: Flags, world_size: int) -> config_.Config:
    """Read the file, lay the flags over it, and resolve the result for `world_size` ranks.

    Raises:
        UsageError: a flag contradicts the file, or the result cannot run.
    """
    if flags.dtype is not None and flags.dtype not in DTYPES:
        raise UsageError(f"dtype {flags.dtype!r} is unknown; give {', '.join(DTYPES)}")
    given = source.open_source({} if path is None else path)
    said = reading.read(given.raw)
    merged = given.raw
    for flag, (name, key) in KEYS.items():
        wanted = getattr(flags, name)
        if wanted is not None:
            _lay(merged, said, flag, wanted, key)
    _lay_dtype(merged, said, flags.dtype, silent=path is None)
    _lay_defaults(merged, said)
    report = config_.examine(merged, world_size)
    problems = [*given.problems, *report.stoppers]
    if report.config is None or given.problems:
        raise ConfigError(problems, given.name if path is not None else "options")
    return report.config


def says(said: reading.Reading, *key: str) -> bool:
    """Tell whether the file gives a readable value for this key."""
    return key in said.given and said.fine(*key)


def value(said: reading.Reading, key: tuple[str, ...]) -> Any:
    """Return what the file says for a key, None where it is silent.

    `params` of an optimizer are keys of torch, not of the schema: they lie in a plain dict.
    """
    block = key if says(said, *key) else key[:-1]
    if not says(said, *block):
        return None
    found: Any = said.file
    for name in block:
        found = getattr(found, name)
    if block == key:
        return found
    return found.get(key[-1]) if isinstance(found, dict) else None


def _lay(merged: dict, said: reading.Reading, flag: str, wanted: Any, key: tuple[str, ...]) -> None:
    """Write one flag into the configuration, where the file says nothing else."""
    written = value(said, key)
    if written is not None:
        if written != wanted:
            _contradiction(flag, wanted, ".".join(key), written)
        return
    block = merged
    for depth in range(1, len(key)):
        block = block.setdefault(said.spelled(*key[:depth])[-1], {})
    block[key[-1]] = wanted


def _lay_dtype(merged: dict, said: reading.Reading, wanted: str | None, silent: bool) -> None:
    """Write the dtype: bf16 by default, unless there is a file, whose silence means fp32."""
    written = DTYPE_NAMES[settings.compute_dtype(said.file)]
    decided = says(said, "bf16", "enabled") or says(said, "fp16", "enabled")
    if wanted is not None and decided and wanted != written:
        _contradiction("--dtype", wanted, "bf16/fp16", written)
    chosen = wanted or ("bf16" if silent else "fp32")
    if not decided and chosen != "fp32":
        block = merged.setdefault(said.spelled(chosen)[-1], {})
        if isinstance(block, dict):
            block["enabled"] = True


def _lay_defaults(merged: dict, said: reading.Reading) -> None:
    """Add what a file must have and this one has not."""
    if not any(says(said, key) or key in merged for key in BATCH_KEYS):
        merged["train_micro_batch_size_per_gpu"] = DEFAULT_MICRO_BATCH
    optimizer = merged.setdefault("optimizer", {})
    if isinstance(optimizer, dict) and "type" not in optimizer:
        optimizer["type"] = "AdamW"
        optimizer.setdefault("params", {}).setdefault("lr", DEFAULT_LR)


def _contradiction(flag: str, wanted: Any, key: str, written: Any) -> None:
    """Refuse two answers to one question."""
    raise UsageError(
        f"{flag} {wanted} contradicts the config file, where {key} is {written}; "
        "leave out one of the two"
    )
