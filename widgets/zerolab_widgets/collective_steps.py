"""Chapter 2: a collective step by step: who holds which partial sum, and what travels now.

Owns the synced state of one picture: what the ranks hold at first, the changes of each step, a
sentence a step, and the step that is shown. The data come from `rounds`, the drawing is
static/collective_steps.js. A saved notebook shows the steps as a table, and who holds what.
"""

from collections.abc import Sequence
from typing import Any

import traitlets

from zerolab.errors import UsageError

from . import messages, picture, rounds, runs, scripts, theme
from .rounds import Holdings, Message, Round

MAX_RANKS = 8  # a ring of more looks the same
TITLES = {
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
}


class CollectiveSteps(picture.Picture):
    """A ring collective, chunk by chunk, with play, step and back.

    Args:
        world_size: how many ranks, 2 to 8.
        algorithm: "reduce_scatter", "all_gather" or "all_reduce".
    """

    _esm = scripts.script("panel", "collective_steps", entry="renderSteps")
    _css = scripts.style("panel", "collective_steps")

    title = traitlets.Unicode("").tag(sync=True)
    world_size = traitlets.Int(0).tag(sync=True)
    begin = traitlets.List().tag(sync=True)  # [rank][chunk] -> ranks as bits
    whole = traitlets.List().tag(sync=True)  # [chunk] -> ranks as bits
    goals = traitlets.List().tag(sync=True)  # [rank, chunk] that must be whole at the end
    steps = traitlets.List().tag(sync=True)  # one dict a step, see `_step_state`
    at = traitlets.Int(0).tag(sync=True)  # 0: before the first step
    ranks = traitlets.List().tag(sync=True)  # how each rank looks

    def __init__(self, world_size: int = 4, algorithm: str = "all_reduce") -> None:
        rounds.check_algorithm(algorithm)
        _check_world(world_size)
        reading = rounds.Reading(rounds.ring(world_size, algorithm), world_size, world_size)
        title = f"Ring {TITLES[algorithm]} on {world_size} ranks"
        self._make(title, world_size, algorithm, reading)

    @classmethod
    def of(
        cls, run: Any, algorithm: str = "all_reduce", numel: int | None = None
    ) -> "CollectiveSteps":
        """Draw the messages of a run: what was sent, not what should have been.

        Args:
            run: the records of all ranks of a run that called `comm.send` and `comm.recv`, as
                a list of `Records` or what `lab.train` returned.
            algorithm: what it was to be: "reduce_scatter", "all_gather" or "all_reduce".
            numel: elements of the whole tensor; needed only where it goes round a ring uncut.

        Raises:
            UsageError: there are no messages, or more ranks than can be drawn.
        """
        rounds.check_algorithm(algorithm)
        ranks = runs.run_of(run).ranks
        _check_world(len(ranks))
        steps = cls.__new__(cls)
        title = f"{TITLES[algorithm].capitalize()} on {len(ranks)} ranks, as your run sent it"
        steps._make(title, len(ranks), algorithm, messages.rounds_of(ranks, algorithm, numel))
        return steps

    def _make(self, title: str, world_size: int, algorithm: str, reading: rounds.Reading) -> None:
        begin = rounds.start(world_size, reading.chunks, algorithm)
        self._rounds = reading.rounds
        self._states = rounds.history(begin, reading.rounds)
        whole = [rounds.whole(world_size, chunk, algorithm) for chunk in range(reading.chunks)]
        goals = sorted(rounds.goals(world_size, reading.chunks, algorithm))
        super().__init__(
            title=title,
            world_size=world_size,
            begin=begin,
            whole=whole,
            goals=[list(goal) for goal in goals],
            steps=step_states(reading.rounds, self._states),
            ranks=list(picture.styles(_styles(world_size)).values()),
            finding=finding(title, reading, self._states[-1], whole, goals),
        )

    def to_html(self) -> str:
        """Return what travels in each step, and who holds what at the end, as two tables."""
        says = [[str(number), step["says"]] for number, step in enumerate(self.steps, 1)]
        chunks = range(len(self.whole))
        head = ["at the end", *(f"chunk {chunk}" for chunk in chunks)]
        held = [
            [f"rank {rank}", *(sum_text(row[chunk], self.whole[chunk]) for chunk in chunks)]
            for rank, row in enumerate(self._states[-1])
        ]
        steps = picture.table(["step", "what travels"], says)
        return picture.paragraph(self.finding) + steps + picture.table(head, held)


