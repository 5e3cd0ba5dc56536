"""The ledger counts every byte of every tensor exactly once, whatever happens to it."""

import gc
import json
import pickle
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolab import device
from zerolab.device import Timeline, VirtualGPU
from zerolab.errors import UsageError
from zerolab.records import Records

F32 = 4


@pytest.fixture
def gpu():
    """A virtual GPU without a limit, active in this thread."""
    with VirtualGPU() as gpu:
        yield gpu


def in_thread(work):
    """Run `work` on another thread and give its result or its exception."""
    box = []

    def body():
        try:
            box.append((work(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


# Births and deaths.


def test_views_share_one_block_which_dies_with_the_last_of_them(gpu):
    base = torch.zeros(10, 10)
    views = [base[2:], base.t(), base.view(100), base.detach()]
    assert gpu.allocated_bytes == 100 * F32
    del base
    assert gpu.allocated_bytes == 100 * F32
    while views:
        assert gpu.allocated_bytes == 100 * F32
        views.pop()
    assert gpu.allocated_bytes == 0


def test_in_place_operations_allocate_nothing(gpu):
    x = torch.ones(50)
    for operation in (x.add_, x.mul_, x.copy_):
        operation(x)
    x[3:].zero_()
    assert gpu.peak_bytes == 50 * F32


def test_temporaries_count_while_they_live(gpu):
    x = torch.ones(100)
    y = (x + 1) * 2  # x + 1 lives until the product is there
    assert gpu.allocated_bytes == 200 * F32
    assert gpu.peak_bytes == 300 * F32
    del x, y
    assert gpu.allocated_bytes == 0


def test_frees_in_any_order_add_up(gpu):
    blocks = [torch.empty(n, dtype=torch.uint8) for n in (1, 10, 100, 1000)]
    for index, left in ((1, 1101), (2, 1001), (0, 1000), (3, 0)):
        blocks[index] = None
        assert gpu.allocated_bytes == left


def test_many_results_of_one_operation_are_all_counted(gpu):
    x = torch.randn(6, 6)
    values, indices = x.max(dim=0)
    added = torch._foreach_add([x, x], 1.0)
    assert gpu.allocated_bytes == 36 * F32 + 6 * F32 + 6 * 8 + 2 * 36 * F32
    del values, indices, added


def test_dtypes_count_with_their_own_size(gpu):
    kept = [torch.zeros(8, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.float64)]
    assert gpu.allocated_bytes == 8 + 16 + 64
    del kept


def test_inputs_made_elsewhere_count_once_as_input(gpu):
    with_nobody = in_thread(lambda: torch.ones(25))  # no GPU on that thread
    assert gpu.allocated_bytes == 0
    with_nobody[1:] + 1
    torch.stack([with_nobody, with_nobody])
    torch.add(torch.zeros(()), other=with_nobody)
    assert gpu.by_kind() == {"input": 25 * F32}
    del with_nobody
    assert gpu.allocated_bytes == 0


def test_meta_and_sparse_tensors_do_not_disturb(gpu):
    meta = torch.zeros(1000, device="meta") + torch.ones(1000, device="meta")
    assert gpu.allocated_bytes == 0
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad.is_sparse
    assert gpu.allocated_bytes == 40 * F32 + 3 * 8 + 3 * 4 * F32  # table, indices, values
    del meta


# Sizes that change.


def test_storage_resize_is_counted_at_once(gpu):
    x = torch.zeros(100)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert gpu.allocated_bytes == 0
    storage.resize_(400)
    assert gpu.allocated_bytes == 400
    storage.resize_(800)
    assert gpu.allocated_bytes == 800
    del x, storage
    assert gpu.allocated_bytes == 0
    # While torch copies from the old block to the new one both are there.
    assert [event.delta for event in gpu.records.memory] == [400, -400, 400, 800, -400, -800]
    assert gpu.peak_bytes == 1200


def test_empty_storage_is_seen_when_it_grows(gpu):
    x = torch.empty(0)
    assert gpu.allocated_bytes == 0
    x.untyped_storage().resize_(64)
    assert gpu.allocated_bytes == 64
    x.resize_(32)
    assert gpu.allocated_bytes == 128
    del x
    assert gpu.allocated_bytes == 0


def test_resize_is_told_to_the_owner_whatever_thread_does_it(gpu):
    x = torch.zeros(100)

    def shrink_under_another_gpu():
        with VirtualGPU(index=1) as other:
            x.untyped_storage().resize_(40)
            return other.allocated_bytes

    assert in_thread(shrink_under_another_gpu) == 0
    assert gpu.allocated_bytes == 40


def test_resize_without_an_owner_falls_to_the_threads_gpu(gpu):
    unseen = in_thread(lambda: torch.zeros(5))
    unseen.untyped_storage().resize_(100)
    assert gpu.allocated_bytes == 100


def test_resize_patch_is_made_once_and_works_without_any_gpu():
    patched = torch.UntypedStorage.resize_
    VirtualGPU()
    assert torch.UntypedStorage.resize_ is patched
    storage = torch.zeros(4).untyped_storage()
    assert storage.resize_(8) is storage
    assert storage.nbytes() == 8


def test_swapping_data_moves_bytes_from_block_to_block(gpu):
    flat = torch.zeros(100)
    param = nn.Parameter(torch.zeros(60))
    param.data = flat[:60]
    assert gpu.allocated_bytes == 400  # the parameter's own 60 are gone
    param.data = torch.zeros(3)
    del flat
    assert gpu.allocated_bytes == 12


# Threads.


def test_death_on_another_thread_is_told_to_the_owner():
    with VirtualGPU() as gpu:
        box = [torch.zeros(100)]
    with VirtualGPU(index=1) as other:
        assert gpu.allocated_bytes == 400
        in_thread(box.clear)
        assert gpu.allocated_bytes == other.allocated_bytes == 0
    assert gpu.records.memory[-1].op == "free"


def test_each_thread_has_its_own_gpu():
    def work(index):
        with VirtualGPU(index=index) as gpu:
            kept = torch.zeros(10 * (index + 1))
            assert device.current() is gpu
            return gpu.allocated_bytes, kept

    with VirtualGPU(index=9) as mine:
        results = [in_thread(lambda index=index: work(index)) for index in range(3)]
        assert [allocated for allocated, _ in results] == [40, 80, 120]
        assert mine.allocated_bytes == 0
    assert device.current() is None


def test_concurrent_threads_leave_no_byte_behind():
    """Four threads allocate and free each other's tensors at full speed."""
    gpus = [VirtualGPU(index=index) for index in range(4)]
    shelf = [None] * 64

    def work(gpu, index):
        with gpu:
            for turn in range(400):
                shelf[(7 * turn + 13 * index) % 64] = torch.empty(1 + (turn * (index + 1)) % 50)

    threads = [threading.Thread(target=work, args=(gpu, gpu.index)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    on_shelf = sum(x.untyped_storage().nbytes() for x in shelf if x is not None)
    assert sum(gpu.allocated_bytes for gpu in gpus) == on_shelf > 0
    shelf.clear()
    for gpu in gpus:
        assert gpu.allocated_bytes == 0
        assert sum(event.delta for event in gpu.records.memory) == 0
        totals = [0, *(event.total for event in gpu.records.memory)]
        steps = [after - before for before, after in pairwise(totals)]
        assert steps == [event.delta for event in gpu.records.memory]


def test_garbage_collection_inside_an_operation_keeps_the_order(gpu):
    """Cyclic garbage that holds tensors dies at any allocation, also inside the ledger."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(30):
            cycle = [torch.zeros(10)]
            cycle.append(cycle)
            del cycle
            torch.ones(5) + 1
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert gpu.allocated_bytes == 0
    running = 0
    for event in gpu.records.memory:
        running += event.delta
        assert event.total == running


def test_hook_on_a_foreign_thread_finds_the_only_gpu(gpu):
    """On CUDA a backward runs in autograd's own threads; here a plain thread stands for one."""
    seen = []

    def backward():
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: seen.append(device.current()))
        x.sum().backward()
        return device.current()

    assert in_thread(backward) is None  # outside a backward that thread has no GPU
    assert seen == [gpu]


# Scopes.


def test_reentering_changes_nothing(gpu):
    with gpu, gpu:
        x = torch.zeros(10)
    y = torch.zeros(10)
    assert gpu.allocated_bytes == 80
    assert [event.delta for event in gpu.records.memory] == [40, 40]
    del x, y


def test_innermost_gpu_holds_what_is_allocated(gpu):
    with VirtualGPU(index=1) as inner:
        x = torch.zeros(10)
        with gpu:
            y = torch.zeros(3)
    z = torch.zeros(1)
    assert inner.allocated_bytes == 40
    assert gpu.allocated_bytes == 12 + 4
    del x, y, z


def test_paused_births_are_never_counted_unless_asked_for(gpu):
    with device.paused():
        scratch = torch.zeros(100)
        with device.paused():
            scratch += 1
    scratch += 1
    assert gpu.allocated_bytes == 0
    scratch.untyped_storage().resize_(4000)
    assert gpu.allocated_bytes == 0
    gpu.set_kind(scratch, "grad")
    assert gpu.by_kind() == {"grad": 4000}
    del scratch
    assert gpu.allocated_bytes == 0


def test_ignored_storage_is_somebody_elses_memory(gpu):
    shared = in_thread(lambda: torch.zeros(100))
    mine = torch.zeros(1)
    device.ignore(shared)
    device.ignore(mine)  # known already: nothing changes
    shared + mine
    assert gpu.allocated_bytes == 4


def test_paused_still_counts_deaths_and_resizes_of_what_was_counted(gpu):
    x, y = torch.zeros(10), torch.zeros(20)
    with gpu.paused():
        del x
        y.untyped_storage().resize_(8)
    assert gpu.allocated_bytes == 8


def test_shorthands_do_nothing_without_a_gpu():
    assert device.current() is None
    with device.tag("grad"), device.in_phase("forward"), device.paused():
        x = torch.zeros(3)
    device.set_phase("backward")
    device.set_kind(x, "param")
    device.name_storage(x, "blocks.0")
    device.ignore(x)
    assert device.mark("here") is None


# Peak and records.


def test_peak_by_kind_is_the_breakdown_at_the_peak_not_the_largest_of_each(gpu):
    with gpu.tag("param"):
        param = torch.zeros(100)
    with gpu.tag("grad"):
        grad = torch.zeros(300)
    del grad
    with gpu.tag("optimizer"):
        state = torch.zeros(200)
    assert gpu.peak_bytes == 1600
    assert gpu.peak_by_kind() == {"param": 400, "grad": 1200}
    gpu.reset_peak()
    assert gpu.peak_by_kind() == gpu.by_kind() == {"param": 400, "optimizer": 800}
    assert gpu.peak_bytes == 1200
    del param, state
    assert gpu.peak_by_kind() == {"param": 400, "optimizer": 800}


def test_marks_hold_the_moment(gpu):
    x = torch.zeros(10)
    mark = device.mark("here")
    del x
    assert gpu.records.marks == [mark]
    assert (mark.name, mark.total, mark.by_kind, mark.peak) == ("here", 40, {"temp": 40}, 40)


def test_timeline_tells_what_happened_where(gpu):
    with gpu.in_phase("step"):
        x = torch.zeros(10)
        line = x.numel() and current_line() - 1
        y = x @ x
        del x
    births, death = gpu.records.memory[:2], gpu.records.memory[2]
    assert [event.op for event in births] == ["aten.zeros", "aten.dot"]
    assert births[0].where == f"test_device_ledger.py:{line}"
    assert {event.phase for event in gpu.records.memory} == {"step"}
    assert (death.op, death.delta, death.block, death.where) == ("free", -40, births[0].block, "")
    assert births[0].time <= births[1].time <= death.time
    del y


def current_line():
    """The number of the caller's line."""
    import inspect

    return inspect.currentframe().f_back.f_lineno


def test_where_is_the_users_line_through_modules_and_backward(gpu):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    loss = model(torch.ones(2, 4)).sum()
    before = len(gpu.records.memory)
    line = current_line() + 1
    loss.backward()
    births = [event for event in gpu.records.memory[before:] if event.delta > 0]
    assert {event.where for event in births} == {f"test_device_ledger.py:{line}"}


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("/tmp/ipykernel_4711/1234567.py", "cell:1"),
        ("<ipython-input-3-abcdef>", "cell:1"),
        ("/home/someone/train.py", "train.py:1"),
        ("<stdin>", "<stdin>:1"),
    ],
)
def test_where_is_short_and_names_no_folder_of_the_machine(gpu, filename, shown):
    box = {}
    exec(compile("x = torch.zeros(3)", filename, "exec"), {"torch": torch}, box)
    assert gpu.records.memory[-1].where == shown


def test_library_frames_are_nobodys_own_source(gpu):
    exec(compile("x = torch.zeros(3)", device.ledger.__file__, "exec"), {"torch": torch}, {})
    line = current_line() - 1
    assert gpu.records.memory[0].where == f"test_device_ledger.py:{line}"


def test_ranks_of_a_run_share_its_clock():
    began = time.perf_counter() - 100
    with VirtualGPU(began=began) as gpu:
        torch.zeros(3)
        device.host()
    assert 100 < gpu.records.memory[0].time < 200
    assert gpu.host.began == gpu.began == began


def test_records_survive_json_and_pickle(gpu):
    kept = [torch.zeros(n) for n in (1, 2, 3)]
    kept.pop()
    device.mark("end")
    back = Records.from_json(gpu.records.to_json())
    assert back.memory == gpu.records.memory
    assert list(gpu.records.memory) == back.memory
    assert back.marks == gpu.records.marks
    assert pickle.loads(pickle.dumps(gpu.records)) == gpu.records
    assert json.loads(gpu.records.to_json())["memory"][0]["delta"] == 4


def test_timeline_can_be_switched_off():
    with VirtualGPU(timeline=False) as gpu:
        x = torch.zeros(10)
        assert gpu.allocated_bytes == 40
        assert device.mark("here").total == 40
        del x
    assert list(gpu.records.memory) == []
    assert gpu.peak_bytes == 40


def test_timeline_is_a_sequence_of_events(gpu):
    kept = [torch.zeros(n) for n in (1, 2, 3)]
    timeline = gpu.records.memory
    assert isinstance(timeline, Timeline)
    assert [event.delta for event in timeline] == [4, 8, 12]
    assert timeline[-1] == timeline[2] == timeline[1:][1]
    with pytest.raises(IndexError):
        timeline[3]
    del kept


def test_timeline_costs_less_than_100_bytes_an_event():
    timeline = Timeline()
    for block in range(10_000):
        timeline.set_kind(block, "temp")
        timeline.append(0.5, 4, 4, block, "aten.add", "forward", f"train.py:{block % 300}")
    assert len(pickle.dumps(timeline)) < 100 * 10_000


def test_records_of_one_gpu_are_refused_with_a_foreign_history(gpu):
    kept = torch.zeros(1)
    history = Records.from_json(gpu.records.to_json())
    with pytest.raises(UsageError, match="records of its own"):
        VirtualGPU(records=history)
    del kept


# Other modes, random programs.


def test_fake_tensors_count_like_real_ones():
    def program():
        with VirtualGPU() as gpu:
            model = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 1))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            gpu.set_phase("forward")
            loss = model(torch.randn(5, 32)).sum()
            gpu.set_phase("backward")
            loss.backward()
            optimizer.step()
            model[0].weight.untyped_storage().resize_(0)
        facts = [(e.delta, e.total, e.kind, e.block, e.op, e.phase) for e in gpu.records.memory]
        return facts, gpu.peak_by_kind()

    real = program()
    with FakeTensorMode():
        fake = program()
    assert fake == real
    assert len(real[0]) > 20


