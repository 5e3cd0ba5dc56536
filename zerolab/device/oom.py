"""Chapter 0: the out-of-memory error, in CUDA's words and with the facts attached.

Owns no data. The message has three parts: what was asked for and what was left, who holds
the rest (by kind, largest first), and where it happened. The same facts sit on the
exception as data, and travel with it through pickle:

    error.requested    bytes that were asked for
    error.breakdown    kind -> bytes held at that moment
    error.allocated    their sum
    error.capacity     bytes of the virtual GPU
    error.rank         index of the virtual GPU
    error.op, error.phase, error.where
"""

import torch

from . import sizes


def out_of_memory(
    *,
    requested: int,
    capacity: int,
    breakdown: dict[str, int],
    place: str,
    rank: int,
    op: str,
    phase: str,
    where: str,
) -> torch.OutOfMemoryError:
    """Build the exception that a full device raises; see the module for its attributes.

    Args:
        requested: bytes that did not fit.
        capacity: bytes the device has.
        breakdown: kind -> bytes held now.
        place: `"GPU"` or `"host"`.
        rank: index of the device.
        op: operation that asked, such as `"aten.mm"`.
        phase: phase of the training step.
        where: `"file.py:12"` of the user's source, or `""`.
    """
    allocated = sum(breakdown.values())
    error = torch.OutOfMemoryError(
        f"{_first_sentences(requested, capacity, capacity - allocated, place, rank)} "
        f"{_holders(breakdown, allocated)} "
        f"(virtual {place} {rank}, in {op}, phase {phase}{f', {where}' if where else ''})"
    )
    facts = {
        "requested": requested,
        "capacity": capacity,
        "allocated": allocated,
        "breakdown": breakdown,
        "rank": rank,
        "op": op,
        "phase": phase,
        "where": where,
    }
    vars(error).update(facts)
    return error


def _first_sentences(requested: int, capacity: int, free: int, place: str, rank: int) -> str:
    memory, device = ("CUDA", f"GPU {rank}") if place == "GPU" else ("Host", f"Host {rank}")
    return (
        f"{memory} out of memory. Tried to allocate {sizes.format_bytes(requested)}. "
        f"{device} has a total capacity of {sizes.format_bytes(capacity)} "
        f"of which {sizes.format_bytes(free)} is free."
    )


def _holders(breakdown: dict[str, int], allocated: int) -> str:
    largest_first = sorted(breakdown.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{kind} {sizes.format_bytes(nbytes)}" for kind, nbytes in largest_first)
    return f"Of the allocated memory {sizes.format_bytes(allocated)}{': ' if parts else ''}{parts}."
