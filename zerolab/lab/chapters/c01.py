"""Chapter 1: the exercises of 01_where_memory_goes: the parts of the estimator.

Owns the checks and the numbers to predict; the wrong answers are in `c01_mutants`. References are
bytes that torch tensors take, bytes that the ledger counts while the engine trains or a layer
runs, and numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ... import device, engine, gpt
from ...sim import states
from .. import evidence, training
from ..exercise import Exercise, Mutant
from ..outcome import Wrong
from ..prediction import Prediction
from . import c01_mutants as wrong

Function = Callable[..., Any]
KINDS = ("param", "grad", "master", "optimizer")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUMEL, WORLD_SIZE = 256, 4  # of the model that the engine shards, and its ranks
LAYERS = {  # (s, b, h, a) and the bytes of the paper's formula, worked out by hand
    (128, 1, 384, 6): 2_162_688,
    (2048, 1, 4096, 32): 956_301_312,
    (2048, 3, 4096, 32): 2_868_903_936,
}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


# What the references look at.


def counted(precision: str, optimizer: str) -> dict[str, int]:
    """Return the bytes of one parameter by kind, counted on tensors of torch after a step."""
    param = nn.Parameter(torch.zeros(NUMEL, dtype=DTYPES[precision]))
    param.grad = torch.zeros_like(param)
    master = param if precision == "fp32" else nn.Parameter(param.detach().float())
    master.grad = torch.zeros_like(master)
    updater = OPTIMIZERS[optimizer]([master])
    updater.step()
    remembered = [t for t in updater.state[master].values() if _is_as_long(t)]
    return {
        "param": param.element_size(),
        "grad": param.grad.element_size(),
        "master": 0 if master is param else master.element_size(),
        "optimizer": sum(t.element_size() for t in remembered),
    }


def _is_as_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == NUMEL


def _held_rank(stage: int) -> dict[str, int]:
    model = nn.Linear(16, NUMEL // 16, bias=False).to(evidence.home())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    trainer, *_ = engine.initialize(model=model, config=config)
    for _ in range(2):  # Adam's averages are there from the end of the first step on
        ones = torch.ones(1, 16, dtype=torch.bfloat16, device=evidence.home())
        trainer.backward(trainer(ones).float().sum())
        trainer.step()
    held = trainer.state_bytes()
    trainer.close()
    pieces = WORLD_SIZE if stage == 0 else 1  # each with Adam's counter of steps, 4 bytes
    return {**held, "optimizer": held["optimizer"] - 4 * pieces}


@cache
def held(stage: int) -> dict[str, int]:
    """Return the bytes of states on one of four ranks: 256 parameters, bf16, AdamW."""
    return evidence.run(_held_rank, WORLD_SIZE, stage)[0]


@cache
def layer_bytes(seq_len: int, batch: int, dim: int, num_heads: int) -> int:
    """Return what one more layer of a GPT with dropout leaves for backward, in bf16."""
    two, three = (_activations(seq_len, batch, dim, num_heads, layers) for layers in (2, 3))
    mask, norms = seq_len**2, 4 * batch * seq_len * 2  # which the paper leaves out
    return three - two - mask - norms


def _activations(seq_len: int, batch: int, dim: int, num_heads: int, num_layers: int) -> int:
    config = gpt.GPTConfig(256, seq_len, dim, num_heads, num_layers, dropout=0.1)
    gpu = device.VirtualGPU()
    with gpu:
        with gpu.in_phase("init"):
            model = gpt.GPT(config).bfloat16()
            tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
        gpu.set_phase("forward")
        loss = model(tokens, tokens)
        gpu.set_phase("backward")
        kept = gpu.by_kind()["activation"]
        del loss
    return kept


# 1.1 bytes_per_param


def check_bytes_per_param(answer: Function) -> Iterator[str]:
    """Values counted on torch's tensors, then `model_states` on it against the ledger."""
    for precision in ("bf16", "fp16"):
        _check_parameter(answer, precision, "adamw", counted(precision, "adamw"))
    yield "bf16 and fp16 with AdamW: as torch's own tensors weigh after a step"
    _check_parameter(answer, "fp32", "adamw", counted("fp32", "adamw"))
    yield "fp32 with AdamW: no master copy, since the weights are fp32 already"
    for optimizer in ("sgd", "momentum", "adagrad"):
        for precision in DTYPES:
            _check_parameter(answer, precision, optimizer, counted(precision, optimizer))
    yield "SGD, momentum, Adagrad: each with what it remembers"
    _compare_with_ledger(0)
    yield "stage 0 on four ranks: model_states, on your function, is what the ledger counts"


