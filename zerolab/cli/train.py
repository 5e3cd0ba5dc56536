"""Chapter 12: `zerolab train`, from the options to the result.

Owns the options. Phases: check them all before anything starts, run, print. The result goes
to stdout (a table, or with --json one object as the last line), news and errors to stderr.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from . import machine as machine_

if TYPE_CHECKING:
    from ..config import Config
    from .execute import Machine
    from .job import Job

DEFAULT_GPUS = 4


def whole(text: str | int) -> int:
    """Read a whole number, or say that it is none."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number") from None
    if abs(number) >= 2**63:
        raise typer.BadParameter(f"{text!r} has more digits than 64 bits hold; use a smaller one")
    return number


def train(  # noqa: PLR0913
    stage: Annotated[
        int | None,
        typer.Option(parser=whole, metavar="N", help="ZeRO stage, 0 to 3.", show_default="0"),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="N", help="How many ranks, each a GPU.", show_default="4"
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help='Memory of each virtual GPU, such as "160MiB".')
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(help="lockstep (threads), gloo or nccl (processes).", show_default="lockstep"),
    ] = None,
    model: Annotated[str, typer.Option(help="Preset, from gpt-nano to gpt-170b.")] = "gpt-10m",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="bf16")
    ] = None,
    steps: Annotated[int, typer.Option(parser=whole, metavar="N", help="Optimizer steps.")] = 20,
    data: Annotated[
        Path | None, typer.Option(help="Any file as training text.", show_default="a novel")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A ds_config.json; flags fill in what it leaves open.")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="N", help="Samples a rank and forward.", show_default="2"
        ),
    ] = None,
    accum_steps: Annotated[
        int | None,
        typer.Option(parser=whole, metavar="N", help="Forwards a step.", show_default="1"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    seed: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="Decides weights and batches.")
    ] = 0,
    sample: Annotated[
        int,
        typer.Option(parser=whole, metavar="N", help="Bytes the trained model writes at the end."),
    ] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds until the run is ended.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as last line.")
    ] = False,
) -> None:
    """Train a GPT on text and say what every rank held and moved."""
    from . import execute, merge, result, tables
    from .progress import StepProgress  # torch is loaded from here on

    _at_least(1, gpus=gpus, steps=steps, micro_batch=micro_batch, accum_steps=accum_steps)
    _at_least(0, sample=sample)
    world_size = execute.join(gpus, world) if execute.under_torchrun() else gpus or DEFAULT_GPUS
    flags = merge.Flags(stage, dtype, micro_batch, accum_steps, lr)
    settings = merge.merge(config, flags, world_size)
    machine = execute.Machine(world_size, world, gpu_memory, timeout)
    job = _job(model, data, settings, steps, seed, sample)
    _check_memory(job, machine)
    speaks = os.environ.get("RANK", "0") == "0"
    with StepProgress(f"stage {settings.stage}", steps, quiet=not speaks) as progress:
        outcome = execute.execute(job, machine, progress.show)
    if speaks and json:
        print(result.to_json(outcome, settings))
    elif speaks:
        tables.print_summary(outcome, settings, job)
    if outcome.error is not None:
        raise outcome.error


def _job(
    model: str, path: Path | None, settings: "Config", steps: int, seed: int, sample: int
) -> "Job":
    """Put together what the ranks are told, and refuse what they would stumble over."""
    from .. import data, gpt
    from .job import Job

    shape, text = gpt.preset(model), data.load_text(path)
    data.batches(text, 0, settings.world_size, settings.micro_batch_size, shape.seq_len, seed)
    for warning in settings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return Job(
        model=shape,
        text=text,
        config=settings.raw,
        steps=steps,
        micro_batch_size=settings.micro_batch_size,
        accum_steps=settings.accum_steps,
        seed=seed,
        sample=sample,
    )


def _check_memory(job: "Job", machine: "Machine") -> None:
    """Refuse a model that this machine cannot even build: the system would kill the ranks."""
    from .. import device, gpt

    total = machine_.memory_bytes()
    one = 4 * gpt.num_params(job.model)  # fp32, before the engine takes over
    if machine.gpu_memory is not None:
        one = min(one, device.parse_bytes(machine.gpu_memory))
    if machine.world != "nccl" and total is not None and one * machine.world_size > total:
        each, has = device.format_bytes(one), device.format_bytes(total)
        raise UsageError(
            f"{machine.world_size} ranks with {each} of parameters each do not fit this machine's "
            f"{has}; take a smaller --model or fewer --gpus"
        )


def _at_least(least: int, **counts: int | None) -> None:
    """Refuse counts that are too small."""
    for name, count in counts.items():
        if count is not None and count < least:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {count} is below {least}; give {least} or more")
