"""Chapter 12: joining the ranks that a launcher started: torchrun, `zerolab launch`, or by hand.

Owns what must happen when such a process ends: its peers learn whether it returned or raised.
A launcher says who is who in five environment variables; they come together or not at all.
Phases: read them, initialise torch.distributed (or adopt what a script initialised itself),
watch, and say farewell.
"""

import atexit
import os
import sys
import time
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ..errors import DeadlockError, UsageError
from . import current, watch
from .process import ProcessGroup

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXIT_CODE = 4  # of a process whose run can never end


def init_process_group() -> None:
    """Join the ranks of this run, if there are any; call it once, as early as you like.

    Inside `comm.run` there is nothing to do. Where a script has initialised torch.distributed,
    its group is used. Under a launcher the group is made. Otherwise the process stays alone.

    Raises:
        UsageError: the environment is half set, or the port is taken.
    """
    if current.of_thread() is not None:
        return
    if not dist.is_initialized():
        if not _launched():
            return
        _initialise()
    group = current.of_process()
    if group.watcher is None and group.world_size > 1:
        _watch(group)


def _launched() -> bool:
    """Tell whether a launcher started this process; refuse a half set environment."""
    missing = [name for name in REQUIRED if name not in os.environ]
    if missing and "RANK" in os.environ:
        raise UsageError(
            f"RANK is set but {', '.join(missing)} not: a launcher sets all of "
            f"{', '.join(REQUIRED)}; start with torchrun, or unset RANK"
        )
    return not missing


def _number(name: str) -> int:
    """Read a whole number from the environment."""
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"{name} {text!r} is no whole number: let a launcher set it")
    return int(text)


def _initialise() -> None:
    """Make torch.distributed's default group from the environment."""
    rank, world_size, port = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    if rank >= world_size:
        raise UsageError(f"RANK {rank} is too large for WORLD_SIZE {world_size}: ranks start at 0")
    backend = choose_backend(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(
                f"MASTER_PORT {port} is in use on {os.environ['MASTER_ADDR']}: another run has "
                "it; choose another port"
            ) from None
        raise


def choose_backend(ranks_here: int) -> str:
    """Return "nccl" where every local rank has a GPU, else "gloo"; $ZEROLAB_WORLD decides first."""
    wanted = os.environ.get("ZEROLAB_WORLD", "")
    if wanted in ("gloo", "nccl"):
        return wanted
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "nccl" if enough else "gloo"


def destroy_process_group() -> None:
    """Leave the ranks, in good order: the others see that this one returned."""
    if dist.is_initialized():
        _farewell("returned", "")
        current.set_process_group(None)
        dist.destroy_process_group()


def _watch(group: ProcessGroup) -> None:
    """Start the watchdog, and say farewell to the peers however this process ends."""
    watch.start(group, lambda states: _give_up(watch.error_of(group.rank, states)))
    atexit.register(_farewell, "returned", "")
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        _farewell("raised", f"{kind.__name__}: {error}".splitlines()[0])
        if isinstance(error, DeadlockError):
            _give_up(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def _farewell(state: str, detail: str) -> None:
    """Tell the peers, once, how this rank ended."""
    for group in current.adopted():
        if group.watcher is not None:
            group.watcher.farewell(state, detail)


def _give_up(error: DeadlockError) -> None:
    """End this process: no rank can go on, and the launcher ends the others."""
    sys.stdout.flush()
    group = current.adopted()[0]
    if group.watcher is None or group.watcher.is_first_to_prove():
        print(f"[rank {group.rank}] {error}", file=sys.stderr, flush=True)
    time.sleep(3 * watch.TICK_SECONDS)  # the store may live here: let the others see it too
    os._exit(EXIT_CODE)
