"""Chapter 1: the bytes of the model states, whoever counts them.

Owns no data. A virtual GPU counts what it holds by kind; where there is none, the tensors that
the engine knows are counted. Phase: at the mark `grads_ready`, when all states are there at once.
"""

from collections.abc import Iterable

import torch

from . import device
from .bucket import Bucket

STATE_KINDS = ("param", "grad", "master", "optimizer")


def state_bytes(buckets: Iterable[Bucket], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of param, grad, master and optimizer that this rank holds now."""
    gpu = device.current()
    if gpu is None:
        return _count_tensors(buckets, optimizer)
    held = gpu.by_kind()
    return {kind: held.get(kind, 0) for kind in STATE_KINDS}


def _count_tensors(buckets: Iterable[Bucket], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the storages of the states themselves."""
    tensors: dict[str, list[torch.Tensor]] = {kind: [] for kind in STATE_KINDS}
    for bucket in buckets:
        tensors["param"] += [bucket.flat_param, bucket.shard]
        tensors["grad"] += [bucket.reduced] if bucket.reduced is not None else []
        tensors["master"] += [bucket.master] if bucket.master is not None else []
    for state in optimizer.state.values():
        tensors["optimizer"] += [v for v in state.values() if isinstance(v, torch.Tensor)]
    return {kind: _storage_bytes(found) for kind, found in tensors.items()}


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
