"""Chapter 0: the trace, one real training step of the engine as a tree of calls.

Owns the tree of one step on rank 0. Python's profile hook watches rank 0's thread while it
builds the engine and trains one step on lockstep ranks; only functions of the engine's modules
and collectives become nodes, and whatever the learner has plugged in. Nothing in the text
depends on time or addresses: the same engine prints the same text.

Phases: train with the hook in place, merge calls that repeat, print a line a call.
"""

import gc
import html
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from .. import bucket as buckets_
from .. import comm, data, device, engine, gpt
from ..errors import UsageError
from . import cards, plug, training

MODULES = {"ddp", "reducing", "zero1", "zero2", "zero3", "bucket", "flat", "optim", "precision"}
MODULES |= {"units", "gathering", "sharded_param", "turns", "watching", "unit_sharding"}
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "barrier"}
PACKAGE = __name__.split(".")[0]
MAX_ARGUMENTS = 72  # characters


@dataclass(slots=True)
class Node:
    """One call, or several alike in a row."""

    name: str  # "zero1.Zero1.reduce"
    yours: bool = False
    arguments: str = ""  # those that are tensors, buckets and numbers; of the first call
    result: str = ""
    held: int = 0  # bytes that the virtual GPU holds more after the calls than before
    moved: int = 0  # bytes that collectives carried inside
    calls: int = 1
    children: list["Node"] = field(default_factory=list)

    def shape(self) -> tuple[Any, ...]:
        """Return what two calls must share to be printed as one."""
        return self.name, self.yours, tuple((c.calls, c.shape()) for c in self.children)


@dataclass(frozen=True)
class Trace:
    """One step of rank 0: four moments, each with its calls."""

    stage: int
    model: str
    world_size: int
    moments: tuple[Node, ...]

    def lines(self) -> list[tuple[str, ...]]:
        """Return a row a call: the indented call, whose, bytes moved, bytes held."""
        return [row for moment in self.moments for row in _rows(moment, 0)]

    def __repr__(self) -> str:
        rows = [("call", "whose", "moved", "held"), *self.lines()]
        width = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{a:<{width[0]}}  {b:<{width[1]}}  {c:>{width[2]}}  {d:>{width[3]}}".rstrip()
            for a, b, c, d in rows
        ]
        title = f"stage {self.stage}, {self.model}, rank 0 of {self.world_size}: one step, in bytes"
        return "\n".join([title, "", *lines])

    def _repr_html_(self) -> str:
        style = f"{cards.MONO};white-space:pre;overflow-x:auto;line-height:1.35"
        return f'<pre style="{style}">{html.escape(repr(self))}</pre>'


def trace(*, stage: int = 1, depth: int = 5, model: str = "gpt-nano", dtype: str = "fp32") -> Trace:
    """Return one real training step of the engine as a tree of calls, as rank 0 made them.

    Args:
        stage: ZeRO stage, 0 to 3.
        depth: how many calls deep, from 1; what you wrote, and collectives, are
            shown at any depth.
        model: a preset of `zerolab.gpt`; small ones read best.
        dtype: "bf16" or "fp32".

    Raises:
        UsageError: a value cannot work.
    """
    if depth < 1:
        raise UsageError(f"depth={depth} shows nothing; give 1 or more")
    job = training.make_job(stage, 1, model, dtype)
    ranks = training.world_size()
    moments = comm.run(_traced_step, ranks, "lockstep", args=(job, depth))[0]
    return Trace(stage, model, ranks, moments)


# Phase 1: train with the hook in place.


def _traced_step(job: training.Job, depth: int) -> tuple[Node, ...]:
    """Train one step as one rank; rank 0 returns its moments."""
    torch.manual_seed(job.seed)
    shape = gpt.preset(job.model)
    with device.in_phase("init"):
        model = gpt.GPT(shape)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    text = data.load_text()
    tokens, targets = next(
        data.batches(text, rank, world_size, job.micro_batch_size, shape.seq_len, job.seed)
    )
    watch = Watch(depth if rank == 0 else 0)
    trainer = watch.moment("init", lambda: engine.initialize(model=model, config=job.config())[0])
    loss = watch.moment("forward", lambda: trainer(tokens, targets))
    watch.moment("backward", lambda: trainer.backward(loss))
    watch.moment("step", trainer.step)
    trainer.close()
    return tuple(watch.moments)


