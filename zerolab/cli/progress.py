"""Chapter 12: news while a run is on, always on stderr, so that stdout stays a result.

Owns one line of a terminal. Where stderr is no terminal (a log, a pipe) it becomes plain
lines, at most about twenty for a run.
"""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .job import Step

LINES = 20  # of a run whose stderr is no terminal


class StepProgress:
    """Shows the steps of one run; use it as a context manager."""

    def __init__(self, label: str, steps: int, quiet: bool = False) -> None:
        """Prepare to show `steps` steps under the name `label`; quiet: show nothing."""
        self.label, self.steps = label, steps
        self.console = Console(stderr=True, quiet=quiet)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self.task = self.bar.add_task(label, total=steps, news="starting")

    def __enter__(self) -> "StepProgress":
        """Start to draw."""
        self.bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wipe the bar away."""
        self.bar.stop()

    def show(self, step: Step) -> None:
        """Show that a step is done."""
        news = f"loss {step.loss:.4f}  {step.seconds:.2f} s"
        self.bar.update(self.task, completed=step.number, news=news)
        every = max(1, self.steps // LINES)
        if not self.console.is_terminal and (step.number % every == 0 or step.number == self.steps):
            line = f"{self.label}  step {step.number}/{self.steps}  {news}"
            self.console.print(line, highlight=False, soft_wrap=True)
