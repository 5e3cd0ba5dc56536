"""Chapter 0: the virtual GPU, a memory of fixed size that every tensor of a rank must fit into.

Owns a ledger. One `TorchDispatchMode` sees each operation that the rank's thread runs, in
forward, hooks, backward, recomputation and optimizers alike, because all of them end at
torch's dispatcher. Before an operation its arguments are looked at (inputs made elsewhere
are counted, empty storages of sharded units are refused), after it its results are: a
storage not seen before is an allocation. The operation has run by then, which is fine while
the virtual memory is smaller than the real one.

Two things never reach the dispatcher: `UntypedStorage.resize_`, which `resize.py` watches,
and memory that kernels use internally, which no ledger of tensors can see.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import Records
from . import active, requests, resize, sharded, tensor_cores
from .ledger import UNCOUNTED, Block, Ledger
from .scopes import PausedScope, PhaseScope, TagScope

if TYPE_CHECKING:
    from .host import HostLedger

_LISTS = (list, tuple)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_op_names: dict[Any, str] = {}


def op_name(func: Any) -> str:
    """Name an operation as records do: `"aten.mm"`."""
    name = _op_names.get(func)
    if name is None:
        name = _op_names[func] = str(func.overloadpacket)
    return name


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Give the dense tensors that hold a sparse one, which has no storage of its own."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return ()


class VirtualGPU(TorchDispatchMode, Ledger):
    """A GPU that exists only as an account of bytes. `with gpu:` makes it the thread's own.

    Entering it again inside, in the same thread, changes nothing. Under `FakeTensorMode` enter
    that mode first and the GPU inside it.

    Attributes:
        capacity: bytes it has, None for no limit.
        index: its number, equal to the rank.
        records: timeline and marks of this GPU.
        allocated_bytes: bytes held now.
        peak_bytes: the most held since the last `reset_peak`.
    """

    def __init__(
        self,
        capacity: int | str | None = None,
        *,
        index: int = 0,
        records: Records | None = None,
        timeline: bool = True,
        device_type: str = "cpu",
        began: float | None = None,
    ) -> None:
        """Make an empty GPU.

        Args:
            capacity: bytes, or a text such as `"160MiB"`; None for no limit.
            index: its number, shown in messages.
            records: where to write; None for new ones.
            timeline: whether to keep every event in `records.memory`.
            device_type: which tensors it holds: "cpu" when the GPU is virtual, "cuda" when
                it keeps the books of a real one. Others, such as meta tensors, are not counted.
            began: `time.perf_counter()` when the run began, the same for all its ranks, so that
                their times can be compared; None for now.

        Raises:
            UsageError: the capacity is no size.
        """
        TorchDispatchMode.__init__(self)
        Ledger.__init__(self, capacity, index, records, timeline, began)
        self.device_type = device_type
        self.pauses = 0
        self.host_scopes = 0  # how many `host.on_host` the thread is inside of
        self.host: HostLedger | None = None  # made by `host.host` when first asked for
        self._entered: list[
            tuple[VirtualGPU | None, int]
        ] = []  # each `with`: GPU and pauses before
        resize.watch(self)

    # What a user calls.

    def tag(self, kind: str) -> TagScope:
        """Count what is allocated inside as of this kind."""
        return TagScope(self, kind)

    def in_phase(self, name: str) -> PhaseScope:
        """Be in a phase inside, and in the one before afterwards."""
        return PhaseScope(self, name)

    def paused(self) -> PausedScope:
        """Count nothing that is born inside, ever, unless `set_kind` asks for it."""
        return PausedScope(self)

    def set_phase(self, name: str) -> None:
        """Enter a phase; at "backward" what forward left alive becomes "activation"."""
        if name == "backward" and self.phase != "backward":
            self._forward_survivors_are_activations()
        self.phase = name

    def set_kind(self, tensor: torch.Tensor, kind: str) -> None:
        """Re-classify the storage of a tensor, counting it if it was not counted so far.

        Raises:
            torch.OutOfMemoryError: it was not counted so far and does not fit.
        """
        self.count(tensor.untyped_storage(), kind)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count a storage that was not seen so far: it is somebody else's memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            self.admit(storage, "ignore", UNCOUNTED)

    def name_storage(self, tensor: torch.Tensor, name: str) -> None:
        """Say which unit a storage belongs to: using it while it is empty raises and names it."""
        storage = tensor.untyped_storage()
        block = self.live.get(storage._cdata) or self.admit(
            storage, "name_storage", UNCOUNTED if self.pauses else "input"
        )
        block.name = name
        block.closed = not storage.nbytes()

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its new size; called by the watch on `UntypedStorage.resize_`.

        Raises:
            torch.OutOfMemoryError: the growth does not fit; nothing is counted.
        """
        is_mine = storage.device.type in {self.device_type, "meta"} and not self.pauses
        if storage._cdata in self.live or is_mine:
            super().storage_resized(storage)

    # What torch calls.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have no wrapper against torch.compile around each operation; see the end of the file."""
        return False

    def __enter__(self) -> "VirtualGPU":
        """Become the GPU of the calling thread."""
        outer = active.current()
        self._entered.append((outer, self.pauses))
        if outer is not self:
            TorchDispatchMode.__enter__(self)
            self.pauses = 0
            if outer is not None:
                outer.pauses += 1  # one operation runs on one GPU: the innermost
        active.activate(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the thread back to the GPU before, if any."""
        active.deactivate(self)
        outer, pauses = self._entered.pop()
        if outer is not self:
            TorchDispatchMode.__exit__(self, exc_type, exc_value, traceback)
            self.pauses = pauses
            if outer is not None:
                outer.pauses -= 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments, run the operation, look at the results."""
        if (args and type(args[0]) is list) or func is requests.RESIZE:
            self._refuse_excess(func, args, kwargs)
        self._look_at_arguments(args, func)
        if kwargs:
            self._look_at_arguments(kwargs.values(), func)
        out = self._compute(func, args, kwargs or {})
        if func.is_view:  # no new storage: more than half of all operations end here
            return out
        try:
            self._look_at_results(out, func)
        except torch.OutOfMemoryError as error:
            out = None  # the traceback keeps this frame; it must not keep the tensor as well
            raise error.with_traceback(None) from None
        return out

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if tensor_cores.KERNELS and func in tensor_cores.KERNELS:
                return tensor_cores.in_fp32(func, args, kwargs)
            return func(*args, **kwargs)
        except RuntimeError as error:
            if sharded.is_about_size(error):
                self._explain(args, func, error)
            raise

    def _look_at_arguments(self, values: Iterable[Any], func: Any) -> None:
        live = self.live
        for value in values:
            if isinstance(value, torch.Tensor):
                try:
                    block = live.get(value.untyped_storage()._cdata)
                except NotImplementedError:
                    self._look_at_arguments(_parts(value), func)
                    continue
                if block is None or block.closed:
                    self._unusual_argument(value, block, func)
            elif type(value) in _LISTS and value and type(value[0]) is not int:
                self._look_at_arguments(value, func)

    def _unusual_argument(self, tensor: torch.Tensor, block: Block | None, func: Any) -> None:
        if block is not None:
            if tensor.numel() and not sharded.is_harmless(func):
                raise sharded.refusal(block.name, func)
        elif func is _LIFT_FRESH:  # `torch.tensor(data)` hands over what it has just made
            self._new_result(tensor, tensor.untyped_storage(), "aten.tensor")
        elif not self._holds(tensor):
            self.ignore(tensor)
        elif not self.pauses:
            self.admit(tensor.untyped_storage(), op_name(func), "input")

    def _look_at_results(self, out: Any, func: Any) -> None:
        if isinstance(out, torch.Tensor):
            try:
                storage = out.untyped_storage()
            except NotImplementedError:
                self._look_at_results(_parts(out), func)
                return
            block = self.live.get(storage._cdata)
            if block is None:
                self._new_result(out, storage, op_name(func))
            elif block.nbytes != storage.nbytes():
                self.resize(block, storage.nbytes(), op_name(func))
        elif isinstance(out, _LISTS):
            for value in out:
                self._look_at_results(value, func)

    def _new_result(self, tensor: torch.Tensor, storage: torch.UntypedStorage, op: str) -> None:
        is_mine = not self.pauses and self._holds(tensor)
        self.admit(storage, op, None if is_mine else UNCOUNTED)
        if self.host_scopes and self.host is not None:
            self.host.admit(storage, op, self.tagged)

    def _holds(self, tensor: torch.Tensor) -> bool:
        if self.device_type == "cpu":
            return tensor.is_cpu
        return tensor.device.type == self.device_type

    def _explain(self, values: Iterable[Any], func: Any, error: RuntimeError) -> None:
        """Name the unit when torch found a storage too small for a view."""
        for value in values:
            if isinstance(value, torch.Tensor):
                block = self.live.get(value.untyped_storage()._cdata)
                if block is not None and block.closed:
                    raise sharded.refusal(block.name, func) from error

    def _refuse_excess(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        if not self.pauses:
            nbytes = requests.bytes_asked(func, args, kwargs, self.device_type)
            self.check_room(nbytes, op_name(func))


# torch.compile must neither compile the bookkeeping nor what it calls. Torch's own way to say so
# wraps every call in two functions (3 us an operation); marking the code costs nothing.
_SKIP = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(
    VirtualGPU.__torch_dispatch__.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP)
)
