"""The process world: the bits of lockstep, the bytes of a ring, and every way to get stuck.

The ranks are warm processes of one pool, which all tests share.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab import comm, device
from zerolab.comm import collect, pool
from zerolab.comm.current import current
from zerolab.errors import DeadlockError, MismatchError, PeerError, RankError, UsageError

ROOT = Path(__file__).parent.parent
LIMIT = 60.0  # seconds; a run that should end by itself fails the test instead of hanging it


@pytest.fixture(autouse=True, scope="module")
def _close_pool():
    yield
    comm.close_pool()


def run(fn, world_size=2, timeout=LIMIT, **options):
    return comm.run(fn, world_size=world_size, world="gloo", timeout=timeout, **options)


# ---------------------------------------------------------------- values


def every_collective(dtypes, sizes):
    """Call everything with everything; return all results of this rank."""
    rank, size = comm.get_rank(), comm.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    results = []
    for dtype in dtypes:
        for numel in sizes:
            full = (torch.randn(numel * size, generator=generator) * 50).to(dtype)
            uneven = (torch.randn(numel, generator=generator) * 50).to(dtype)
            for op in ("sum", "max", *(["avg"] if dtype.is_floating_point else [])):
                reduced, shard, inside = uneven.clone(), full[:numel].clone(), full.clone()
                own = inside[rank * numel : (rank + 1) * numel]
                works = [
                    comm.all_reduce(reduced, op, async_op=True),
                    comm.reduce_scatter(shard, full, op, async_op=True),
                    comm.reduce_scatter(own, inside, op, async_op=True),
                ]
                for work in works if rank else reversed(works):
                    work.wait()
                results += [reduced, shard, own.clone()]
            gathered = torch.empty_like(full)
            comm.all_gather(gathered, uneven)
            comm.broadcast(uneven, size - 1)
            theirs = torch.empty_like(uneven)
            sent = comm.send(full[:numel], (rank + 1) % size, async_op=True)
            comm.recv(theirs, (rank - 1) % size)
            sent.wait()
            comm.barrier()
            results += [gathered, uneven, theirs]
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_equal_the_lockstep_world(world_size):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
    arguments = {"world_size": world_size, "args": (dtypes, (1, 7, 5003))}
    lockstep = comm.run(every_collective, **arguments)
    gloo = run(every_collective, **arguments)
    for expected, got in zip(lockstep, gloo, strict=True):
        assert len(expected) == len(got) == 5 * 3 * 12 - 3 * 3
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_one_rank_runs_the_same_code_without_traffic():
    results = run(every_collective_alone, world_size=1)
    assert results == [[[1.0, 2.0]] * 4]


def every_collective_alone():
    tensor, output, full = torch.tensor([1.0, 2.0]), torch.empty(2), torch.empty(2)
    comm.all_reduce(tensor, "avg")
    comm.reduce_scatter(output, tensor)
    comm.all_gather(full, output)
    comm.broadcast(tensor)
    comm.barrier()
    return [tensor.tolist(), output.tolist(), full.tolist(), tensor.tolist()]


class SentBytes(TorchDispatchMode):
    """Counts what c10d sends."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.others = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            if func.overloadpacket is torch.ops.c10d.send:
                self.nbytes += sum(tensor.nbytes for tensor in args[0])
            elif func.overloadpacket is not torch.ops.c10d.recv_:
                self.others.add(str(func))
        return func(*args, **(kwargs or {}))


