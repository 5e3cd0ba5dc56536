"""Chapter 0: runs side by side, as one table.

Owns nothing: a `Table` reads what `lab.train` returned.
"""

from collections.abc import Sequence

from ..errors import UsageError
from .training import Training


def compare(*trainings: Training) -> "Table":
    """Lay runs side by side: bytes by kind, elements moved, losses."""
    if not trainings:
        raise UsageError("compare() has nothing to compare; give it what lab.train returned")
    return Table(trainings)


class Table:
    """Runs side by side, as a table in a notebook and as text elsewhere."""

    KINDS = ("param", "grad", "master", "optimizer")

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.trainings = tuple(trainings)

    @property
    def identical(self) -> bool:
        """Whether all runs computed the same losses, to the last bit."""
        return len({tuple(t.losses) for t in self.trainings}) == 1

    def rows(self) -> list[list[str]]:
        """Return the table as text, heading first; sizes in MiB, on the fullest GPU."""
        sizes = ["MiB per GPU", *self.KINDS, "states", "at the peak"]
        heading = [*sizes, "elements moved a step", "losses"]
        return [heading, *(self._row(training) for training in self.trainings)]

    def _row(self, training: Training) -> list[str]:
        rank = training.fullest
        sizes = [rank.state_bytes.get(kind, 0) for kind in self.KINDS]
        numbers = [*sizes, sum(sizes), rank.peak_bytes]
        cells = [f"{number / 2**20:.1f}" for number in numbers]
        losses = " ".join(f"{loss:.6f}" for loss in training.losses)
        return [f"stage {training.job.stage}", *cells, f"{rank.elements_moved:,}", losses]

    def verdict(self) -> str:
        """Say whether the runs computed the same."""
        same = "identical to the last bit" if self.identical else "not the same"
        return f"The losses of {len(self.trainings)} runs are {same}."

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{c:>{w}}" for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*lines, self.verdict()])

    def _repr_html_(self) -> str:
        heading, *rows = self.rows()
        head = "".join(f'<th style="text-align:right">{text}</th>' for text in heading)
        body = "".join(f"<tr><th>{row[0]}</th>{_cells(row[1:])}</tr>" for row in rows)
        return f"<table><tr>{head}</tr>{body}</table><p>{self.verdict()}</p>"


def _cells(texts: Sequence[str]) -> str:
    return "".join(f'<td style="text-align:right">{text}</td>' for text in texts)
