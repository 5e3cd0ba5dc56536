"""Chapter 2: ranks as processes with a GPU each: NCCL's own collectives.

Owns the list of kernels that are on their way. NCCL's reduce-scatter moves what it should and is
far faster than anything composed, so here the seam is thin. Two things differ from gloo: sums
are in NCCL's order, so values agree within a tolerance and not bit for bit; and waiting holds
the stream, not the host, so the watchdog asks the kernels.
"""

import time
from collections import deque

import torch
import torch.distributed as dist

from .group import Call, Work
from .process import HISTORY, ProcessGroup, ProcessWork, flat_view
from .stores import Store

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class NcclGroup(ProcessGroup):
    """The same on NVIDIA GPUs, with NCCL's own collectives. Sums are in NCCL's order."""

    world = "nccl"
    host_waits = False  # the stream waits; the host goes on and may call more

    def __init__(self, pg: dist.ProcessGroup, store: Store, epoch: int = 0) -> None:
        """Remember also which kernels are on their way."""
        super().__init__(pg, store, epoch)
        self._running: deque[tuple[Call, float, dist.Work]] = deque()

    def blocked(self) -> tuple[Call, float] | None:
        """Return the oldest kernel that has not finished."""
        while self._running and self._running[0][2].is_completed():
            self._running.popleft()
        return self._running[0][:2] if self._running else None

    def end_step(self) -> None:
        """Nothing to agree on: NCCL's kernels match by their order."""

    def _expects(self, call: Call) -> bool:
        """Every call is one kernel, expected or not."""
        return False

    def _reduce_scatter(self, call: Call) -> Work:
        """One NCCL kernel, the average included."""
        op, out, flat = _REDUCE_OPS[call.reduction], flat_view(call.output), flat_view(call.tensor)
        return self._one(call, dist.reduce_scatter_single(out, flat, op=op, async_op=True))

    def _all_gather(self, call: Call) -> Work:
        """One NCCL kernel."""
        out, flat = flat_view(call.output), flat_view(call.tensor)
        return self._one(call, dist.all_gather_single(out, flat, async_op=True))

    def _all_reduce(self, call: Call) -> Work:
        """One NCCL kernel."""
        op = _REDUCE_OPS[call.reduction]
        return self._one(call, dist.all_reduce(flat_view(call.tensor), op=op, async_op=True))

    def _broadcast(self, call: Call) -> Work:
        """One NCCL kernel."""
        tensor = flat_view(call.tensor if call.output is None else call.output)
        return self._one(call, dist.broadcast(tensor, call.peer, async_op=True))

    def _barrier(self, call: Call) -> Work:
        """Hold the host too, as on gloo: NCCL alone would only hold the stream."""
        flag = torch.zeros(1, device=f"cuda:{torch.cuda.current_device()}")
        work = self._one(call, dist.all_reduce(flag, async_op=True))
        work.wait()
        torch.cuda.current_stream().synchronize()
        return work

    def _send(self, call: Call) -> Work:
        """NCCL matches messages by their order."""
        return self._one(call, dist.isend(flat_view(call.tensor), call.peer))

    def _recv(self, call: Call) -> Work:
        """NCCL matches messages by their order."""
        return self._one(call, dist.irecv(flat_view(call.output), call.peer))

    def _one(self, call: Call, handle: dist.Work | None) -> Work:
        """Wrap one handle of torch.distributed."""
        if handle is None:
            return ProcessWork(self, call, [])
        self._running.append((call.without_tensors(), time.perf_counter(), handle))
        if len(self._running) > HISTORY:
            self.blocked()  # forgets those that have finished
        return ProcessWork(self, call, [handle])
