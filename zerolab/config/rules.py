"""Chapter 12: what is wrong with a file whose names and values are all right one by one.

Data: none; each rule reads a `Reading` and yields problems. Phases: `statuses` compares every given
key with what this version does with it; the other rules look at several keys at once. A rule is
silent where the values it needs were refused already.
"""

from collections.abc import Iterator

from . import optimizers, schedulers, settings
from .keys import SAYS, STOPS, Block, Key, Status, show
from .problems import Edit, Path, Problem, error, note, warning
from .reading import Reading

ZERO = "zero_optimization"
LARGE_BUCKET = 100_000_000


def apply(reading: Reading, world_size: int) -> Iterator[Problem]:
    """All rules, in the order of the file's own importance."""
    yield from statuses(reading)
    yield from _precision(reading)
    yield from _optimizer(reading)
    yield from _sharding(reading, world_size)
    yield from _offload(reading)
    yield from _activations(reading)
    yield from _clipping(reading)
    yield from _odds(reading)


def value_of(reading: Reading, path: Path) -> object:
    """The value of a key by its canonical path: the file's, or the default."""
    value: object = reading.file
    for depth in range(len(path)):
        if value is None:
            return None
        value = getattr(value, reading.given[path[: depth + 1]].field)
    return value


def asks(reading: Reading, key: Key) -> bool:
    """Whether the file wants something of this key that a status may refuse."""
    if key.path in reading.silent:
        return False
    value = value_of(reading, key.path)
    if isinstance(value, Block):
        return value.asked()
    return key.status is Status.IDLE or (value is not None and value != key.default)


def statuses(reading: Reading) -> Iterator[Problem]:
    """One problem for each given key that this version does not simply do."""
    for path, key in reading.given.items():
        if reading.fine(*path) and key.status is not Status.DETAIL and asks(reading, key):
            problem = _status(reading, key)
            if problem is not None:
                yield problem


def acts(reading: Reading, key: Key) -> bool:
    """Whether a key does anything at the file's stage; where the stage is wrong, it may."""
    stage = reading.file.zero_optimization.stage
    return stage in key.stages or not reading.fine(ZERO, "stage")


def _status(reading: Reading, key: Key) -> Problem | None:
    spelled = reading.written[key.path]
    drop = Edit(spelled, drop=True)
    stage = reading.file.zero_optimization.stage
    if not acts(reading, key) and key.status is not Status.IDLE:
        *others, last = map(str, key.stages)
        where = f"{', '.join(others)} and {last}" if others else last
        message = f"acts at stage {where} only, and the stage is {stage}"
        return warning(spelled, message, "delete it, or change the stage", drop)
    said = f"{SAYS[key.status]}: {key.why}"
    if key.status in STOPS:
        return error(spelled, said, _without(key), drop)
    if key.status in (Status.IDLE, Status.ALWAYS):
        return warning(spelled, said, "delete it", drop)
    return warning(spelled, said) if key.status is not Status.WORKS else None


def _without(key: Key) -> str:
    if key.block is not None or key.default is None:
        return "delete the block" if key.block else "delete it"
    return f"delete it, or write {show(key.default)}"


def _precision(reading: Reading) -> Iterator[Problem]:
    file = reading.file
    if not (reading.fine("fp16", "enabled") and reading.fine("bf16", "enabled")):
        return
    if file.fp16.enabled and file.bf16.enabled:
        message = "fp16 and bf16 are both on, and parameters have one type"
        fix = Edit((*reading.spelled("fp16"), "enabled"), value=False)
        remedy = "keep bf16, which needs no loss scale, and switch fp16 off"
        yield error(("fp16",), message, remedy, fix)
    elif not file.fp16.enabled and not file.bf16.enabled:
        yield note(
            (),
            "no precision block is on, so the run is in fp32: model states take 16 bytes a "
            "parameter as in mixed precision, but activations and traffic take twice as much",
            'for 16 bits add "bf16": {"enabled": true}',
        )
    yield from _loss_scale(reading)
    yield from _param_dtype(reading)


def _loss_scale(reading: Reading) -> Iterator[Problem]:
    fp16, path = reading.file.fp16, ("fp16", "min_loss_scale")
    dynamic = fp16.enabled and fp16.loss_scale == 0
    if dynamic and fp16.min_loss_scale <= 0 and reading.fine(*path):
        spelled = reading.spelled(*path)
        message = "must be above 0 when the scale is dynamic (loss_scale 0)"
        yield error(spelled, message, "write 1", Edit(spelled, 1))


