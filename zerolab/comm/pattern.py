"""Chapter 2: the calls that a step consists of, once the ranks have found them alike.

A training step makes the same calls as the step before. When a step ends, the ranks compare a
digest of their calls, unless it repeated the whole list that they had agreed on before. The next
step's calls are *expected* as long as they repeat that list from its beginning. All ranks make an
expected call under the same number, or the first one that strays stops counting on it: so an
expected call may use a collective that would mix up bytes if ranks disagreed. Owns the list that
was agreed on, and how far this step has repeated it.
"""

import zlib
from array import array


class Pattern:
    """What one rank knows of the calls of a step."""

    def __init__(self) -> None:
        """Expect nothing."""
        self._agreed: array[int] = array("L")
        self._made: array[int] = array("L")
        self._repeating = False

    def expects(self, checksum: int) -> bool:
        """Note a call; return whether the ranks have agreed on it and all before it."""
        position = len(self._made)
        self._made.append(checksum)
        self._repeating = (
            self._repeating and position < len(self._agreed) and self._agreed[position] == checksum
        )
        return self._repeating

    @property
    def repeated(self) -> bool:
        """Whether this step was the agreed one: it was for every rank, or calls did not match."""
        return self._repeating and len(self._made) == len(self._agreed)

    def digest(self) -> int:
        """Return 62 bits that stand for the calls of this step."""
        data = self._made.tobytes()
        return zlib.crc32(data) << 30 | zlib.adler32(data) >> 2

    def end_step(self, alike: bool) -> None:
        """Start a new step; `alike` says whether all ranks had the same digest."""
        self._agreed, self._made = (self._made if alike else array("L")), array("L")
        self._repeating = alike