def test_compiled_models_count_like_plain_ones_and_the_books_are_never_compiled():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    held = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for forward in (model, torch.compile(model, backend="aot_eager")):
            model.zero_grad()
            with VirtualGPU() as gpu:
                loss = forward(x).sum()
                loss.backward()
                held.append(gpu.by_kind())
    assert held[0] == held[1]
    torch._dynamo.reset()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["new", "view", "free", "resize", "add", "swap", "cat"]),
        st.integers(0, 7),
        st.integers(0, 60),
    ),
    max_size=60,
)


def storages_of(shelf):
    """The distinct storages behind the tensors of a shelf and the bases of views, by address."""
    tensors = [*shelf.values(), *(x._base for x in shelf.values() if x._base is not None)]
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_random_programs_equal_a_naive_count(actions):
    """After every action the ledger equals the sum over the distinct storages that live."""
    shelf = {}
    with VirtualGPU() as gpu:
        for action, slot, size in actions:
            act(shelf, action, slot, size)
            alive = sum(storage.nbytes() for storage in storages_of(shelf).values())
            assert gpu.allocated_bytes == sum(gpu.by_kind().values()) == alive
        shelf.clear()
        assert gpu.allocated_bytes == 0
    totals = [event.total for event in gpu.records.memory]
    assert gpu.peak_bytes == max(totals, default=0)


