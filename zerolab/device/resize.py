"""Chapter 0: the watch on `UntypedStorage.resize_`, which never reaches torch's dispatcher.

Owns the list of ledgers that listen (weakly). The method is replaced once, when the first
ledger is made, and stays replaced: nested or per-ledger patches count twice or not at all. A
resize is counted by every ledger that has the storage in its books, and otherwise by the
GPU of the calling thread.
"""

import threading
import weakref

import torch

from . import active
from .ledger import Ledger

_lock = threading.Lock()
_listeners: list[weakref.ref[Ledger]] = []
_original = torch.UntypedStorage.resize_
_is_watching = False


def watch(ledger: Ledger) -> None:
    """Tell this ledger from now on about storages of its own that change their size."""
    global _is_watching, _listeners
    with _lock:
        alive = [listener for listener in _listeners if listener() is not None]
        _listeners = [*alive, weakref.ref(ledger)]  # a new list: readers need no lock
        if not _is_watching:
            torch.UntypedStorage.resize_ = _resize_  # type: ignore[method-assign]
            _is_watching = True


def _resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Resize a storage and tell its owners; a growth that does not fit is undone."""
    before = self.nbytes()
    _original(self, size)
    if self.nbytes() != before:
        try:
            _tell(self)
        except torch.OutOfMemoryError:
            _original(self, before)
            _tell(self)
            raise
    return self


def _tell(storage: torch.UntypedStorage) -> None:
    for ledger in _owners(storage):
        ledger.storage_resized(storage)


def _owners(storage: torch.UntypedStorage) -> list[Ledger]:
    ledgers = [ledger for listener in _listeners if (ledger := listener()) is not None]
    owners = [ledger for ledger in ledgers if storage._cdata in ledger.live]
    if owners:
        return owners
    gpu = active.current()
    return [] if gpu is None else [gpu]