class Watch:
    """The hook: it turns the calls of one thread into nodes."""

    def __init__(self, depth: int) -> None:
        """Watch down to `depth` calls; 0 watches nothing."""
        self.depth = depth
        self.moments: list[Node] = []
        self.codes = plug.codes()
        self.always = self.codes | {getattr(comm, name).__code__ for name in COLLECTIVES}
        self.open: list[tuple[FrameType | None, Node]] = []

    def moment(self, name: str, run: Callable[[], Any]) -> Any:
        """Run one moment of the step and keep its tree."""
        if not self.depth:
            return run()
        node = Node(name)
        self.moments.append(node)
        self.open = [(None, node)]
        self._enter(node)
        with _no_garbage(), _profiled(self._event):
            result = run()
        self._leave(node)
        merge(node)
        return result

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        """Be called by Python for every call and return of the thread."""
        if event == "call" and (len(self.open) <= self.depth or frame.f_code in self.always):
            name = _name(frame, self.codes)
            if name:
                node = Node(name, frame.f_code in self.codes, _arguments(frame))
                self.open[-1][1].children.append(node)
                self.open.append((frame, node))
                self._enter(node)
        elif event == "return" and self.open[-1][0] is frame:
            _, node = self.open.pop()
            self._leave(node)
            node.result = _show(value)

    def _enter(self, node: Node) -> None:
        held, moved = _counters()
        node.held, node.moved = -held, -moved

    def _leave(self, node: Node) -> None:
        held, moved = _counters()
        node.held += held
        node.moved += moved


def _counters() -> tuple[int, int]:
    """Return the bytes that this rank holds, and those it has moved so far."""
    gpu = device.current()
    events = comm.records().collectives
    return (gpu.allocated_bytes if gpu is not None else 0), sum(e.nbytes for e in events)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep the collector from freeing something at a moment that is only chance."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _profiled(hook: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Let Python call the hook in this thread, and whoever it called before afterwards."""
    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(before)


def _name(frame: FrameType, codes: set[CodeType]) -> str:
    """Return the name of a call that belongs into the tree, "" for any other."""
    code = frame.f_code
    package, _, module = str(frame.f_globals.get("__name__", "")).partition(".")
    if package != PACKAGE or "<" in code.co_qualname or code.co_filename.startswith("<string>"):
        return f"{module}.{code.co_name}" if code in codes else ""
    known = module in MODULES or (module == "comm" and code.co_name in COLLECTIVES)
    if not (known or code in codes) or _is_small(frame):
        return ""
    return f"{module}.{code.co_qualname}"


def _is_small(frame: FrameType) -> bool:
    """Tell whether this only reads a property, or is private to its module."""
    name = frame.f_code.co_name
    if name.startswith("_") and name != "__init__":
        return True
    owner = type(frame.f_locals.get("self"))
    return isinstance(inspect.getattr_static(owner, name, None), property)


def _arguments(frame: FrameType) -> str:
    """Return the first arguments that say something, as "name value"."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    shown = [(name, _show(frame.f_locals.get(name))) for name in names if name != "self"]
    return ", ".join(f"{name} {text}" for name, text in shown if text)[:MAX_ARGUMENTS]


def _show(value: Any) -> str:
    """Return a shape, a bucket's name and length, a number or a range; "" for anything else."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, buckets_.Bucket):
        return f"{value.name} [{value.padded_numel}]"
    if isinstance(value, torch.Size):
        return str(list(value))
    if isinstance(value, tuple) and value and all(type(part) is int for part in value):
        return str(value)
    return str(value) if type(value) is int else ""


# Phase 2: calls that repeat.


def merge(node: Node) -> None:
    """Turn calls of the same shape in a row into one node, from the leaves up."""
    kept: list[Node] = []
    for child in node.children:
        merge(child)
        if kept and kept[-1].shape() == child.shape():
            last = kept[-1]
            last.calls += child.calls
            last.held, last.moved = last.held + child.held, last.moved + child.moved
            _add_children(last, child)
        else:
            kept.append(child)
    node.children = kept


def _add_children(into: Node, other: Node) -> None:
    """Add the bytes of one subtree to those of another of the same shape."""
    for mine, theirs in zip(into.children, other.children, strict=True):
        mine.held, mine.moved = mine.held + theirs.held, mine.moved + theirs.moved
        _add_children(mine, theirs)


# Phase 3: print.


def _rows(node: Node, indent: int) -> Iterator[tuple[str, ...]]:
    call = f"{'  ' * indent}{node.name}"
    if node.arguments:
        call += f"({node.arguments})"
    if node.result:
        call += f" -> {node.result}"
    if node.calls > 1:
        call += f"  x {node.calls}"
    whose = ("yours" if node.yours else "reference") if indent else ""
    held = f"{node.held:+,}" if node.held else ""
    yield call, whose, f"{node.moved:,}" if node.moved else "", held
    for child in node.children:
        yield from _rows(child, indent + 1)
