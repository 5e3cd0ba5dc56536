"""Chapter 2: the messages of a run, read from its records, as rounds.

Owns no state. The k-th send of a pair of ranks belongs to its k-th receive. A call comes after
every earlier blocking call of its rank, and after every earlier call in the same direction,
because a link carries one message at a time: from that follow the rounds. What arrives where it
is to stay replaces what was there; what arrives in scratch memory is added.

Which chunk a message carries is told by its place in the tensor. Scratch memory has none: in a
ring, what a rank sends from there is what arrived there last, and after world_size - 1 hops it is
at home.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerolab.errors import UsageError
from zerolab.records import CollectiveEvent, Records

from .rounds import UNKNOWN, Message, Reading

MAX_ROUNDS = 64


@dataclass(frozen=True)
class _Letter:
    """Both sides of one message: who, and the place of each call among the calls of its rank."""

    src: int
    dst: int
    send: CollectiveEvent
    recv: CollectiveEvent
    places: tuple[int, int]

    @property
    def begin(self) -> int:
        """Where the chunk begins in its tensor, as either side tells it; -1 for unknown."""
        return max(self.send.start, self.recv.start)


def rounds_of(
    ranks: Sequence[Records], algorithm: str = "all_reduce", numel: int | None = None
) -> Reading:
    """Return the rounds of what the ranks sent each other.

    Args:
        ranks: the records of all ranks.
        algorithm: one of ALGORITHMS; tells whose chunk it is that only scratch memory saw.
        numel: elements of the whole tensor; None to conclude it from the messages.

    Raises:
        UsageError: they sent nothing, or the records are not those of all ranks.
    """
    if [records.rank for records in ranks] != list(range(len(ranks))):
        raise UsageError("the records must be those of all ranks, from rank 0 on")
    letters = _letters([each.collectives for each in ranks])
    letters = letters or _letters([each.parts for each in ranks])
    if not letters:
        raise UsageError(
            "no message between two ranks is on record; a collective of comm counts as one "
            "call: write it with comm.send and comm.recv"
        )
    numbers = _numbers(letters)
    if max(numbers) > MAX_ROUNDS:
        raise UsageError(
            f"{max(numbers)} rounds cannot be drawn: run one collective, which has at most "
            f"{MAX_ROUNDS}"
        )
    cut = _cut(letters, numbers, algorithm, len(ranks), numel)
    rounds: list[list[Message]] = [[] for _ in range(max(numbers))]
    for letter, number, chunk in zip(letters, numbers, cut.chunk_of, strict=True):
        adds = letter.recv.start < 0
        message = Message(letter.src, letter.dst, chunk, letter.send.elements, adds)
        rounds[number - 1].append(message)
    return Reading([tuple(each) for each in rounds], cut.chunks, cut.elements)


def _letters(logs: Sequence[Sequence[CollectiveEvent]]) -> list[_Letter]:
    """Return the messages that were sent and received: the k-th send of a pair is its k-th recv."""
    sends, recvs = _calls(logs, "send"), _calls(logs, "recv")
    return [
        _Letter(src, dst, send, recv, (send_place, recv_place))
        for (src, dst), sent in sends.items()
        for (send_place, send), (recv_place, recv) in zip(
            sent, recvs.get((dst, src), []), strict=False
        )
    ]


def _calls(
    logs: Sequence[Sequence[CollectiveEvent]], op: str
) -> dict[tuple[int, int], list[tuple[int, CollectiveEvent]]]:
    """Return the calls of one direction by (rank, its peer), each with its place on the rank."""
    found: dict[tuple[int, int], list[tuple[int, CollectiveEvent]]] = {}
    for rank, log in enumerate(logs):
        for place, event in enumerate(log):
            if event.op == op:
                found.setdefault((rank, event.peer), []).append((place, event))
    return found


def _numbers(letters: Sequence[_Letter]) -> list[int]:
    """Return the round of each message, from 1: the first in which both sides are ready."""
    before = _predecessors(letters)
    numbers = [1] * len(letters)
    for _ in letters:  # no chain of messages is longer than all of them
        later = [max([0, *(numbers[other] for other in others)]) + 1 for others in before]
        if later == numbers:
            break
        numbers = later
    return numbers


def _predecessors(letters: Sequence[_Letter]) -> list[list[int]]:
    """Return for each message those that must be over before it can travel.

    On either side: the last before it in its direction, and the last that blocked the rank.
    """
    sides: dict[int, list[tuple[int, int, CollectiveEvent]]] = {}
    for number, letter in enumerate(letters):
        sides.setdefault(letter.src, []).append((letter.places[0], number, letter.send))
        sides.setdefault(letter.dst, []).append((letter.places[1], number, letter.recv))
    before: list[list[int]] = [[] for _ in letters]
    for own in sides.values():
        last: dict[str, int] = {}
        for _, number, event in sorted(own, key=lambda side: side[0]):
            before[number] += [last[key] for key in (event.op, "blocking") if key in last]
            last[event.op] = number
            if not event.asynchronous:
                last["blocking"] = number
    return before


@dataclass(frozen=True)
class _Cut:
    """How the tensor was cut: the chunk of each message, how many there are, all elements."""

    chunk_of: list[int]
    chunks: int
    elements: int


def _cut(
    letters: Sequence[_Letter],
    numbers: Sequence[int],
    algorithm: str,
    world_size: int,
    numel: int | None,
) -> _Cut:
    """Return which chunk each message carries."""
    lengths: dict[int, int] = {}
    for letter in letters:
        if letter.begin >= 0:
            lengths[letter.begin] = max(lengths.get(letter.begin, 0), letter.send.elements)
    places = {begin: number for number, begin in enumerate(sorted(lengths))}
    longest = max(letter.send.elements for letter in letters)
    scratch = [i for i, letter in enumerate(letters) if letter.begin < 0]
    if scratch and longest != numel and _is_ring([letters[i] for i in scratch], world_size):
        homes = _homes(letters, numbers, scratch, algorithm)
        elements = numel or max(sum(lengths.values()), world_size * longest)
        chunks = max(world_size, len(places))
    else:
        homes = dict.fromkeys(scratch, UNKNOWN if places else 0)
        elements = numel or max(sum(lengths.values()), longest)
        chunks = max(len(places), 1)
    chunk_of = [homes[i] if i in homes else places[e.begin] for i, e in enumerate(letters)]
    return _Cut(chunk_of, chunks, elements)


def _is_ring(letters: Sequence[_Letter], world_size: int) -> bool:
    """Tell whether every rank sends to one other, and following them visits all."""
    pairs = {(letter.src, letter.dst) for letter in letters}
    follower = dict(pairs)
    visited, rank = set(), 0
    while rank in follower and rank not in visited:
        visited.add(rank)
        rank = follower[rank]
    return len(pairs) == len(visited) == world_size


def _homes(
    letters: Sequence[_Letter],
    numbers: Sequence[int],
    scratch: Sequence[int],
    algorithm: str,
) -> dict[int, int]:
    """Return the chunk of each message from scratch memory.

    Its chunk is that of the rank where its chain has met everybody; in a gather, that of the
    rank where the chain began.
    """
    world_size = len({letter.src for letter in letters})
    homes: dict[int, int] = {}
    for chain in _chains(letters, numbers, scratch):
        last = letters[chain[min(len(chain), world_size - 1) - 1]].dst
        home = letters[chain[0]].src if algorithm == "all_gather" else last
        homes |= dict.fromkeys(chain, home)
    return homes


def _chains(
    letters: Sequence[_Letter], numbers: Sequence[int], scratch: Sequence[int]
) -> list[list[int]]:
    """Return the messages that pass on the same partial sum, hop by hop."""
    chains: list[list[int]] = []
    carried: dict[int, list[int]] = {}  # by rank: the chain that arrived there last
    for number in sorted({numbers[i] for i in scratch}):
        moving = [i for i in scratch if numbers[i] == number]
        sent = {letters[i].src: carried.pop(letters[i].src, None) for i in moving}
        for i in moving:
            chain = sent[letters[i].src]
            if chain is None:
                chains.append(chain := [])
            chain.append(i)
            carried[letters[i].dst] = chain
    return chains