def _check_world(world_size: int) -> None:
    """Refuse what is no world or cannot be drawn.

    Raises:
        UsageError: the world size is below 2 or above MAX_RANKS.
    """
    if not 2 <= world_size <= MAX_RANKS:
        raise UsageError(
            f"world_size={world_size} cannot be drawn: give 2 to {MAX_RANKS}; a ring of "
            "more looks the same"
        )


def _styles(world_size: int) -> dict[str, theme.KindStyle]:
    return {str(rank): theme.rank_style(rank) for rank in range(world_size)}


def step_states(steps: Sequence[Round], states: Sequence[Holdings]) -> list[dict[str, Any]]:
    """Return the steps as the script wants them.

    Returns:
        One entry a step: ``says`` in words, ``messages`` as [src, dst, chunk, adds], and
        ``cells``, what changes by it, as [rank, chunk, ranks as bits].
    """
    return [
        {
            "says": says(sent, before, number, len(steps)),
            "messages": [[m.src, m.dst, m.chunk, int(m.adds)] for m in sent],
            "cells": [
                [rank, chunk, now]
                for rank, row in enumerate(later)
                for chunk, now in enumerate(row)
                if now != before[rank][chunk]
            ],
        }
        for number, (sent, before, later) in enumerate(
            zip(steps, states, states[1:], strict=False), 1
        )
    ]


def says(sent: Round, before: Holdings, number: int, count: int) -> str:
    """Return in one sentence what travels in a step."""
    first = sent[0]
    example = f"rank {first.src} sends {_what(first, before)} to rank {first.dst}"
    example += ", which adds it" if first.adds else ", which keeps it"
    senders = len({message.src for message in sent})
    others = f"; {senders} ranks send at once" if senders > 1 else "; nobody else sends"
    return f"Step {number} of {count}: {example}{others}."


def _what(message: Message, before: Holdings) -> str:
    """Return a message's contents in words: "chunk 2 (sum of ranks 0 and 3)"."""
    if message.chunk == rounds.UNKNOWN:
        return f"{message.elements} elements"
    held = rounds.ranks_in(before[message.src][message.chunk])
    name = "the tensor" if len(before[0]) == 1 else f"chunk {message.chunk}"
    return f"{name} ({contents(held)})"


def contents(held: Sequence[int]) -> str:
    """Return whose numbers are in a chunk, in words."""
    if not held:
        return "nothing yet"
    if len(held) == 1:
        return f"the numbers of rank {held[0]}"
    *most, last = held
    return f"sum of ranks {', '.join(map(str, most))} and {last}"


def sum_text(held: int, whole: int) -> str:
    """Return a cell of the table: "0+1+2+3, whole"."""
    ranks = "+".join(map(str, rounds.ranks_in(held))) or "-"
    return f"{ranks}, whole" if held == whole else ranks


def finding(
    title: str,
    reading: rounds.Reading,
    end: Holdings,
    whole: Sequence[int],
    goals: Sequence[tuple[int, int]],
) -> str:
    """Return in words how many steps it took, who sent most, and whether the result is there."""
    sent = rounds.sent(reading.rounds)
    most = max(sent.values())
    busiest = [rank for rank, elements in sorted(sent.items()) if elements == most]
    everybody = len(busiest) == len(end)
    who = "every rank sends" if everybody else f"rank {busiest[0]} sends most,"
    times = f"{most / reading.elements:.2f}".rstrip("0").rstrip(".")
    share = "as much as the tensor" if times == "1" else f"{times} times the tensor"
    count = len(reading.rounds)
    steps = f"{count} step{'' if count == 1 else 's'}"
    return f"{title}: {steps}, {who} {share}. {_ending(end, whole, goals)}"


def _ending(end: Holdings, whole: Sequence[int], goals: Sequence[tuple[int, int]]) -> str:
    """Return in one sentence whether every goal is whole, or what is missing first."""
    for rank, chunk in goals:
        if end[rank][chunk] != whole[chunk]:
            missing = rounds.ranks_in(whole[chunk] & ~end[rank][chunk])
            if not missing:
                return f"At the end rank {rank} has more in chunk {chunk} than belongs there."
            who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks"
            return f"At the end rank {rank} lacks the numbers of {who} in chunk {chunk}."
    if len(goals) == len(end) * len(whole):
        return "At the end every rank has all of it."
    return "At the end each rank has one chunk of the sum, whole."