def _check_parameter(
    answer: Function, precision: str, optimizer: str, expected: dict[str, int]
) -> None:
    value = answer(precision, optimizer)
    if not isinstance(value, dict) or set(value) != set(KINDS):
        raise Wrong(
            f"It must return a dict with the keys {', '.join(KINDS)}.",
            expected=expected,
            observed=value,
        )
    for kind in KINDS:
        if value[kind] != expected[kind]:
            raise Wrong(
                f"{precision} with {optimizer}: {kind} costs {expected[kind]} bytes a parameter, "
                f"not {value[kind]}.",
                expected=expected,
                observed=value,
            )


def _compare_with_ledger(stage: int) -> None:
    """Compare `model_states`, which runs on the answer, with what four ranks really hold."""
    form, ledger = states.model_states(NUMEL, WORLD_SIZE, stage), held(stage)
    if form != ledger:
        raise Wrong(
            f"Stage {stage}: with your function, model_states({NUMEL}, {WORLD_SIZE}, {stage}) "
            "is not what a rank holds.",
            expected=ledger,
            observed=form,
            rank=0,
        )


# 1.2 sharded_kinds


def check_sharded_kinds(answer: Function) -> Iterator[str]:
    """Which kinds the ledger sees shrink to a quarter at each stage."""
    for stage in states.STAGES:
        _check_stage(answer, stage)
        yield f"stage {stage}: what four ranks divide, and nothing else"
    for stage in states.STAGES:
        _compare_with_ledger(stage)
    yield "model_states, on your function, is what the ledger counts at all four stages"


def _check_stage(answer: Function, stage: int) -> None:
    value = answer(stage)
    if not isinstance(value, tuple) or not set(value) <= set(KINDS):
        raise Wrong(
            f"It must return a tuple of names out of {', '.join(KINDS)}.",
            expected="a tuple of kinds",
            observed=value,
        )
    whole, now = held(0), held(stage)
    divided = tuple(kind for kind in KINDS if now[kind] < whole[kind])
    for kind in KINDS:
        if (kind in value) == (kind in divided):
            continue
        verb = "is divided among the ranks" if kind in divided else "stays whole on every rank"
        raise Wrong(
            f"Stage {stage}: {kind} {verb}. Of {whole[kind]} bytes a rank holds {now[kind]}.",
            expected=divided,
            observed=value,
        )


def estimator_evidence(world_size: int) -> str:
    """Say what the estimator, run on the hunted function, says that a parameter costs."""
    numel = 12 * world_size
    each = [states.model_state_bytes(numel, world_size, stage) / numel for stage in states.STAGES]
    return f"bytes a parameter at stages 0 to 3: {', '.join(f'{size:.4g}' for size in each)}"


# 1.3 saving_factor


