"""Chapter 0: runs beside their closed forms, for `zerolab demo`.

Owns a `Trial`: one run, what `sim.estimate` says it must hold and move, and the differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from .. import config as config_
from .. import data, device, gpt
from ..sim import estimate
from . import execute, merge, tables
from .execute import Outcome
from .job import Job, RankReport
from .progress import StepProgress

DTYPE = "bf16"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the demo.

    Attributes:
        stage: 0 to 3.
        limit: bytes of each virtual GPU, or None.
        outcome: what happened.
        layouts: the lengths of each rank's part, rank 0 first.
    """

    stage: int
    limit: int | None
    outcome: Outcome
    layouts: tuple[estimate.Layout, ...]

    @property
    def fits(self) -> bool:
        """Whether the run came to its end."""
        return self.outcome.error is None

    @property
    def name(self) -> str:
        """The stage, and whether it ran without a limit."""
        return f"{self.stage}" + ("" if self.limit else " no limit")

    def predicted_bytes(self, rank: int) -> dict[str, int]:
        """Return the closed form of the bytes of model states on a rank."""
        return estimate.state_bytes(self.stage, DTYPE, self.layouts[rank])

    def predicted_elements(self) -> int:
        """Return the closed form of the elements that a step moves."""
        return estimate.elements_moved(self.stage, self.layouts[0].padded_numel)

    def difference_bytes(self) -> int:
        """Return the largest difference to the closed form, over kinds and ranks."""
        return max(
            abs(report.state_bytes.get(kind, 0) - nbytes)
            for report in self.outcome.reports
            for kind, nbytes in self.predicted_bytes(report.rank).items()
        )

    def moved_elements(self) -> int:
        """Return the elements that rank 0's last step moved, an all-reduce counted twice."""
        return moved(self.outcome.reports[0])

    def verdict(self) -> str:
        """Say in one line how it went."""
        peak = max(report.peak_bytes for report in self.outcome.reports)
        if self.fits:
            seconds = sum(self.outcome.reports[0].step_seconds)
            return f"  stage {self.name}: peak {device.format_bytes(peak)}, {seconds:.1f} s"
        return f"  stage {self.name}: out of memory"


def parse_limit(gpu_memory: str) -> int:
    """Read the limit that stage 0 is meant to break."""
    return device.parse_bytes(gpu_memory)


def moved(report: RankReport) -> int:
    """Add up the elements of a rank's last step, an all-reduce counted twice."""
    times = {"all_reduce": 2}
    return sum(times.get(op, 1) * total["elements"] for op, total in report.traffic.items())


def run(stage: int, limit: int | None, model: str, world_size: int, steps: int) -> Trial:
    """Run one stage in the lockstep world; running out of memory is a result, not an error."""
    settings = merge.merge(None, merge.Flags(stage=stage, dtype=DTYPE), world_size)
    shape = gpt.preset(model)
    job = Job(
        model=shape,
        text=data.load_text(),
        config=settings.raw,
        steps=steps,
        micro_batch_size=settings.micro_batch_size,
        accum_steps=settings.accum_steps,
    )
    machine = execute.Machine(world_size, "lockstep", None if limit is None else str(limit))
    with StepProgress(f"stage {stage}" + ("" if limit else " no limit"), steps) as progress:
        outcome = execute.execute(job, machine, progress.show)
    if outcome.error is not None and not isinstance(outcome.error, torch.OutOfMemoryError):
        raise outcome.error
    return Trial(stage, limit, outcome, _layouts(shape, settings, world_size))


def _layouts(
    shape: gpt.GPTConfig, settings: config_.Config, world_size: int
) -> tuple[estimate.Layout, ...]:
    """Count the model's parts for every rank; the meta device holds no bytes."""
    with torch.device("meta"):
        model = gpt.GPT(shape)
    numel = settings.zero.reduce_bucket_size
    return tuple(estimate.layout(model, numel, world_size, rank) for rank in range(world_size))


def losses_agree(trials: Sequence[Trial]) -> bool:
    """Tell whether all runs that finished lost exactly the same, to the last bit."""
    finished = [trial.outcome.reports[0].losses for trial in trials if trial.fits]
    return all(losses == finished[0] for losses in finished)


def all_as_predicted(trials: Sequence[Trial]) -> bool:
    """Tell whether every finished run held, moved and lost what it had to."""
    exact = all(
        trial.difference_bytes() == 0 and trial.moved_elements() == trial.predicted_elements()
        for trial in trials
        if trial.fits
    )
    return exact and losses_agree(trials)


def show(trials: Sequence[Trial]) -> None:
    """Print the two tables and the sentences under them."""
    console = Console(highlight=False)
    console.print(_memory(trials))
    console.print(_agreement(trials))
    for trial in trials:
        if not trial.fits:
            console.print(f"stage {trial.name}: {trial.outcome.error}\n", markup=False)
    console.print(_traffic(trials))
    console.print(_losses(trials))


def _memory(trials: Sequence[Trial]) -> object:
    """Bytes of rank 0, each stage above its closed form."""
    table = tables.new_table(
        "MiB on rank 0 when gradients are ready (out of memory: at the peak)",
        ["stage", "fits", "", *tables.STATES, "states", "peak"],
    )
    for trial in trials:
        report, form = trial.outcome.reports[0], trial.predicted_bytes(0)
        held = report.state_bytes if trial.fits else report.peak_by_kind
        states = [held.get(kind, 0) for kind in tables.STATES]
        fits = "no" if not trial.fits else "yes" if trial.limit else "no limit"
        cells = [*states, sum(states), report.peak_bytes]
        table.add_row(str(trial.stage), fits, "measured", *map(tables.mib, cells))
        forms = [form[kind] for kind in tables.STATES]
        row = ["", "", "formula", *map(tables.mib, [*forms, sum(forms)])]
        table.add_row(*row, "", style="dim", end_section=True)
    return table


def _agreement(trials: Sequence[Trial]) -> str:
    """Say where the states are the formula's to the byte, on every rank, and where not."""
    finished = [trial for trial in trials if trial.fits]
    exact = [trial.name for trial in finished if trial.difference_bytes() == 0]
    lines = [f"states as the formula says, to the byte: stages {', '.join(exact)}"] if exact else []
    apart = [trial for trial in finished if trial.difference_bytes()]
    lines += [f"stage {t.name} DIFFERS by {t.difference_bytes():,} bytes" for t in apart]
    return "\n".join(lines)


def _traffic(trials: Sequence[Trial]) -> object:
    """Elements of a step by collective, beside their closed form."""
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    table = tables.new_table(
        "elements that one step moves (an all-reduce counts twice)",
        ["stage", *ops, "moved", "formula"],
    )
    for trial in (trial for trial in trials if trial.fits):
        traffic = trial.outcome.reports[0].traffic
        cells = [traffic.get(op, {}).get("elements", 0) for op in ops]
        numbers = [*cells, trial.moved_elements(), trial.predicted_elements()]
        table.add_row(trial.name, *(f"{number:,}" for number in numbers))
    return table


def _losses(trials: Sequence[Trial]) -> str:
    """Show the losses once if they are equal, and all of them if not."""
    finished = [trial for trial in trials if trial.fits]
    if losses_agree(trials):
        text = "  ".join(f"{loss:.6f}" for loss in finished[0].outcome.reports[0].losses)
        names = ", ".join(trial.name for trial in finished)
        return f"losses, the same to the last bit at stages {names}:\n  {text}"
    lines = [f"  stage {t.name}: {t.outcome.reports[0].losses}" for t in finished]
    return "\n".join(["losses DIFFER:", *lines])
