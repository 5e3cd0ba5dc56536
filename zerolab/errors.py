"""Chapter 0: the ways a run can go wrong, each with one class.

A message names the value, the rule it breaks and the remedy. `UsageError` is the user's
mistake and never needs a traceback; the others describe what happened to the ranks.
"""


class UsageError(ValueError):
    """A value that the user gave cannot work: the message says which, why and what to do."""


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
    """Two ranks called different collectives, or the same one with other shapes or dtypes."""
