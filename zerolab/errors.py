"""Chapter 0: the ways a run can go wrong, each with one class.

A message names the value, the rule it breaks and the remedy. `UsageError` is the user's
mistake and never needs a traceback; the others describe what happened to the ranks.
"""

import traceback
from pathlib import Path

PACKAGE = Path(__file__).parent


class UsageError(ValueError):
    """A value that the user gave cannot work: the message says which, why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Be short in a notebook: the user's own line, the message, and whatever was added to it.

        IPython shows these lines in place of a traceback; the cell fails all the same.
        """
        frames = traceback.extract_tb(self.__traceback__)
        own = [frame for frame in frames if _is_own(frame.filename) and frame.line]
        where = [f"line {own[-1].lineno}: {own[-1].line}"] if own else []
        return [*where, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


def _is_own(filename: str) -> bool:
    """Tell whether a file is the user's: neither of this package nor an installed one."""
    return "-packages" not in filename and not Path(filename).is_relative_to(PACKAGE)


class RankError(RuntimeError):
    """Something that happened on one rank of a run, as the other ranks and the caller see it."""


class PeerError(RankError):
    """Raised on a rank whose peer failed: this rank did nothing wrong."""


class DeadlockError(RankError):
    """No rank can go on, and the table in the message says who waits where for whom.

    Attributes:
        table: one row a rank, as `zerolab.records.RankRow`.
    """

    def __init__(self, message: str, table: tuple = ()) -> None:
        """Keep the rows beside the text, for pictures."""
        super().__init__(message)
        self.table = table


class MismatchError(DeadlockError):
    """Two ranks called different collectives, or the same one with other shapes or dtypes.

    Attributes:
        table: where each rank was when that came out; one may have gone on since its call.
        calls: the calls that do not match, a `RankRow` each.
    """

    def __init__(self, message: str, table: tuple = (), calls: tuple = ()) -> None:
        """Keep the calls beside the rows."""
        super().__init__(message, table)
        self.calls = calls