def check_saving_factor(answer: Function) -> Iterator[str]:
    """Ratios of whole numbers of bytes; two of them as the ledger counts them."""
    parts = ((16, 0), (4, 12), (2, 14), (0, 16))  # whole and divided, of 16 bytes
    for stage, (whole, shared) in enumerate(parts):
        for world_size in (8, 1, 4, 64, 1000):
            expected = 16 * world_size / (whole * world_size + shared)
            _check_factor(answer, (stage, world_size), expected)
        yield f"stage {stage} on 1, 4, 8, 64 and 1,000 ranks"
    _check_factor(answer, (1, 8, "bf16", "sgd"), 8 * 8 / (4 * 8 + 4))
    _check_factor(answer, (2, 8, "fp32", "sgd"), 8 * 8 / (4 * 8 + 4))
    yield "with SGD, where there is less to divide"
    for stage in (1, 2, 3):
        measured = sum(held(0).values()) / sum(held(stage).values())
        _check_factor(answer, (stage, WORLD_SIZE), measured)
    yield "stages 1 to 3 on four ranks: bytes that the ledger counted"


def _check_factor(answer: Function, arguments: Sequence[Any], expected: float) -> None:
    value = answer(*arguments)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong("It must return a number.", expected=f"{expected:.4f}", observed=value)
    if abs(value - expected) > 1e-9 * expected:
        optimizer = f" with {arguments[3]}" if len(arguments) > 2 else ""
        raise Wrong(
            f"Stage {arguments[0]} on {arguments[1]} ranks{optimizer}: the states become "
            f"{expected:.3f} times smaller, not {value:.3f} times.",
            expected=f"{expected:.6f}",
            observed=f"{value:.6f}",
        )


# 1.4 paper_activation_bytes


def check_paper_activation_bytes(answer: Function) -> Iterator[str]:
    """Numbers of the paper, then one more layer of a real GPT on the ledger."""
    for arguments, expected in LAYERS.items():
        _check_layer(answer, arguments, expected, checkpointed=False)
    yield "three shapes, from gpt-10m's layer to one of a 7B model"
    _check_layer(answer, (2048, 3, 4096, 32), 50331648, checkpointed=True)
    yield "checkpointed: only the input of the layer is kept"
    for arguments in ((32, 2, 48, 4), (16, 3, 24, 3)):
        _check_layer(answer, arguments, layer_bytes(*arguments), checkpointed=False)
    yield "one more layer in a GPT with dropout: what the ledger counts, to the byte"


def _check_layer(
    answer: Function, arguments: tuple[int, int, int, int], expected: int, *, checkpointed: bool
) -> None:
    value = answer(*arguments, checkpointed=True) if checkpointed else answer(*arguments)
    if type(value) is not int:
        raise Wrong("Bytes are an int.", expected=f"{expected:,}", observed=value)
    if value != expected:
        names = dict(zip(("s", "b", "h", "a"), arguments, strict=True))
        shape = ", ".join(f"{name} = {number}" for name, number in names.items())
        how = "A checkpointed layer" if checkpointed else "A layer"
        raise Wrong(
            f"{how} of {shape} keeps {expected:,} bytes, not {value:,}.",
            expected=f"{expected:,}",
            observed=f"{value:,}",
        )


# 1.5, 1.6: numbers to predict.


def activations_in_weights() -> float:
    """Return how many times the bytes of its weights gpt-1m's activations take at the peak."""
    held = training.train(model="gpt-1m", micro_batch_size=8).fullest.peak_by_kind
    return held["activation"] / held["param"]


def peak_of_stage_3() -> float:
    """Return how many times smaller the peak of a rank is at stage 3 than at stage 0."""
    runs = [training.train(model="gpt-1m", stage=n, micro_batch_size=8) for n in (0, 3)]
    return runs[0].peak_bytes / runs[1].peak_bytes


PREDICTIONS = (
    Prediction(
        id="1.5",
        what="Stage 0 trains gpt-1m in bf16, with a micro-batch of 8 sequences. At the peak, how "
        "many times the bytes of the weights do the activations take?",
        unit="times",
        measure=activations_in_weights,
        why="A weight is kept once. A layer keeps some thirty bytes for each token and each number "
        "of its width, and there are 8 sequences of tokens.",
    ),
    Prediction(
        id="1.6",
        what="The same run at stage 3, on as many ranks as this notebook has: parameters, "
        "gradients, master copy and optimizer state are all divided by N. How many times smaller "
        "than at stage 0 is the peak of a rank?",
        unit="times",
        measure=peak_of_stage_3,
        why="Only the states are divided. Activations stay, they were more than half of the peak, "
        "and stage 3 also holds the layer in use, gathered from its slices.",
    ),
)