def act(shelf, action, slot, size):
    """Do one thing to the tensors on the shelf; without a tensor in the slot make one."""
    x = shelf.get(slot)
    if x is None or action == "new":
        shelf[slot] = torch.empty(size, dtype=torch.uint8)
    else:
        DOING[action](shelf, slot, x, size)


def resize(shelf, _, x, size):
    """Resize a storage and let all its tensors on the shelf view what there is then."""
    storage = x.untyped_storage()
    storage.resize_(size)
    for slot, tensor in shelf.items():
        if tensor.untyped_storage()._cdata == storage._cdata:
            shelf[slot] = torch.empty(0, dtype=torch.uint8).set_(storage)


def swap(shelf, slot, x, size):
    """Give a tensor other data, as a stage does with its parameters."""
    x.data = torch.empty(size, dtype=torch.uint8)


def keep(choose_slot, make):
    """Put what `make` makes of the slot's tensor into the slot that `choose_slot` names."""

    def do(shelf, slot, x, size):
        shelf[choose_slot(slot)] = make(shelf, x)

    return do


DOING = {
    "view": keep(lambda slot: (slot + 1) % 8, lambda shelf, x: x.view(-1)),
    "free": lambda shelf, slot, x, size: shelf.pop(slot),
    "resize": resize,
    "add": keep(lambda slot: slot, lambda shelf, x: x + 1),
    "swap": swap,
    "cat": keep(lambda slot: (slot + 3) % 8, lambda shelf, x: torch.cat(list(shelf.values()))),
}