def bytes_on_the_wire():
    full, shard = torch.ones(6000), torch.ones(6000 // comm.get_world_size())
    counts, others = [], set()
    calls = [
        lambda: comm.reduce_scatter(shard, full),
        lambda: comm.all_gather(full, shard),
        lambda: comm.all_reduce(full),
    ]
    for call in calls:
        with SentBytes() as sent:
            call()
        counts.append(sent.nbytes / full.nbytes)
        others |= sent.others
    return counts, others


@pytest.mark.parametrize("size", [2, 3])
def test_a_shard_is_sent_once_and_nothing_else(size):
    part = (size - 1) / size
    for counts, others in run(bytes_on_the_wire, size, ledger=False):
        assert counts == pytest.approx([part, part, 2 * part])
        assert not others


def test_ledger_does_not_see_scratch():
    def measure():
        full, shard = torch.ones(4000), torch.empty(2000)
        gpu = device.current()
        before, peak = gpu.allocated_bytes, gpu.peak_bytes
        comm.reduce_scatter(shard, full, async_op=True).wait()
        comm.all_reduce(full)
        comm.all_gather(full, shard)
        return before, gpu.allocated_bytes - before, gpu.peak_bytes - peak

    assert run(measure) == [(24_000, 0, 0)] * 2


def test_works_hold_the_callers_tensors_until_wait():
    def hold():
        gpu = device.current()
        shard = torch.empty(500)
        work = comm.reduce_scatter(shard, torch.ones(1000), async_op=True)
        while_running = gpu.allocated_bytes
        work.wait()
        return while_running, gpu.allocated_bytes

    assert run(hold) == [(6000, 2000)] * 2


def freed_under_a_watchers_eyes():
    """Look at what rank 0 waits for, as the watcher does, and hold on to what was seen."""
    group, seen, over = current(), [], threading.Event()

    def watch():
        while not over.is_set():
            seen.append(group.blocked())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if comm.get_rank():
        time.sleep(0.3)
    tensor = torch.ones(8)
    storage = weakref.ref(tensor.untyped_storage())
    work = comm.all_reduce(tensor, async_op=True)
    del tensor
    work.wait()
    del work
    over.set()
    watcher.join()
    return any(seen), storage() is None


def test_memory_is_free_after_a_wait_though_the_watcher_looks_at_it():
    assert run(freed_under_a_watchers_eyes)[0] == (True, True)


def test_a_rank_process_may_run_lockstep_ranks_but_no_processes():
    def nested():
        inside = comm.run(comm.get_rank, world_size=3, world="lockstep")
        try:
            comm.run(comm.get_rank, world_size=2, world="gloo")
        except UsageError as error:
            return inside, comm.get_world(), str(error)

    text = "run() was called by a rank process: ranks cannot start rank processes"
    assert run(nested) == [([0, 1, 2], "gloo", text)] * 2


def test_each_call_is_one_record():
    def record():
        comm.all_reduce(torch.ones(9000), "avg")
        comm.all_gather(torch.empty(6), torch.ones(3))
        return comm.records()

    for rank, records in enumerate(run(record)):
        assert [event.op for event in records.collectives] == ["all_reduce", "all_gather"]
        assert [event.seq for event in records.collectives] == [0, 1]
        assert records.collectives[0].where.startswith("test_comm_process.py:")
        assert (records.rank, records.world_size) == (rank, 2)


# ---------------------------------------------------------------- output, reports, dice


def test_output_comes_in_rank_order_with_the_rank(capsys):
    def talk():
        print("one")
        print("two", file=sys.stderr)
        os.write(2, b"noise from C++\n")

    run(talk)
    captured = capsys.readouterr()
    assert captured.out == "[rank 0] one\n[rank 1] one\n"
    assert captured.err == "[rank 0] two\n[rank 1] two\n"


def test_reports_arrive_while_the_run_goes_on():
    seen = []

    def report():
        if comm.get_rank() == 0:
            comm.report({"loss": 1.5})
        comm.barrier()

    run(report, on_report=seen.append)
    assert seen == [{"loss": 1.5}]


def test_ranks_start_with_the_callers_dice():
    torch.manual_seed(3)
    drawn = run(lambda: torch.rand(1).item())
    assert drawn == [torch.rand(1).item()] * 2


# ---------------------------------------------------------------- failures


class OwnError(Exception):
    """An error of this module, which travels by value."""


def test_users_error_keeps_its_type_and_shows_where():
    def fail():
        if comm.get_rank() == 1:
            raise OwnError("mine")
        comm.barrier()

    run(comm.barrier)
    start = time.perf_counter()
    with pytest.raises(OwnError, match="mine") as caught:
        run(fail)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 1" in notes and 'raise OwnError("mine")' in notes
    assert "PeerError: rank 1 raised: OwnError: mine, while rank 0 was in barrier #0" in notes
    assert time.perf_counter() - start < LIMIT / 3  # by itself, long before the timeout
    assert run(comm.get_rank) == [0, 1]


def test_out_of_memory_comes_before_other_errors():
    def fail():
        if comm.get_rank() == 0:
            raise ValueError("a consequence")
        torch.empty(2**20)

    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        run(fail, gpu_memory="1MiB")


def test_error_that_cannot_travel_is_told_in_words():
    def fail():
        error = ValueError("odd")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(RankError, match="ValueError: odd"):
        run(fail)


def test_function_that_cannot_travel_is_refused():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot travel"):
        run(lambda: lock)


def test_dead_process_is_named_with_its_exit_code_and_replaced():
    def die():
        if comm.get_rank() == 1:
            os.write(2, b"last words\n")
            os._exit(7)
        comm.barrier()

    with pytest.raises(RankError, match="rank 1 died: exit code 7") as caught:
        run(die)
    assert "last words" in str(caught.value)
    assert run(comm.get_rank) == [0, 1]


def test_a_process_that_died_before_a_call_begins_is_named_all_the_same():
    def die():
        if comm.get_rank() == 1:
            os._exit(7)
        time.sleep(0.5)  # its connection is closed by now
        comm.barrier()

    with pytest.raises(RankError, match="rank 1 died: exit code 7"):
        run(die)


# ---------------------------------------------------------------- getting stuck


def return_early():
    if comm.get_rank() != 1:
        comm.all_reduce(torch.ones(3))


def call_another():
    tensor = torch.ones(4)
    return comm.broadcast(tensor) if comm.get_rank() == 1 else comm.all_reduce(tensor)


def other_shape():
    comm.all_reduce(torch.ones(3 + comm.get_rank()))


def other_dtype():
    comm.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[comm.get_rank()]))


