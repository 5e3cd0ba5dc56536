"""Chapter 12: results as people read them, drawn with rich on stdout.

Owns no facts: every number comes from an `Outcome` and goes through one of two formats, bytes
in MiB and elements in full.
"""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..config import Config
from .execute import Outcome
from .job import Job, RankReport
from .merge import DTYPE_NAMES

STATES = ("param", "grad", "master", "optimizer")


def mib(nbytes: int | None) -> str:
    """Write bytes in MiB with two digits; a dash for what is not known."""
    return "-" if nbytes is None else f"{nbytes / 2**20:,.2f}"


def print_summary(outcome: Outcome, settings: Config, job: Job) -> None:
    """Print what a training run held, moved, lost and wrote."""
    console = Console()
    dtype = DTYPE_NAMES[settings.param_dtype]
    console.print(
        f"stage {settings.stage}, {outcome.world_size} ranks, {dtype}, "
        f"{settings.train_batch_size} samples a step",
        highlight=False,
    )
    first, stopped = outcome.first, outcome.error is not None
    if outcome.reports:
        console.print(memory_table(outcome.reports, stopped))
    if first is not None and first.losses:
        console.print(traffic_table(first, stopped))
        console.print(speed(first, settings, job), highlight=False)
        if settings.fp16.enabled:
            console.print(scaling(first), highlight=False)
    if first is not None and first.sample:
        console.print(f"\n{printable(first.sample)}", highlight=False, markup=False)


def memory_table(reports: Sequence[RankReport], stopped: bool = False) -> Table:
    """Show the bytes of every rank: model states when gradients were ready, and the peak.

    Of a run that was stopped it says in which step that was: gradients may not have been ready
    again before the end.
    """
    title = "MiB on each rank when gradients are ready"
    if stopped:
        ready = max(report.state_step for report in reports)
        title = f"MiB on each rank when gradients were ready in step {ready}"
        title = title if ready else "MiB on each rank; gradients were never ready"
    table = new_table(title, ["rank", *STATES, "states", "peak"])
    for report in reports:
        states = [report.state_bytes.get(kind) for kind in STATES]
        total = sum(report.state_bytes.values()) if report.state_bytes else None
        table.add_row(str(report.rank), *map(mib, [*states, total, report.peak_bytes]))
    return table


def traffic_table(report: RankReport, stopped: bool = False) -> Table:
    """Show what one rank's collectives carried in the last step."""
    title = "collectives of the last step"
    if stopped:
        whole = report.traffic_step <= len(report.losses)
        how = "the last whole one" if whole else "cut short"
        title = f"collectives of step {report.traffic_step}, {how}"
    table = new_table(title, ["collective", "calls", "elements", "MiB"])
    for op, total in report.traffic.items():
        cells = (op, f"{total['calls']:,}", f"{total['elements']:,}", mib(total["bytes"]))
        table.add_row(*cells)
    return table


def speed(report: RankReport, settings: Config, job: Job) -> str:
    """Say how far the loss fell and how fast tokens went by, the first step left out."""
    times = report.step_seconds[1:] or report.step_seconds
    tokens = settings.train_batch_size * job.model.seq_len * len(times)
    steps = len(report.losses)
    first, last = (f"{report.losses[number]:.4f}" for number in (0, -1))
    fell = f"loss {first} -> {last} in {steps} steps" if steps > 1 else f"loss {first} in 1 step"
    return f"{fell}, {tokens / sum(times):,.0f} tokens/s on all ranks together"


def scaling(report: RankReport) -> str:
    """Say how many steps an overflow has cost, and what the loss scale is now."""
    skipped, steps, scale = report.skipped_steps, len(report.losses), report.loss_scale
    lost = f"{skipped} of {steps} steps skipped on overflow" if skipped else "no step skipped"
    written = f"{scale:,.0f}" if scale == int(scale) else f"{scale:g}"
    return f"fp16: {lost}, loss scale {written} at the end"


def printable(text: str) -> str:
    """Replace what a terminal would obey: an untrained model writes any byte."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def new_table(title: str, columns: Iterable[str]) -> Table:
    """Prepare a table whose first column is a name and whose others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table
