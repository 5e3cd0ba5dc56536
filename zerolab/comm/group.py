"""Chapter 2: a group of ranks, as one of them sees it.

Owns the numbering of this rank's calls and, where no virtual GPU keeps them, its records. Every
world is a subclass that only says how tensors travel (`_launch`). What is the same everywhere
is here, in the order in which a call goes through it:

    check     shapes, dtypes and names, so that a mistake is a sentence and not a crash
    describe  a `Call`: what is asked, by which line of the user's source, as call number `seq`
    record    one `CollectiveEvent` a call; the parts of a composed collective are no calls
    launch    the world's own business; returns a `Work`
    end       when `wait` returned, written into the record: what was exposed, what was hidden
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import device
from ..errors import UsageError
from ..records import CollectiveEvent, Records
from . import composed, reduction, source
from .work import Work

PURPOSES = ("data", "control")


@dataclass(slots=True)
class Call:
    """One collective as one rank asks for it.

    `tensor` is what goes in and `output` what comes out; they are the same tensor for the
    in-place collectives, and None where a rank gives or gets nothing.
    """

    op: str  # "all_reduce", ..., "send", "recv"
    seq: int  # number of this collective on this rank; of the message between two ranks
    tensor: Tensor | None
    output: Tensor | None
    reduction: str = ""  # "sum", "avg", "max", or "" for collectives that do not add
    peer: int = -1  # the source of a broadcast, the partner of a send or receive
    elements: int = 0  # of the full logical tensor
    dtype: str = ""  # "float32", ...
    where: str = ""  # the user's "file:line"
    since: float = 0.0  # `time.perf_counter()` at the call
    label: str = ""  # what is sent, where the caller says so
    part_of: "Call | None" = None  # the composed collective that a message belongs to

    def without_tensors(self) -> "Call":
        """Copy what is worth remembering when the tensors may go."""
        return replace(self, tensor=None, output=None)

    def signature(self) -> tuple:
        """What all ranks must agree on."""
        if self.op in ("send", "recv"):
            whole = () if self.part_of is None else self.part_of.signature()
            return ("message", self.elements, self.dtype, *whole)
        return (self.op, self.reduction, self.peer, self.elements, self.dtype, self.label)

    def key(self, rank: int) -> str:
        """Name what this call of `rank` must meet: "7" a collective, "0>1 #7" a message."""
        if self.op == "send":
            return f"{rank}>{self.peer} #{self.seq}"
        return f"{self.peer}>{rank} #{self.seq}" if self.op == "recv" else str(self.seq)

    def describe(self) -> str:
        """Say the call in words: "all_reduce #3 (sum, 10 float32)"."""
        facts = [word for word in (self.label, self.reduction) if word]
        if self.peer >= 0:
            facts.append({"send": "to", "recv": "from"}.get(self.op, "from") + f" rank {self.peer}")
        if self.op != "barrier":
            facts.append(f"{self.elements} {self.dtype}")
        text = f"{self.op} #{self.seq}" + (f" ({', '.join(facts)})" if facts else "")
        return text if self.part_of is None else f"{text} of {self.part_of.describe()}"


class RecordedWork(Work):
    """An asynchronous call whose end is written into its record."""

    __slots__ = ("_event", "_group", "_launching", "_work")

    def __init__(
        self, group: "Group", work: Work, event: CollectiveEvent, launching: float
    ) -> None:
        """Stand for `work`; `launching` is the seconds that its launch took."""
        self._group, self._event, self._launching = group, event, launching
        self._work: Work | None = work

    def wait(self) -> None:
        """Wait for the call, then note its end."""
        if self._work is None:
            return
        began, elsewhere = time.perf_counter(), self._group.elsewhere()
        self._work.wait()
        self._work = None
        self._group.end(self._event, began - self._launching, elsewhere)


class Group(ABC):
    """The ranks of a run, seen from one of them. All ranks must call the same, in one order."""

    world: str = ""

    def __init__(self, rank: int, world_size: int) -> None:
        """Start counting calls at 0."""
        self.rank = rank
        self.world_size = world_size
        self.records = Records(rank=rank, world_size=world_size, world=self.world)
        self.began = time.perf_counter()
        self.on_report: Callable[[Any], None] | None = None
        self.ring = composed.begin_with_ring  # see `switch`
        self.line: deque[composed.ComposedWork] = deque()  # composed calls, not finished yet
        self.composing: tuple[Call, str] | None = None  # the one that runs, and its purpose
        self._seq = 0
        self._messages: dict[tuple[int, int], int] = {}

    @abstractmethod
    def _launch(self, call: Call, asynchronous: bool) -> Work:
        """Start the collective. Must not wait for other ranks when `asynchronous`."""

    def note(self, call: Call, asynchronous: bool) -> None:  # noqa: B027 (worlds may do more)
        """Take notice of a call that is launched now and carried out as messages later."""

    def release_scratch(self) -> None:  # noqa: B027 (only processes have scratch)
        """Let go of memory that calls share, where there is any."""

    def end_step(self) -> None:  # noqa: B027 (only processes compare their calls)
        """End a row of calls that will come again. All ranks must call it."""

    def elsewhere(self) -> float:
        """Return the seconds in which this rank waited for its turn: only in the lockstep world."""
        return 0.0

    def end(self, event: CollectiveEvent, began: float, elsewhere: float) -> None:
        """Write the end of a call into its record.

        Args:
            event: its record.
            began: `time.perf_counter()` when the rank began to be blocked by it.
            elsewhere: what `elsewhere()` said then.
        """
        now = time.perf_counter()
        event.end(now - self.began, now - began - (self.elsewhere() - elsewhere))

    def message_counts(self) -> list[tuple[int, int, int]]:
        """Return (src, dst, how many) for every pair with messages of this rank."""
        return [(src, dst, count) for (src, dst), count in dict(self._messages).items()]

    def all_reduce(
        self, tensor: Tensor, op: str, async_op: bool, purpose: str, label: str = ""
    ) -> Work:
        """Replace `tensor` by the reduction over all ranks."""
        _check_reduction(op, tensor)
        call = Call("all_reduce", self._number(), tensor, tensor, op, label=label)
        return self._issue(call, tensor, async_op, purpose)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: str, async_op: bool, purpose: str, label: str = ""
    ) -> Work:
        """Reduce `tensor` over all ranks and keep this rank's slice of the result."""
        _check_reduction(op, tensor)
        _check_slices("reduce_scatter", "input", tensor, "output", output, self.world_size)
        call = Call("reduce_scatter", self._number(), tensor, output, op, label=label)
        return self._issue(call, tensor, async_op, purpose)

    def all_gather(
        self, output: Tensor, tensor: Tensor, async_op: bool, purpose: str, label: str = ""
    ) -> Work:
        """Lay the `tensor` of every rank end to end in `output`."""
        _check_slices("all_gather", "output", output, "input", tensor, self.world_size)
        call = Call("all_gather", self._number(), tensor, output, label=label)
        return self._issue(call, output, async_op, purpose)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool, purpose: str) -> Work:
        """Copy the tensor of rank `src` to all ranks."""
        _check_rank("src", src, self.world_size)
        given, output = (tensor, None) if self.rank == src else (None, tensor)
        call = Call("broadcast", self._number(), given, output, peer=src)
        return self._issue(call, tensor, async_op, purpose)

    def barrier(self, purpose: str) -> None:
        """Return when every rank has called it."""
        self._issue(Call("barrier", self._number(), None, None), None, False, purpose)

    def send(self, tensor: Tensor, dst: int, async_op: bool, purpose: str) -> Work:
        """Hand a tensor to one rank; returns when that rank has received it."""
        return self._message("send", tensor, None, dst, async_op, purpose)

    def recv(self, tensor: Tensor, src: int, async_op: bool, purpose: str) -> Work:
        """Fill `tensor` with what rank `src` sends."""
        return self._message("recv", None, tensor, src, async_op, purpose)

    def _number(self) -> int:
        """Return the number of the next collective of this rank."""
        self._seq += 1
        return self._seq - 1

    def _message(
        self,
        op: str,
        tensor: Tensor | None,
        output: Tensor | None,
        peer: int,
        async_op: bool,
        purpose: str,
    ) -> Work:
        """Number, record and launch one side of a message; messages count pair by pair."""
        _check_rank("dst" if op == "send" else "src", peer, self.world_size)
        if peer == self.rank:
            raise UsageError(f"rank {peer} cannot {op} a tensor to itself: name another rank")
        composed.finish(self)  # its messages have lower numbers
        pair = (self.rank, peer) if op == "send" else (peer, self.rank)
        seq = self._messages.get(pair, 0)
        self._messages[pair] = seq + 1
        full = tensor if output is None else output
        return self._issue(Call(op, seq, tensor, output, "", peer), full, async_op, purpose)

    def _issue(self, call: Call, full: Tensor | None, async_op: bool, purpose: str) -> Work:
        """Fill in what the tensors and the stack say, record the call, launch it."""
        if full is not None:
            _check_tensors(call)
            call.elements = full.numel()
            call.dtype = dtype_name(full.dtype)
        call.where = source.caller()
        call.since = time.perf_counter()
        if self.composing is not None:
            call.part_of, purpose = self.composing
        itemsize, elsewhere = 0 if full is None else full.element_size(), self.elsewhere()
        event = self._record(call, itemsize, async_op, purpose)
        work = self._start(call, async_op, purpose)
        if async_op:
            return RecordedWork(self, work, event, time.perf_counter() - call.since)
        work.wait()
        self.end(event, call.since, elsewhere)
        return work

    def _start(self, call: Call, asynchronous: bool, purpose: str) -> Work:
        """Launch the call, as messages where that is asked for."""
        if composed.applies(self, call):
            self.note(call, asynchronous)
            return composed.ComposedWork(self, call, purpose)
        composed.finish(self)
        return self._launch(call, asynchronous)

    def _record(
        self, call: Call, itemsize: int, asynchronous: bool, purpose: str
    ) -> CollectiveEvent:
        """Append one event to the records of the virtual GPU, or of the group without one."""
        if purpose not in PURPOSES:
            raise UsageError(f"purpose {purpose!r} is unknown: use one of {', '.join(PURPOSES)}")
        gpu = device.current()
        records = self.records if gpu is None else gpu.records
        event = CollectiveEvent(
            time=call.since - self.began,
            seq=call.seq,
            op=call.op,
            elements=call.elements,
            nbytes=call.elements * itemsize,
            dtype=call.dtype,
            ranks=2 if call.op in ("send", "recv") else self.world_size,
            purpose=purpose,
            asynchronous=asynchronous,
            phase="idle" if gpu is None else gpu.phase,
            where=source.short(call.where),
            label=call.label,
            peer=call.peer,
            start=_storage_start(call),
        )
        (records.collectives if call.part_of is None else records.parts).append(event)
        return event


