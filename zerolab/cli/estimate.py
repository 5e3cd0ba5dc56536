"""Chapter 1: `zerolab estimate`: what each stage holds and moves, and which one fits.

Owns the options. Phases: check them all, work out a row for every stage (`sizing`), print tables
or one JSON object, write a ds_config.json for the cheapest stage that fits.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import sizing
from .sizing import Question, Row
from .train import whole

OPTIMIZER_BLOCKS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-4}},
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-4}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2}},
}
LARGEST_PSI = 1e9  # billions: 1e18 parameters, whose bytes still are exact integers of any use


def billions(text: str | float) -> float:
    """Read a number of billions, or say that it is none."""
    try:
        number = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; give billions, such as 7.5") from None
    if not math.isfinite(number) or not 1e-9 <= number <= LARGEST_PSI:
        raise typer.BadParameter(f"{text} billion parameters cannot be; give billions, such as 7.5")
    return number


def estimate(  # noqa: PLR0913 - one argument for each flag
    psi: Annotated[
        float | None,
        typer.Option(parser=billions, metavar="BILLIONS", help="Parameters, in billions."),
    ] = None,
    gpus: Annotated[int, typer.Option(parser=whole, metavar="N", help="How many GPUs.")] = 8,
    model: Annotated[
        str | None, typer.Option(help="A preset in place of --psi, such as gpt-7.5b.")
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            parser=whole,
            metavar="N",
            help="Stage of the configuration.",
            show_default="the cheapest that fits",
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, adagrad, lion, momentum or sgd.")
    ] = "adamw",
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU.")] = "80GiB",
    micro_batch: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="Samples a GPU and forward.")
    ] = 1,
    accum_steps: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="Forwards a step.")
    ] = 1,
    config_out: Annotated[
        Path | None, typer.Option(help="Write a ds_config.json for the stage here.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as last line.")
    ] = False,
) -> None:
    """Say what training a model holds and moves at every stage, and which stage fits."""
    if (psi is None) == (model is None):
        raise UsageError("give either --psi, billions of parameters, or --model, a preset")
    numbers = {"gpus": gpus, "micro-batch": micro_batch, "accum-steps": accum_steps}
    _check(numbers, stage, precision, optimizer, config_out, force)
    asked = _question(
        psi, model, gpus, precision, optimizer, gpu_memory, (micro_batch, accum_steps)
    )
    rows = sizing.work_out(asked)
    chosen = stage if stage is not None else sizing.cheapest(rows)
    file = None if config_out is None else config_for(asked, _needed(chosen, asked))
    if config_out is not None:
        _write(config_out, json.dumps(file, indent=2) + "\n")
    if as_json:
        print(json.dumps(as_object(asked, rows, chosen)))
    else:
        sizing.show(asked, rows, chosen)


def _check(
    numbers: dict[str, int],
    stage: int | None,
    precision: str,
    optimizer: str,
    config_out: Path | None,
    force: bool,
) -> None:
    """Refuse options that are wrong by themselves, before anything is worked out."""
    from ..sim import estimate as sim

    for name, count in numbers.items():
        if count < 1:
            raise UsageError(f"--{name} {count} is below 1; give 1 or more")
    if stage is not None:
        sim.sharded_kinds(stage)
    sim.bytes_per_param(precision, optimizer)
    if config_out is not None and config_out.exists() and not force:
        raise UsageError(f"{config_out} exists; give another name, or --force to overwrite it")


def _question(
    psi: float | None,
    model: str | None,
    gpus: int,
    precision: str,
    optimizer: str,
    gpu_memory: str,
    batch: tuple[int, int],
) -> Question:
    """Turn what was typed into numbers."""
    from .. import device, gpt

    num_params = round((psi or 0) * 1e9) if model is None else gpt.num_params(gpt.preset(model))
    memory = device.parse_bytes(gpu_memory)
    return Question(num_params, gpus, precision, optimizer, memory, *batch, model)


def _needed(stage: int | None, asked: Question) -> int:
    """Insist on a stage; where none fits, say how many GPUs the model states would fit on."""
    from .. import device
    from ..sim import estimate as sim

    if stage is not None:
        return stage
    needed = sim.gpus_needed(
        asked.num_params, asked.gpu_memory, 3, asked.precision, asked.optimizer
    )
    memory = device.format_bytes(asked.gpu_memory)
    remedy = f"the model states alone need {needed:,}" if needed else "no number of them does"
    raise UsageError(
        f"no stage fits {asked.gpus} GPUs of {memory} ({remedy}); give more --gpus or "
        "--gpu-memory, or choose a --stage yourself"
    )


def config_for(asked: Question, stage: int) -> dict[str, Any]:
    """Return a ds_config for a stage; `config.load` has accepted it for this number of GPUs."""
    from .. import config

    file: dict[str, Any] = {
        "train_batch_size": asked.micro_batch * asked.accum_steps * asked.gpus,
        "train_micro_batch_size_per_gpu": asked.micro_batch,
        "gradient_accumulation_steps": asked.accum_steps,
        "optimizer": OPTIMIZER_BLOCKS[asked.optimizer],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    if asked.precision != "fp32":
        file[asked.precision] = {"enabled": True}
    config.load(file, asked.gpus)
    return file


def as_object(asked: Question, rows: list[Row], chosen: int | None) -> dict[str, Any]:
    """Return the JSON object: sizes in bytes, `gb` of 1e9 and `gib` of 2**30."""
    return {
        "num_params": asked.num_params,
        "model": asked.model,
        "gpus": asked.gpus,
        "precision": asked.precision,
        "optimizer": asked.optimizer,
        "gpu_memory": asked.gpu_memory,
        "micro_batch": asked.micro_batch,
        "accum_steps": asked.accum_steps,
        "stage": chosen,
        "stages": [
            {
                "stage": row.stage,
                "bytes": row.parts,
                "state_bytes": row.states,
                "total_bytes": row.total,
                "gb": row.states / 10**9,
                "gib": row.states / 2**30,
                "fits": row.fits,
                "elements_moved": row.elements,
                "sent_bytes": row.sent,
                "deepspeed_bytes": row.deepspeed,
            }
            for row in rows
        ],
    }


def _write(path: Path, text: str) -> None:
    """Write a file, or say why that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); give the name of a file in a folder "
            "that exists"
        ) from None
    typer.echo(f"wrote {path}", err=True)