EXERCISES = (
    Exercise(
        id="1.1",
        target="zerolab.sim.states:bytes_per_param",
        minutes=8,
        difficulty=1,
        check=check_bytes_per_param,
        hints=(
            "Four numbers. Which two depend on the precision alone, and which on the optimizer?",
            "`PARAM_BYTES[precision]` is the width of parameter and gradient, "
            "`state_of(optimizer).bytes_per_param` what the optimizer remembers.",
            'The master copy is `0 if precision == "fp32" else MASTER_BYTES`.',
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    wrong.forgets_the_master,
                    wrong.master_in_fp32_too,
                    wrong.gradients_in_fp32,
                    wrong.averages_in_16_bits,
                    wrong.every_optimizer_is_adam,
                ),
            )
        ),
    ),
    Exercise(
        id="1.2",
        target="zerolab.sim.states:sharded_kinds",
        minutes=5,
        difficulty=1,
        check=check_sharded_kinds,
        hints=(
            "Each stage divides what the one before divided, and one thing more. What comes first, "
            "the largest part or the one that forward needs?",
            "Look at the column `used` of the table: stage 1 divides what only the optimizer "
            "reads, two of the four kinds.",
            'Stage 2 adds "grad", stage 3 adds "param".',
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    wrong.divides_all_sixteen,
                    wrong.gradients_at_stage_1,
                    wrong.forgets_to_shard_the_master,
                    wrong.gradients_whole_at_stage_2,
                    wrong.one_kind_a_stage,
                    wrong.parameters_at_stage_2,
                ),
            )
        ),
        hunted=(
            "gradients_at_stage_1",
            "forgets_to_shard_the_master",
            "gradients_whole_at_stage_2",
        ),
        evidence=estimator_evidence,
        scene="The estimator ran on it, for bf16 and AdamW",
    ),
    Exercise(
        id="1.3",
        target="zerolab.sim.states:saving_factor",
        minutes=8,
        difficulty=2,
        check=check_saving_factor,
        hints=(
            "Of one parameter's bytes some stay whole and some are divided by N. "
            "What is left of 16 at stage 1 on 8 ranks?",
            "`bytes_per_param(precision, optimizer)` gives the bytes by kind, "
            "`sharded_kinds(stage)` says which of them are divided by `world_size`.",
            "All bytes, divided by what is left: for each kind `n / world_size` "
            "where it is sharded, else `n`.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    wrong.quotes_the_limit,
                    wrong.saves_as_many_as_ranks,
                    wrong.what_is_left,
                    wrong.divides_twice,
                    wrong.always_sixteen,
                ),
            )
        ),
    ),
    Exercise(
        id="1.4",
        target="zerolab.sim.activations:paper_activation_bytes",
        minutes=10,
        difficulty=2,
        check=check_paper_activation_bytes,
        hints=(
            "Add the table up: so many bytes for each of the `s * b * h` numbers of the residual "
            "stream, and so many for each entry of the attention maps.",
            "There are `a` maps of `s * s` entries for each of `b` sequences.",
            "34 bytes and 5 bytes; checkpointed, the 2 bytes of the layer's input alone.",
        ),
        mutants=tuple(
            map(
                Mutant,
                (
                    wrong.forgets_the_maps,
                    wrong.one_map_for_all_heads,
                    wrong.two_bytes_once_more,
                    wrong.maps_of_one_sequence,
                    wrong.checkpointing_keeps_nothing,
                ),
            )
        ),
    ),
)
