"""Chapter 2: the table of a deadlock: a row a rank, the odd one out marked.

Owns the synced state of one table: the rows and the one that the reader chose. The data come from
`stuck`, the drawing is static/deadlock_table.js. The still table leaves out how long each rank
had waited: that differs from run to run, and a saved notebook is compared word by word.
"""

from typing import Any

import traitlets

from . import picture, scripts, stuck

HEAD = ("", "rank", "state", "collective", "line", "source")


class DeadlockTable(picture.Picture):
    """What each rank did when a run could not go on.

    Args:
        error: the `DeadlockError` (or `MismatchError`, `RunTimeoutError`) that ended the run, or
            its rows.
    """

    _esm = scripts.script("panel", "deadlock_table", entry="renderStuck")
    _css = scripts.style("panel", "deadlock_table")

    lines = traitlets.List().tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)  # position of a row, -1 for none

    def __init__(self, error: Any) -> None:
        rows = stuck.rows_of(error)
        calls = stuck.calls_of(error)
        self._lines = stuck.lines_of(rows, calls)
        lines = [line.as_state() for line in self._lines]
        super().__init__(lines=lines, finding=stuck.finding(rows, calls))

    def to_html(self) -> str:
        """Return the table without script, and without times."""
        odd = [number for number, line in enumerate(self._lines) if line.odd]
        rows = [
            [
                ">" if each.odd else "",
                str(each.rank),
                each.state,
                each.call,
                each.where,
                each.source,
            ]
            for each in self._lines
        ]
        return picture.paragraph(self.finding) + picture.table(HEAD, rows, bold=odd)
