"""Chapter 0: `zerolab demo`, the whole idea in a minute: one model, four stages, one memory limit.

Owns the plan of five runs: every stage on GPUs that are too small for stage 0, and stage 0 once
more without a limit, so that its losses and bytes are there to compare. Phases: run them one
after the other with news on stderr, compare each with its closed form, print two tables.
The numbers are measured; a difference anywhere is printed and makes the exit code 1.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .train import whole

if TYPE_CHECKING:
    from .compare import Trial

PLAN = ((0, True), (0, False), (1, True), (2, True), (3, True))  # stage, with the limit?


def demo(
    steps: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="Optimizer steps of each run.")
    ] = 3,
    model: Annotated[str, typer.Option(help="Preset, from gpt-nano upwards.")] = "gpt-10m",
    gpus: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="How many virtual GPUs.")
    ] = 4,
    gpu_memory: Annotated[str, typer.Option(help="Memory of each.")] = "160MiB",
) -> None:
    """Train one model through the stages of ZeRO and compare what each holds and moves."""
    for name, count in (("steps", steps), ("gpus", gpus)):
        if count < 1:
            raise UsageError(f"--{name} {count} is below 1; give 1 or more")
    from rich.console import Console

    from . import compare

    limit = compare.parse_limit(gpu_memory)
    news = Console(stderr=True, highlight=False)
    news.print(f"{model} on {gpus} virtual GPUs of {gpu_memory}, bf16, {steps} steps a stage")
    trials: list[Trial] = []
    for stage, limited in PLAN:
        trials.append(compare.run(stage, limit if limited else None, model, gpus, steps))
        news.print(trials[-1].verdict())
    compare.show(trials)
    if not compare.all_as_predicted(trials):
        raise typer.Exit(1)