def send_in_a_circle():
    comm.send(torch.ones(1), 1 - comm.get_rank())
    comm.recv(torch.ones(1), 1 - comm.get_rank())


def other_message():
    if comm.get_rank():
        comm.recv(torch.ones(2), 0)
    else:
        comm.send(torch.ones(3), 1)


STUCK = {
    return_early: (DeadlockError, "rank 1 returned", "comm.all_reduce(torch.ones(3))"),
    call_another: (MismatchError, "rank 1 called broadcast #0", "comm.broadcast(tensor)"),
    other_shape: (MismatchError, "4 float32", "comm.all_reduce(torch.ones(3 + comm"),
    other_dtype: (MismatchError, "4 int32", "comm.all_reduce(torch.ones(4, dtype"),
    send_in_a_circle: (DeadlockError, "ranks 0 and 1 wait", "comm.send(torch.ones(1)"),
    other_message: (MismatchError, "3 float32", "comm.send(torch.ones(3), 1)"),
}


@pytest.mark.parametrize("fn", STUCK, ids=lambda fn: fn.__name__)
def test_stuck_ranks_end_in_a_table(fn):
    kind, said, source = STUCK[fn]
    run(comm.barrier)  # start what the case before has killed
    start = time.perf_counter()
    with pytest.raises(kind) as caught:
        run(fn)
    assert time.perf_counter() - start < LIMIT / 3  # by itself, long before the timeout
    text = str(caught.value)
    assert said in text and source in text
    assert re.search(r"test_comm_process\.py:\d+", text)
    assert "stack of rank 0" in "\n".join(caught.value.__notes__)
    assert len(caught.value.table) == 2


def test_rank_that_computes_is_no_deadlock_and_ends_at_the_timeout():
    def compute():
        while comm.get_rank() == 1:
            pass
        comm.barrier()

    run(comm.barrier)
    with pytest.raises(comm.RunTimeoutError, match="rank 1 was still computing") as caught:
        run(compute, timeout=1.5)
    assert [row.state for row in caught.value.table] == ["waiting", "computing"]
    assert "test_comm_process.py" in caught.value.table[1].where
    assert "in compute" in "\n".join(caught.value.__notes__)


def test_slow_rank_is_waited_for():
    def slow():
        if comm.get_rank() == 1:
            time.sleep(1.5)
        comm.barrier()
        return "done"

    assert run(slow) == ["done", "done"]


