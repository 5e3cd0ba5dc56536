"""Chapter 2: the store: a small dictionary that all ranks of a run share, kept by torch.

Owns nothing. A store holds the addresses by which ranks find each other and, here, what stuck
ranks say of themselves (`watch`).
"""

from typing import Any

# torch.distributed has them too, but type checkers see them only here.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["PrefixStore", "Store", "TCPStore", "second_connection"]


def second_connection(store: Any) -> Store:
    """Open another connection to a store: the first may be busy with a call of another thread."""
    try:
        return store.clone()
    except RuntimeError:
        return store  # a store in memory or in a file needs no connection
