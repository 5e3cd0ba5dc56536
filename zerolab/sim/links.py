"""Chapter 2: how long a collective takes: messages, each with a latency and a bandwidth.

Owns no data. The alpha-beta model: a message of n bytes takes alpha + n / beta seconds, with
alpha the latency of a link and beta its bandwidth. A collective takes as many of them as its
slowest rank must send one after the other. The model knows no congestion, no sharing of links
and no overlap; `fitted` reads alpha and beta off two measurements.

Source: Hockney (1994) for the model; Thakur, Rabenseifner and Gropp (2005), "Optimization of
collective communication operations in MPICH", for ring and tree under it.
"""

from ..errors import UsageError


def ring_seconds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Return how long a ring all-reduce takes.

    Example: 8 bytes on 4 ranks at 1 s and 1 byte a second: 6 rounds of 1 + 2 s, so 18 s.

    Args:
        nbytes: of the whole tensor, on each rank.
        world_size: N; a tensor is cut into N slices.
        latency: seconds for a message, whatever its size.
        bandwidth: bytes a second of one link.
    """
    rounds = 2 * (world_size - 1)
    return rounds * (latency + nbytes / world_size / bandwidth)


def tree_seconds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Return how long an all-reduce on a binary tree takes: few rounds, whole tensors."""
    return 2 * tree_depth(world_size) * (latency + nbytes / bandwidth)


def star_seconds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Return how long an all-reduce by one rank takes: all lines end at it."""
    return 2 * (world_size - 1) * (latency + nbytes / bandwidth)


def tree_depth(world_size: int) -> int:
    """Return ceil(log2 N): how many rounds one value needs to reach every rank."""
    if world_size < 1:
        raise UsageError(f"world_size {world_size} is below 1; give 1 or more")
    return (world_size - 1).bit_length()


def crossover_bytes(world_size: int, latency: float, bandwidth: float) -> float:
    """Return the size above which the ring is faster than the tree; 0 where it always is.

    Below it latency decides, and the tree has fewer rounds; above it bytes do.
    """
    depth = tree_depth(world_size)
    saved_bytes = depth - (world_size - 1) / world_size  # of the tensor, by the ring
    more_messages = world_size - 1 - depth  # for the ring
    return latency * bandwidth * more_messages / saved_bytes if more_messages else 0.0


def fitted(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Return (latency, bandwidth) of the messages that were measured.

    Args:
        small: bytes of a small message, and the seconds it took.
        large: the same of a large one.

    Raises:
        UsageError: the large message was not the slower one, so the two say nothing.
    """
    more_bytes, more_seconds = large[0] - small[0], large[1] - small[1]
    if more_bytes <= 0 or more_seconds <= 0:
        raise UsageError(
            f"{large[0]:g} bytes in {large[1]:g} s after {small[0]:g} in {small[1]:g}: the larger "
            "message must be the slower one; measure again, with sizes further apart"
        )
    bandwidth = more_bytes / more_seconds
    return max(small[1] - small[0] / bandwidth, 0.0), bandwidth


def star_sent_elements(numel: int, world_size: int) -> int:
    """Return what the root of a star sends: the sum, to everybody else."""
    return (world_size - 1) * numel


def ring_sent_elements(numel: int, world_size: int) -> int:
    """Return what every rank of a ring sends for an all-reduce: 2 (N-1)/N, the padding too."""
    return 2 * (world_size - 1) * -(-numel // world_size)