def test_ctrl_c_ends_the_ranks_at_once(monkeypatch):
    monkeypatch.setattr(collect, "GRACE_SECONDS", LIMIT)  # which a failed rank's peers would have

    def wait():
        comm.report("here")
        if comm.get_rank() == 0:
            comm.barrier()
        time.sleep(60)

    pressed = []

    def press(_):
        pressed.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(wait, on_report=press)
    assert time.perf_counter() - pressed[0] < LIMIT / 3
    assert not pool.the_pool().seats
    assert run(comm.get_rank) == [0, 1]


# ---------------------------------------------------------------- processes of other parents


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(text))
    return [sys.executable, str(path)]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_killing_the_parent_leaves_no_process(tmp_path):
    parent = subprocess.Popen(
        script(
            tmp_path,
            """
            import os, time
            from zerolab import comm

            def stuck():
                comm.report(os.getpid())
                if comm.get_rank() == 0:
                    comm.barrier()
                time.sleep(60)

            comm.run(stuck, world_size=2, world="gloo", on_report=lambda p: print(p, flush=True))
            """,
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.perf_counter() + 30
    while any(map(is_alive, pids)) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def launch(command, world_size, **environment):
    """Start processes as torchrun does, and return their exit codes and what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(world_size):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank, **environment}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in own.items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=env, text=True, **pipes))
    outputs = [process.communicate(timeout=60) for process in processes]
    return [process.returncode for process in processes], outputs


def test_launched_processes_join_and_a_deadlock_ends_them_with_code_4(tmp_path):
    command = script(
        tmp_path,
        """
        import time, torch
        from zerolab import comm

        comm.init_process_group()
        tensor = torch.ones(3)
        comm.all_reduce(tensor)
        print(comm.get_world(), tensor.tolist(), flush=True)
        comm.all_gather(torch.ones(4), torch.ones(2)) if comm.get_rank() else comm.barrier()
        """,
    )
    codes, outputs = launch(command, 2)
    assert codes == [4, 4], outputs
    assert all(out == "gloo [2.0, 2.0, 2.0]\n" for out, _ in outputs)
    errors = "".join(err for _, err in outputs)
    assert "mismatch: rank 0 called barrier #1, rank 1 called all_gather #1" in errors
    assert "train.py:" in errors and "comm.all_gather(torch.ones(4)" in errors


def test_half_set_environment_is_refused(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not"):
        comm.init_process_group()


def test_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = script(
            tmp_path,
            """
            from zerolab import comm
            from zerolab.errors import UsageError

            try:
                comm.init_process_group()
            except UsageError as error:
                print(error)
            """,
        )
        _, [(out, _)] = launch(command, 1, MASTER_PORT=port)
    assert f"MASTER_PORT {port} is in use" in out


def test_group_that_somebody_else_initialised_is_adopted(tmp_path):
    command = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from zerolab import comm

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        comm.init_process_group()
        print(comm.get_world(), comm.get_rank(), tensor.tolist(), comm.records().collectives[0].op)
        comm.destroy_process_group()
        print(comm.get_world())
        """,
    )
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert out == "gloo 0 [1.0, 1.0] all_reduce\nsolo\n"


# ---------------------------------------------------------------- bad input


def test_nccl_without_enough_gpus_is_refused():
    with pytest.raises(UsageError, match="world_size 64 needs as many GPUs"):
        comm.run(comm.get_rank, world_size=64, world="nccl")


def test_world_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORLD", "gloo")
    assert comm.run(comm.get_world, world_size=2) == ["gloo", "gloo"]


def test_closed_pool_leaves_no_process():
    run(comm.barrier)
    processes = [seat.process for seat in pool.the_pool().seats]
    comm.close_pool()
    assert processes and not any(process.is_alive() for process in processes)


def test_peer_error_is_what_the_innocent_see():
    def fail():
        if comm.get_rank() == 0:
            raise OwnError("first")
        try:
            comm.barrier()
        except PeerError as error:
            comm.report(str(error))
            raise

    seen = []
    with pytest.raises(OwnError):
        run(fail, on_report=seen.append)
    assert seen == ["rank 0 raised: OwnError: first, while rank 1 was in barrier #0"]
