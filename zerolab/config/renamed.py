"""Chapter 12: names of the past: old spellings that are translated, and keys that are gone.

Data: `GONE`, names that no longer exist (or never will here), each with the reason, and the old
offload switches. `modernise` rewrites a copy of the file and reports each translation.
"""

from typing import Any

from .keys import show
from .problems import Edit, Path, Problem, error, warning

ZERO = "zero_optimization"
OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
PINNED = "cpu_offload_use_pin_memory"
OLD_SAVE = "stage3_gather_fp16_weights_on_model_save"
SAVE = "stage3_gather_16bit_weights_on_model_save"

REMOVED = "was removed in DeepSpeed 0.19.8"
_ONLY = "zerolab shards data parallelism only"
GONE: dict[Path, str] = {
    ("nebula",): REMOVED,
    ("compression_training",): REMOVED,
    ("amp",): f"{REMOVED}: use fp16 or bf16",
    ("quantize_training",): REMOVED,
    ("sparse_gradients",): f"{REMOVED}: sparse gradients are made dense here",
    ("eigenvalue",): REMOVED,
    ("sparse_attention",): REMOVED,
    ("elasticity",): f"{REMOVED}: give the batch sizes themselves",
    ("graph_harvesting",): REMOVED,
    ("curriculum_learning",): REMOVED,
    ("progressive_layer_drop",): REMOVED,
    (ZERO, "mics_shard_size"): REMOVED,
    (ZERO, "mics_hierarchical_params_gather"): REMOVED,
    (ZERO, "zeropp_loco_param"): REMOVED,
    ("tensor_parallel",): f"is tensor parallelism, and {_ONLY}",
    ("expert_parallel",): f"is expert parallelism, and {_ONLY}",
    ("sequence_parallel_size",): f"is sequence parallelism, and {_ONLY}",
    ("use_data_before_expert_parallelism",): f"orders expert parallelism, and {_ONLY}",
    ("data_efficiency",): "is DeepSpeed's data sampling, which zerolab does not have",
    ("compile",): "is DeepCompile, which zerolab does not have",
    ("autotuning",): "is DeepSpeed's autotuner, which zerolab does not have",
    ("hybrid_engine",): "is DeepSpeed-Chat's engine, which zerolab does not have",
    ("weight_quantization",): "is quantization for inference, which zerolab does not have",
    ("datastates_ckpt",): "is DataStates' writer, which zerolab does not have",
}


def gone(spelled: Path) -> str:
    """Why a name exists no longer, or not here; "" for any other name."""
    return GONE.get(spelled, "")


def modernise(raw: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """A copy of the file in today's spelling; every translation is reported with its edit."""
    zero = raw.get(ZERO)
    if isinstance(zero, bool):
        block = {"stage": int(zero)}
        message = "is a boolean, the oldest form of this block"
        problems.append(warning((ZERO,), message, f"write {show(block)}", Edit((ZERO,), block)))
        return {**raw, ZERO: block}
    return {**raw, ZERO: _modern_zero(zero, problems)} if isinstance(zero, dict) else raw


def _modern_zero(zero: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    modern = {k: v for k, v in zero.items() if k not in (*OLD_OFFLOAD, PINNED, OLD_SAVE)}
    for old, new in OLD_OFFLOAD.items():
        if old in zero:
            problems.append(_translate_offload(zero, old, new, modern))
    if OLD_SAVE in zero:
        problems.append(_translate_save(zero, modern))
    if PINNED in zero and not any(zero.get(old) is True for old in OLD_OFFLOAD):
        path = (ZERO, PINNED)
        message = "is deprecated and alone does nothing"
        problems.append(warning(path, message, "delete it", Edit(path, drop=True)))
    return modern


def _translate_offload(zero: dict[str, Any], old: str, new: str, modern: dict[str, Any]) -> Problem:
    path, value = (ZERO, old), zero[old]
    drop = Edit(path, drop=True)
    if new in zero:
        message = f"is deprecated and stands beside {new!r}, which replaced it"
        return error(path, message, "delete the old key", drop)
    if not isinstance(value, bool):
        return error(path, f"{show(value)} must be true or false", f"write {new!r} instead", drop)
    if not value:
        return warning(path, "is deprecated", "delete it", drop)
    block: dict[str, Any] = {"device": "cpu"}
    if PINNED in zero:
        block["pin_memory"] = zero[PINNED]
    modern[new] = block
    pinned = Edit((ZERO, PINNED), drop=True)
    remedy = f"write {show({new: block})[1:-1]}"
    return warning(path, "is deprecated", remedy, drop, pinned, Edit((ZERO, new), block))


def _translate_save(zero: dict[str, Any], modern: dict[str, Any]) -> Problem:
    path = (ZERO, OLD_SAVE)
    if SAVE in zero:
        message = f"is deprecated and stands beside {SAVE!r}, which replaced it"
        return error(path, message, "delete the old key", Edit(path, drop=True))
    modern[SAVE] = zero[OLD_SAVE]
    return warning(path, "is deprecated", f"write {SAVE!r}", Edit(path, rename=SAVE))
