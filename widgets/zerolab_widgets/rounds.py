"""Chapter 2: a collective as messages, round by round, and who holds which partial sum.

Owns no state. A `Round` is the messages that travel at the same time. What a rank holds of a
chunk is a set of ranks: those whose numbers have been added up in it, as bits of an int. `ring`
writes the textbook's rounds down; those of a run are read by `messages`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zerolab.errors import UsageError

ALGORITHMS = ("reduce_scatter", "all_gather", "all_reduce")
UNKNOWN = -1  # the chunk of a message that does not say which it carries
Holdings = list[list[int]]  # [rank][chunk] -> whose numbers are in it, as bits


@dataclass(frozen=True)
class Message:
    """One chunk on its way from a rank to another."""

    src: int
    dst: int
    chunk: int
    elements: int = 1
    adds: bool = True  # or it replaces what the receiver had


Round = tuple[Message, ...]


@dataclass(frozen=True)
class Reading:
    """A collective: its rounds, and how the tensor is cut."""

    rounds: list[Round]
    chunks: int
    elements: int  # of the whole tensor


def all_ranks(world_size: int) -> int:
    """Return the set of all ranks as bits."""
    return (1 << world_size) - 1


def ranks_in(held: int) -> list[int]:
    """Return the ranks in a set of bits, in order."""
    return [rank for rank in range(held.bit_length()) if held >> rank & 1]


def check_algorithm(algorithm: str) -> None:
    """Refuse a name that is no algorithm.

    Raises:
        UsageError: it is unknown; the message lists those there are.
    """
    if algorithm not in ALGORITHMS:
        names = ", ".join(f'"{name}"' for name in ALGORITHMS)
        raise UsageError(f"algorithm {algorithm!r} is unknown; give one of {names}")


# The textbook's ring.


def ring(world_size: int, algorithm: str) -> list[Round]:
    """Return the rounds of a ring collective; chunk r ends with rank r.

    An all-reduce is a reduce-scatter and an all-gather, one after the other.
    """
    check_algorithm(algorithm)
    scatter = [_ring_round(world_size, -step - 1, True) for step in range(world_size - 1)]
    gather = [_ring_round(world_size, -step, False) for step in range(world_size - 1)]
    return {"reduce_scatter": scatter, "all_gather": gather}.get(algorithm, scatter + gather)


def _ring_round(world_size: int, shift: int, adds: bool) -> Round:
    """Return one round: every rank sends a chunk to the next one."""
    return tuple(
        Message(rank, (rank + 1) % world_size, (rank + shift) % world_size, adds=adds)
        for rank in range(world_size)
    )


def start(world_size: int, chunks: int, algorithm: str) -> Holdings:
    """Return what the ranks hold before the first round.

    Before a gather rank r has chunk r and nothing else; before a reduction every rank has its
    own numbers in every chunk.
    """
    gathers = algorithm == "all_gather"
    return [
        [0 if gathers and chunk != rank else 1 << rank for chunk in range(chunks)]
        for rank in range(world_size)
    ]


def whole(world_size: int, chunk: int, algorithm: str) -> int:
    """Return what a finished chunk holds: everybody's numbers, or its owner's."""
    return 1 << chunk if algorithm == "all_gather" else all_ranks(world_size)


def goals(world_size: int, chunks: int, algorithm: str) -> set[tuple[int, int]]:
    """Return the (rank, chunk) that must be whole at the end."""
    scatters = algorithm == "reduce_scatter" and chunks == world_size
    return {
        (rank, chunk)
        for rank in range(world_size)
        for chunk in range(chunks)
        if not scatters or rank == chunk
    }


def after(held: Holdings, messages: Round) -> Holdings:
    """Return what the ranks hold after a round; messages of unknown chunks change nothing."""
    now = [list(row) for row in held]
    for message in messages:
        if message.chunk != UNKNOWN:
            arrived = held[message.src][message.chunk]
            before = now[message.dst][message.chunk] if message.adds else 0
            now[message.dst][message.chunk] = before | arrived
    return now


def history(held: Holdings, rounds: Sequence[Round]) -> list[Holdings]:
    """Return what the ranks hold before the first round and after each."""
    states = [held]
    for messages in rounds:
        states.append(after(states[-1], messages))
    return states


def sent(rounds: Sequence[Round]) -> Counter[int]:
    """Return how many elements each rank sent."""
    total: Counter[int] = Counter()
    for messages in rounds:
        for message in messages:
            total[message.src] += message.elements
    return total
