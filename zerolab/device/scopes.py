"""Chapter 0: the three scopes of a ledger: of which kind, in which phase, not at all.

Owns only what must be put back when a scope ends. Written as small classes because they are
entered hundreds of times a step; each object is entered once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gpu import VirtualGPU
    from .ledger import Ledger


class TagScope:
    """What is allocated inside is of one kind; the innermost tag wins."""

    __slots__ = ("_before", "_kind", "_ledger")

    def __init__(self, ledger: "Ledger", kind: str) -> None:
        """Remember the kind; nothing happens before `__enter__`."""
        self._ledger, self._kind, self._before = ledger, kind, None

    def __enter__(self) -> None:
        """Set the kind."""
        self._before = self._ledger.tagged
        self._ledger.tagged = self._kind

    def __exit__(self, *_: object) -> None:
        """Put the kind back."""
        self._ledger.tagged = self._before


class PhaseScope:
    """Inside is one phase of the training step."""

    __slots__ = ("_before", "_gpu", "_name")

    def __init__(self, gpu: "VirtualGPU", name: str) -> None:
        """Remember the phase; nothing happens before `__enter__`."""
        self._gpu, self._name, self._before = gpu, name, ""

    def __enter__(self) -> None:
        """Enter the phase."""
        self._before = self._gpu.phase
        self._gpu.set_phase(self._name)

    def __exit__(self, *_: object) -> None:
        """Return to the phase before."""
        self._gpu.set_phase(self._before)


class PausedScope:
    """Inside, births are not counted."""

    __slots__ = ("_gpu",)

    def __init__(self, gpu: "VirtualGPU") -> None:
        """Remember the GPU; nothing happens before `__enter__`."""
        self._gpu = gpu

    def __enter__(self) -> None:
        """Pause."""
        self._gpu.pauses += 1

    def __exit__(self, *_: object) -> None:
        """Go on counting."""
        self._gpu.pauses -= 1