def _param_dtype(reading: Reading) -> Iterator[Problem]:
    path = ("data_types", "param_dtype")
    asked, used = reading.file.data_types.param_dtype, settings.compute_dtype(reading.file)
    if asked is not None and asked != used and reading.fine(*path):
        message = f"{show(asked)} disagrees with the precision block, which says {show(used)}"
        drop = Edit(reading.spelled(*path), drop=True)
        yield error(path, message, "delete it and switch fp16 or bf16", drop)


def _optimizer(reading: Reading) -> Iterator[Problem]:
    block = reading.file.optimizer
    if block is None and reading.fine("optimizer"):
        yield optimizers.missing(reading.file.zero_optimization.stage)
    fine = all(reading.fine("optimizer", name) for name in ("type", "params"))
    found = list(optimizers.check(block)) if fine else []
    yield from found
    if all(reading.fine("scheduler", name) for name in ("type", "params")):
        usable = block if fine and not found else None
        yield from schedulers.check(reading.file.scheduler, usable)


def _sharding(reading: Reading, world_size: int) -> Iterator[Problem]:
    zero = reading.file.zero_optimization
    if not reading.fine(ZERO, "stage"):
        return
    if zero.stage and world_size == 1:
        message = "on one GPU a shard is the whole: stages 1 to 3 save nothing"
        yield note((ZERO, "stage"), message, "use more GPUs, or offload")
    if zero.reduce_bucket_size >= LARGE_BUCKET:
        gib = zero.reduce_bucket_size * 2 / 2**30
        yield note(
            reading.spelled(ZERO, "reduce_bucket_size"),
            f"counts elements: a full bucket takes {gib:.2f} GiB in 16 bits, and overlap holds two",
            "2**20 elements hide as well; a bucket is never larger than the model",
        )
    if not zero.compute_grad_norm and reading.file.gradient_clipping > 0:
        path = reading.spelled(ZERO, "compute_grad_norm")
        message = "is false, but gradient_clipping needs the norm"
        yield error(path, message, "write true", Edit(path, value=True))


def _offload(reading: Reading) -> Iterator[Problem]:
    zero = reading.file.zero_optimization
    blocks = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    for name, block in blocks.items():
        if block is None:
            continue
        path = (*reading.spelled(ZERO, name), "nvme_path")
        if block.device == "nvme" and not block.nvme_path and reading.fine(ZERO, name, "nvme_path"):
            message = "is missing, and device is nvme"
            yield error(path, message, "name a directory", Edit(path, "/local_nvme"))
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.ratio < 1 and zero.stage != 3:
        path = (*reading.spelled(ZERO, "offload_optimizer"), "ratio")
        message = f"{optimizer.ratio} is below 1, which only stage 3 can do"
        yield error(path, message, "write 1.0", Edit(path, 1.0))


def _activations(reading: Reading) -> Iterator[Problem]:
    block, root = reading.file.activation_checkpointing, ("activation_checkpointing",)
    if block.contiguous_memory_optimization:
        missing = [
            n for n in ("partition_activations", "number_checkpoints") if not getattr(block, n)
        ]
        if missing and all(reading.fine(*root, name) for name in missing):
            path = (*root, "contiguous_memory_optimization")
            message = f"needs {' and '.join(missing)}; DeepSpeed's configure() asserts it"
            yield error(path, message, "give them, or write false", Edit(path, value=False))
    if block.partition_activations:
        yield note(
            (*root, "partition_activations"),
            "cuts across the model-parallel ranks, not the data-parallel ones, whose activations "
            "all differ: without model parallelism it saves nothing",
        )


def _clipping(reading: Reading) -> Iterator[Problem]:
    if ("gradient_clipping",) not in reading.given:
        message = "is not given: here it is off, DeepSpeed 0.19.8 would clip at 1.0"
        yield note(("gradient_clipping",), message, "write the norm you want, or 0")


def _odds(reading: Reading) -> Iterator[Problem]:
    size = reading.file.vocabulary_size
    if size and size % 8:
        message = f"{size} is not a multiple of 8, which matrix units like"
        yield warning(("vocabulary_size",), message, f"pad it to {size + -size % 8}")