def _storage_start(call: Call) -> int:
    """Return where the tensor of a message begins in a longer storage; -1 for all other calls."""
    tensor = call.tensor if call.output is None else call.output
    if call.op not in ("send", "recv") or tensor is None:
        return -1
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return int(tensor.storage_offset()) if is_part else -1


_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def _check_reduction(op: str, tensor: Tensor) -> None:
    """Refuse reductions that do not exist or lose digits in silence."""
    if op not in reduction.OPS:
        raise UsageError(f"op {op!r} is unknown: use one of {', '.join(reduction.OPS)}")
    if op == "sum" and tensor.dtype == torch.bool:
        raise UsageError("op 'sum' on bool would count as or: use 'max', or cast to int64")
    if op == "avg" and not tensor.dtype.is_floating_point:
        raise UsageError(
            f"op 'avg' on {dtype_name(tensor.dtype)} would drop fractions: use 'sum' and divide"
        )


def _check_slices(
    op: str, long_name: str, full: Tensor, short_name: str, part: Tensor, world_size: int
) -> None:
    """The full tensor is world_size slices, of one dtype with the part."""
    if full.numel() != world_size * part.numel():
        raise UsageError(
            f"{op}: {long_name} has {full.numel()} elements and {short_name} {part.numel()}: "
            f"{long_name} must have world_size ({world_size}) times as many; pad it"
        )
    if full.dtype != part.dtype:
        raise UsageError(
            f"{op}: {long_name} is {dtype_name(full.dtype)} and {short_name} "
            f"{dtype_name(part.dtype)}: both must have one dtype; cast one"
        )


def _check_rank(name: str, rank: int, world_size: int) -> None:
    """A rank is a number from 0 to world_size - 1."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise UsageError(f"{name} {rank!r} is no rank: use one of 0 to {world_size - 1}")


def _check_tensors(call: Call) -> None:
    """Collectives move dense tensors that lie in one piece and have their memory."""
    for tensor in (call.tensor, call.output):
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise UsageError(
                f"{call.op}: a tensor of shape {tuple(tensor.shape)} is not contiguous: "
                "collectives need memory in one piece; call .contiguous() and copy back"
            )
        held = tensor.untyped_storage().nbytes()
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.numel() and not held:
            raise UsageError(
                f"{call.op}: a tensor of shape {tuple(tensor.shape)} has no memory: "
                "its parameters are sharded now; unshard them first"
            )
        if tensor.numel() and held < needed:
            raise UsageError(
                f"{call.op}: a tensor of shape {tuple(tensor.shape)} has a memory of {held} bytes, "
                f"and needs {needed}: give its storage bytes, elements times element_size()"
            )
