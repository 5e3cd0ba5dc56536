"""Chapter 12: names of the past: old spellings that are translated, and keys that are gone.

Data: two tables. `modernise` rewrites a copy of the file; `gone` explains a name that no longer
exists.
"""

from typing import Any

from .problems import Edit, Path, Problem, error, warning

ZERO = "zero_optimization"
SAVE = "stage3_gather_16bit_weights_on_model_save"

# old name under zero_optimization -> (block or key that replaced it, what the old value becomes)
OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
PINNED = "cpu_offload_use_pin_memory"

REMOVED = "was removed in DeepSpeed 0.19.8"
GONE: dict[Path, str] = {
    ("nebula",): REMOVED,
    ("compression_training",): REMOVED,
    ("amp",): f"{REMOVED}: use fp16 or bf16",
    ("quantize_training",): REMOVED,
    ("sparse_gradients",): f"{REMOVED}: sparse gradients are made dense",
    ("eigenvalue",): REMOVED,
    ("sparse_attention",): REMOVED,
    ("elasticity",): f"{REMOVED}: give the batch sizes",
    ("graph_harvesting",): REMOVED,
    ("curriculum_learning",): REMOVED,
    ("progressive_layer_drop",): REMOVED,
    (ZERO, "mics_shard_size"): REMOVED,
    (ZERO, "mics_hierarchical_params_gather"): REMOVED,
    (ZERO, "zeropp_loco_param"): REMOVED,
    ("tensor_parallel",): "is tensor parallelism: zerolab shards data parallelism only",
    ("sequence_parallel_size",): "is sequence parallelism: zerolab shards data parallelism only",
    ("data_efficiency",): "is DeepSpeed's data sampling, which zerolab does not have",
    ("compile",): "is DeepCompile: call torch.compile on parts of the model instead",
    ("autotuning",): "is DeepSpeed's autotuner: `zerolab estimate` answers without running",
    ("hybrid_engine",): "is DeepSpeed-Chat's engine, which zerolab does not have",
    ("weight_quantization",): "is inference quantization, which zerolab does not have",
}


def gone(spelled: Path) -> str:
    """Why a name exists no longer, or not here; "" for any other name."""
    return GONE.get(spelled, "")


def modernise(raw: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """A copy of the file in today's spelling; every translation is a warning with its edit."""
    zero = raw.get(ZERO)
    if isinstance(zero, bool):
        stage = {"stage": int(zero)}
        problems.append(_old((ZERO,), "the old form, a boolean", show_block(stage), stage))
        return {**raw, ZERO: stage}
    return {**raw, ZERO: _modern_zero(zero, problems)} if isinstance(zero, dict) else dict(raw)


def show_block(block: dict[str, Any]) -> str:
    """A one-key block as text."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in block.items()) + "}"


def _modern_zero(zero: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    modern = {k: v for k, v in zero.items() if k not in OLD_OFFLOAD and k != PINNED}
    for old, new in OLD_OFFLOAD.items():
        if old in zero:
            _translate(zero, old, new, modern, problems)
    if PINNED in zero and not any(old in zero for old in OLD_OFFLOAD):
        path = (ZERO, PINNED)
        message = "is deprecated and belongs to an offload block that the file does not have"
        problems.append(warning(path, message, "delete it", Edit(path, drop=True)))
    return _rename_save(modern, problems)


def _translate(
    zero: dict[str, Any], old: str, new: str, modern: dict[str, Any], problems: list[Problem]
) -> None:
    path = (ZERO, old)
    if new in zero:
        message = f"is deprecated and its replacement {new!r} is there too"
        problems.append(error(path, message, "delete the old key", Edit(path, drop=True)))
        return
    block = {"device": "cpu" if zero[old] is True else "none"}
    if PINNED in zero:
        block["pin_memory"] = zero[PINNED]
    edits = [Edit(path, drop=True), Edit((ZERO, PINNED), drop=True), Edit((ZERO, new), block)]
    problems.append(warning(path, "is deprecated", f"write {new!r}: {block}", *edits))
    modern[new] = block


def _rename_save(zero: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    old = SAVE.replace("16bit", "fp16")
    if old not in zero or SAVE in zero:
        return zero
    path = (ZERO, old)
    problems.append(warning(path, "is deprecated", f"write {SAVE!r}", Edit(path, rename=SAVE)))
    return {SAVE if name == old else name: value for name, value in zero.items()}


def _old(path: Path, what: str, new: str, value: Any) -> Problem:
    return warning(path, f"is {what}", f"write {new}", Edit(path, value))
