"""The lockstep world: values, waiting, dice, ledgers, threads, and every way to get stuck."""

import itertools
import random
import signal
import sys
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from zerolab import comm, device
from zerolab.comm import reduction
from zerolab.comm.process import slice_bounds
from zerolab.errors import DeadlockError, MismatchError, PeerError, UsageError

WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def inputs(world_size, numel, dtype, seed=0):
    """One tensor a rank, all different."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return list(torch.randint(-99, 99, (world_size, numel), generator=generator, dtype=dtype))
    return list(torch.randn(world_size, numel, generator=generator).to(dtype))


def expected_reduction(tensors, op):
    """The rule, written slowly: rank order, fp32 for floats below fp64, one rounding."""
    dtype = tensors[0].dtype
    wide = [t.float() if dtype in (torch.bfloat16, torch.float16) else t.clone() for t in tensors]
    if op == "max":
        return torch.stack(wide).max(0).values.to(dtype)
    total = wide[0]
    for tensor in wide[1:]:
        total = total + tensor
    return (total / len(wide) if op == "avg" else total).to(dtype)


CASES = [
    pytest.param(dtype, op, id=f"{dtype}-{op}".removeprefix("torch."))
    for dtype in DTYPES
    for op in ("sum", "avg", "max")
    if op != "avg" or dtype.is_floating_point
]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_all_reduce_matches_the_rule_on_every_rank(world_size, dtype, op):
    given_tensors = inputs(world_size, 7, dtype)

    def reduce():
        tensor = given_tensors[comm.get_rank()].clone()
        comm.all_reduce(tensor, op)
        return tensor

    want = expected_reduction(given_tensors, op)
    for got in comm.run(reduce, world_size=world_size):
        assert torch.equal(got, want)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_reduce_scatter_is_a_slice_of_all_reduce(world_size, dtype, op, in_place):
    given_tensors = inputs(world_size, 5 * world_size, dtype)

    def reduce():
        rank, tensor = comm.get_rank(), given_tensors[comm.get_rank()].clone()
        output = tensor[5 * rank : 5 * rank + 5] if in_place else torch.empty(5, dtype=dtype)
        comm.reduce_scatter(output, tensor, op)
        return output

    want = expected_reduction(given_tensors, op)
    assert torch.equal(torch.cat(comm.run(reduce, world_size=world_size)), want)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_lays_shards_end_to_end(world_size, in_place, asynchronous):
    shards = inputs(world_size, 3, torch.bfloat16)

    def gather():
        rank = comm.get_rank()
        full = torch.zeros(3 * world_size, dtype=torch.bfloat16)
        shard = shards[rank].clone()
        if in_place:
            shard = full[3 * rank : 3 * rank + 3].copy_(shard)
        comm.all_gather(full, shard, async_op=asynchronous).wait()
        return full

    for got in comm.run(gather, world_size=world_size):
        assert torch.equal(got, torch.cat(shards))


@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_copies_the_source_and_leaves_it_alone(src):
    def copy():
        tensor = torch.full((2, 3), float(comm.get_rank()))
        work = comm.broadcast(tensor, src, async_op=True)
        before = tensor.clone()
        work.wait()
        return before, tensor

    for rank, (before, tensor) in enumerate(comm.run(copy, world_size=3)):
        assert torch.equal(tensor, torch.full((2, 3), float(src)))
        assert torch.isfinite(before).all() == (rank == src)


def test_ring_of_messages_passes_tensors_on():
    def pass_on():
        rank, size = comm.get_rank(), comm.get_world_size()
        mine, theirs = torch.tensor([rank]), torch.tensor([-1])
        sent = comm.send(mine, (rank + 1) % size, async_op=True)
        mine.fill_(99)  # sent is what the tensor was at the call
        comm.recv(theirs, (rank - 1) % size)
        sent.wait()
        return theirs.item()

    assert comm.run(pass_on, world_size=4) == [3, 0, 1, 2]


def test_outside_a_run_the_world_is_one_rank_and_the_same_code():
    tensor, output = torch.tensor([1.0, 2.0]), torch.empty(2)
    comm.all_reduce(tensor, "avg")
    comm.reduce_scatter(output, tensor)
    comm.all_gather(tensor, output)
    comm.barrier()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_world()) == (0, 1, "solo")
    assert tensor.tolist() == output.tolist() == [1.0, 2.0]


def test_parameters_that_require_grad_are_written_in_place():
    def reduce():
        weight = torch.nn.Parameter(torch.ones(3))
        comm.all_reduce(weight)
        return weight.requires_grad, weight.tolist()

    assert comm.run(reduce, world_size=2) == [(True, [2.0, 2.0, 2.0])] * 2


@settings(deadline=None)
@given(numel=st.integers(0, 10_000), world_size=st.integers(1, 64))
def test_slices_cover_everything_once_and_in_order(numel, world_size):
    bounds = slice_bounds(numel, world_size)
    assert len(bounds) == world_size
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) == -(-numel // world_size)


# ---------------------------------------------------------------- waiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_result_is_unusable_until_wait(dtype):
    def reduce():
        tensor = torch.ones(4, dtype=dtype)
        work = comm.all_reduce(tensor, async_op=True)
        before = tensor.clone()
        work.wait()
        work.wait()
        return before, tensor

    poison = torch.iinfo(dtype).max if dtype == torch.int64 else float("nan")
    for before, after in comm.run(reduce, world_size=2):
        assert torch.equal(
            before.double().nan_to_num(), torch.full((4,), poison).double().nan_to_num()
        )
        assert after.tolist() == [2, 2, 2, 2]


def test_forgotten_wait_leaves_nan():
    def forget():
        full = torch.zeros(6)
        comm.all_gather(full, torch.ones(3), async_op=True)
        comm.barrier()
        return full.isnan().all().item()

    assert comm.run(forget, world_size=2) == [True, True]


def test_launching_never_switches_and_works_may_be_waited_for_in_any_order():
    trail = []

    def launch():
        rank = comm.get_rank()
        first, second = torch.tensor([1.0]), torch.tensor([10.0])
        works = [comm.all_reduce(t, async_op=True) for t in (first, second)]
        trail.append(("launched", rank))
        for work in works if rank else reversed(works):
            work.wait()
        trail.append(("waited", rank))
        return first.item(), second.item()

    assert comm.run(launch, world_size=3) == [(3.0, 30.0)] * 3
    assert [what for what, _ in trail] == ["launched"] * 3 + ["waited"] * 3
    assert [rank for _, rank in trail[:3]] == [0, 1, 2]


def test_inputs_are_taken_at_the_call():
    def overwrite():
        tensor, output = torch.full((2,), comm.get_rank() + 1.0), torch.empty(1)
        work = comm.reduce_scatter(output, tensor, async_op=True)
        tensor.fill_(1000.0)
        work.wait()
        return output.item()

    assert comm.run(overwrite, world_size=2) == [3.0, 3.0]


# ---------------------------------------------------------------- one process, many ranks


def test_every_rank_has_dice_of_its_own():
    def draw(calls):
        rolls = []
        for _ in range(calls[comm.get_rank()]):
            rolls += [torch.rand(1).item(), random.random(), np.random.rand()]
        comm.barrier()
        return [*rolls, torch.rand(1).item(), random.random(), np.random.rand()]

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    results = comm.run(draw, world_size=3, args=((2, 0, 1),))
    assert results[0][:3] == results[1][:3] == results[2][:3]
    assert results[0][:6] == results[2][:6]
    assert torch.rand(1).item() == results[0][0], "the caller's dice were rolled"


def test_ledgers_do_not_see_scratch_and_keep_to_their_rank():
    def measure():
        full, shard = torch.ones(4000), torch.empty(1000)
        gpu = device.current()
        before, peak = gpu.allocated_bytes, gpu.peak_bytes
        work = comm.reduce_scatter(shard, full, async_op=True)
        other = comm.all_reduce(full, async_op=True)
        work.wait()
        other.wait()
        comm.all_gather(full, shard)
        return before, gpu.allocated_bytes - before, gpu.peak_bytes - peak

    assert comm.run(measure, world_size=4) == [(20_000, 0, 0)] * 4


def test_each_call_is_one_record_with_the_callers_line():
    def record():
        comm.all_gather(torch.zeros(6, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16))
        comm.barrier()
        comm.all_reduce(torch.zeros(5), async_op=True, purpose="control").wait()
        return comm.records()

    first_line = record.__code__.co_firstlineno + 1
    for rank, records in enumerate(comm.run(record, world_size=2)):
        gather, barrier, reduce = records.collectives
        assert (gather.op, gather.elements, gather.nbytes, gather.dtype) == (
            *("all_gather", 6, 12),
            "bfloat16",
        )
        assert gather.where == f"test_comm_lockstep.py:{first_line}"
        assert (barrier.op, barrier.elements, barrier.purpose) == ("barrier", 0, "control")
        assert (reduce.seq, reduce.asynchronous, reduce.purpose) == (2, True, "control")
        assert (records.rank, records.world_size) == (rank, 2)


def test_reports_reach_the_caller():
    seen = []
    comm.run(lambda: comm.report(comm.get_rank()), world_size=3, on_report=seen.append)
    assert seen == [0, 1, 2]


def test_first_rank_runs_in_the_calling_thread_and_no_thread_is_left():
    before = threading.active_count()
    idents = comm.run(threading.get_ident, world_size=3)
    assert idents[0] == threading.get_ident() and len(set(idents)) == 3
    assert threading.active_count() == before


def test_one_intra_op_thread_inside_and_the_callers_number_after():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert comm.run(torch.get_num_threads, world_size=2) == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_four_ranks_reach_their_first_collective_in_milliseconds():
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        comm.run(comm.barrier, world_size=4)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05


# ---------------------------------------------------------------- getting stuck


def early_return():
    if comm.get_rank() == 2:
        return
    comm.all_reduce(torch.ones(3))


def test_rank_that_returns_early_is_named_at_once():
    with pytest.raises(DeadlockError) as caught:
        comm.run(early_return, world_size=3)
    text = str(caught.value)
    assert "rank 2 returned" in text and "ranks 0 and 1 wait" in text
    assert "all_reduce #0 (sum, 3 float32)" in text
    assert "comm.all_reduce(torch.ones(3))" in text and "test_comm_lockstep.py:" in text
    assert [row.state for row in caught.value.table] == ["waiting", "waiting", "returned"]


@pytest.mark.parametrize("what", ["op", "shape", "dtype", "reduction", "source"])
def test_different_calls_are_a_mismatch_with_both_lines(what):
    def differ():
        odd, tensor = comm.get_rank() == 1, torch.ones(4)
        if what == "op" and odd:
            return comm.broadcast(tensor)
        if what == "shape" and odd:
            return comm.all_reduce(torch.ones(5))
        if what == "dtype" and odd:
            return comm.all_reduce(torch.ones(4, dtype=torch.int32))
        if what == "reduction" and odd:
            return comm.all_reduce(tensor, "max")
        if what == "source":
            return comm.broadcast(tensor, comm.get_rank())
        return comm.all_reduce(tensor)

    with pytest.raises(MismatchError, match="rank 1 called") as caught:
        comm.run(differ, world_size=2)
    assert [row.where.split(":")[0] for row in caught.value.table] == ["test_comm_lockstep.py"] * 2
    assert caught.value.table[0].detail != caught.value.table[1].detail


def test_circle_of_sends_is_a_deadlock():
    def send_first():
        right = (comm.get_rank() + 1) % 3
        comm.send(torch.ones(1), right)
        comm.recv(torch.ones(1), (comm.get_rank() - 1) % 3)

    with pytest.raises(DeadlockError, match=r"send #0 \(to rank 1"):
        comm.run(send_first, world_size=3)


def test_message_of_another_size_is_a_mismatch():
    def talk():
        if comm.get_rank():
            comm.recv(torch.ones(2), 0)
        else:
            comm.send(torch.ones(3), 1)

    with pytest.raises(MismatchError, match=r"3 float32.*2 float32"):
        comm.run(talk, world_size=2)


def test_users_error_keeps_its_type_and_names_the_rank():
    class MyError(Exception):
        pass

    peers = []

    def fail():
        if comm.get_rank() == 1:
            raise MyError("mine")
        try:
            comm.barrier()
        except PeerError as error:
            peers.append(str(error))
            raise

    with pytest.raises(MyError, match="mine") as caught:
        comm.run(fail, world_size=3)
    note = "\n".join(caught.value.__notes__)
    assert "raised by rank 1" in note and "barrier #0" in note
    assert len(peers) == 2 and all("rank 1 raised MyError: mine" in text for text in peers)


def test_out_of_memory_comes_before_other_errors():
    def fail():
        if comm.get_rank() == 0:
            raise ValueError("a consequence")
        torch.empty(2**20)

    with pytest.raises(torch.OutOfMemoryError):
        comm.run(fail, world_size=2, gpu_memory="1MiB")


@pytest.mark.parametrize("looping", [0, 1])
def test_endless_loop_ends_at_the_timeout_and_names_rank_and_line(looping):
    def loop():
        while comm.get_rank() == looping:
            pass
        comm.barrier()

    before, start = threading.active_count(), time.perf_counter()
    with pytest.raises(TimeoutError, match=f"rank {looping} was still computing") as caught:
        comm.run(loop, world_size=2, timeout=0.2)
    assert isinstance(caught.value, comm.RunTimeoutError)
    assert caught.value.table[looping].where.startswith("test_comm_lockstep.py:")
    assert time.perf_counter() - start < 20  # not for ever: a busy machine takes its time
    assert threading.active_count() == before


@pytest.mark.parametrize("running", [0, 1])
def test_ctrl_c_ends_all_ranks(running):
    def wait_for_ctrl_c():
        if comm.get_rank() == running:
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
            while True:
                time.sleep(0.01)
        comm.barrier()

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        comm.run(wait_for_ctrl_c, world_size=3)
    limit = time.perf_counter() + 20  # the timer's own thread ends a moment later
    while threading.active_count() > before and time.perf_counter() < limit:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert comm.run(comm.get_rank, world_size=2) == [0, 1]


def test_ranks_cannot_start_ranks():
    with pytest.raises(UsageError, match="ranks cannot start ranks"):
        comm.run(lambda: comm.run(comm.get_rank), world_size=2)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size 0"),
        ({"world_size": -1}, "world_size -1"),
        ({"world_size": 2.0}, "world_size 2.0"),
        ({"world_size": True}, "world_size True"),
        ({"world_size": 65}, "world_size 65"),
        ({"world": "mpi"}, "world 'mpi'"),
        ({"timeout": 0}, "timeout 0"),
        ({"gpu_memory": "1MiB", "ledger": False}, "needs the ledger"),
    ],
)
def test_impossible_runs_are_refused(arguments, text):
    with pytest.raises(UsageError, match=text):
        comm.run(comm.get_rank, **arguments)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: comm.all_reduce(torch.ones(2), "mean"), "op 'mean'"),
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.int64), "avg"), "'avg' on int64"),
        (lambda: comm.all_reduce(torch.ones(4, 4).t()), "not contiguous"),
        (lambda: comm.all_gather(torch.ones(3), torch.ones(2)), "output has 3 elements"),
        (lambda: comm.reduce_scatter(torch.ones(2), torch.ones(2).half()), "input is float16"),
        (lambda: comm.broadcast(torch.ones(2), 1), "src 1 is no rank"),
        (lambda: comm.all_reduce(torch.ones(2), purpose="fun"), "purpose 'fun'"),
    ],
)
def test_impossible_calls_are_refused(call, text):
    with pytest.raises(UsageError, match=text):
        call()


def test_sharded_tensor_is_refused_and_not_read():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="has no memory"):
        comm.all_reduce(tensor)


def test_tensor_with_too_little_memory_is_refused_and_not_written():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(4)  # elements, where bytes are meant
    with pytest.raises(UsageError, match="memory of 4 bytes, and needs 16"):
        comm.all_reduce(tensor)


def test_works_hold_the_callers_tensors_until_wait():
    def hold():
        gpu = device.current()
        shard = torch.empty(500)
        work = comm.reduce_scatter(shard, torch.ones(1000), async_op=True)
        while_running = gpu.allocated_bytes
        work.wait()
        return while_running, gpu.allocated_bytes

    assert comm.run(hold, world_size=2) == [(6000, 2000)] * 2


def test_a_run_ends_under_a_debugger():
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        assert comm.run(comm.get_rank, 2, "lockstep") == [0, 1]
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("divisor", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dividing_by_a_product_changes_no_bit(divisor, dtype):
    smallest = torch.finfo(dtype).tiny
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, 3.0, -1e30, float("inf")])]).to(dtype)
    values = torch.cat([values, values[:50] * smallest])  # numbers that lose digits
    expected = values / divisor
    reduction.divide(values, divisor)
    assert torch.equal(values, expected)
