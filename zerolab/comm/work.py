"""Chapter 2: what a collective returns.

Owns nothing; every world has a `Work` of its own.
"""


class Work:
    """What a collective returns: the result is there after `wait()`, and not before."""

    def wait(self) -> None:
        """Return when the outputs hold the result; calling it again does nothing."""
