"""Chapter 7: weights that a script writes to by itself, where they are whole.

Owns the versions of 16-bit parameters that have a master copy: torch counts every write to a
parameter, and the engine writes to buckets only, so a count that has grown is the script's doing
(weight clipping, say). Phase: before each step, take what was written into the master weights.
"""

from collections.abc import Iterable

from . import gathering
from .bucket import Bucket


class Changes:
    """The versions of the parameters of some buckets, as the engine has last seen them."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        """Watch the buckets that have a master copy and are whole."""
        self.versions = {
            bucket: _versions(bucket) for bucket in buckets if bucket.master is not None
        }

    def adopt(self) -> None:
        """Before a step: bring over what has been written since the last one."""
        for bucket, before in self.versions.items():
            now = _versions(bucket)
            if now != before:
                gathering.adopt(bucket)
                self.versions[bucket] = now


def _versions(bucket: Bucket) -> list[int]:
    return [slot.param._version for slot in bucket.slots]
