"""Kinds, the end of the memory, empty storages, and whole training steps on a virtual GPU."""

import gc
import pickle
import re
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerolab import device
from zerolab.device import VirtualGPU
from zerolab.gpt import GPT, GPTConfig

F32 = 4
SMALL = GPTConfig(vocab_size=64, seq_len=16, dim=32, num_heads=2, num_layers=2)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Spare the many collections the objects that torch's import made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def gpu():
    """A virtual GPU without a limit, active in this thread."""
    with VirtualGPU() as gpu:
        yield gpu


def train_step(model, optimizer, tokens):
    """One step with the phases that the engine sets."""
    with device.in_phase("forward"):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    with device.in_phase("backward"):
        loss.backward()
    with device.in_phase("step"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def make_training(**options):
    """A small GPT with its optimizer, everything of the right kind."""
    with device.tag("param"):
        model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), **{"fused": True, **options})
    return model, optimizer


def tokens():
    """A batch of two sequences."""
    return torch.randint(64, (2, 17))


# Kinds.


def test_innermost_tag_wins_and_ends_with_its_scope(gpu):
    with gpu.tag("master"):
        a = torch.zeros(1)
        with device.tag("optimizer"):
            b = torch.zeros(2)
        c = torch.zeros(4)
    d = torch.zeros(8)
    assert gpu.by_kind() == {"master": 20, "optimizer": 8, "temp": 32}
    with pytest.raises(ZeroDivisionError), gpu.tag("grad"):
        raise ZeroDivisionError
    e = torch.zeros(1)
    assert gpu.by_kind()["temp"] == 36
    del a, b, c, d, e


def test_tensors_made_from_data_are_born_here_and_not_inputs(gpu):
    with gpu.tag("optimizer"):
        step = torch.tensor(0.0)  # what AdamW without fused does
    with device.paused():
        scratch = torch.tensor([1.0, 2.0])
    with gpu.in_phase("forward"):
        mask = torch.tensor([True, False])
    gpu.set_phase("backward")
    step + scratch[0]
    assert gpu.by_kind() == {"optimizer": 4, "activation": 2}
    assert gpu.records.memory[0].op == "aten.tensor"
    del mask


def test_set_kind_moves_the_whole_storage_once(gpu):
    x = torch.zeros(10)
    gpu.set_kind(x[3:5], "param")
    gpu.set_kind(x, "param")
    assert gpu.by_kind() == {"param": 40}
    assert {event.kind for event in gpu.records.memory} == {"param"}  # its birth shows it too
    del x
    assert gpu.by_kind() == {}


def test_set_kind_counts_what_was_not_seen():
    x = torch.zeros(10)
    with VirtualGPU() as gpu:
        device.set_kind(x, "param")
        assert gpu.by_kind() == {"param": 40}


def test_born_in_forward_and_alive_at_backward_is_an_activation(gpu):
    with gpu.in_phase("init"):
        weight = torch.zeros(5)
    with gpu.in_phase("forward"):
        kept, gone = torch.zeros(10), torch.zeros(100)
        with gpu.tag("gathered"):
            gathered = torch.zeros(7)
        del gone
    assert gpu.by_kind() == {"temp": 60, "gathered": 28}
    with gpu.in_phase("backward"):
        assert gpu.by_kind() == {"temp": 20, "activation": 40, "gathered": 28}
        recomputed = torch.zeros(3)
    assert gpu.by_kind()["temp"] == 32
    del weight, kept, gathered, recomputed


def test_activations_equal_what_autograd_saves(gpu):
    """The lifetime rule against saved-tensor hooks, which see what backward will need."""
    model, _ = make_training()
    batch = tokens()
    model(batch[:, :-1])  # makes the batch an input
    params = {p.untyped_storage()._cdata for p in model.parameters()}
    known = params | {batch.untyped_storage()._cdata}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    gpu.set_phase("forward")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(batch[:, :-1], batch[:, 1:])
    gpu.set_phase("backward")
    assert gpu.by_kind()["activation"] == sum(saved.values()) + loss.nbytes


def test_peak_knows_its_activations(gpu):
    """A peak inside forward is broken down with what later proves to be an activation."""
    gpu.set_phase("forward")
    kept = torch.zeros(10)
    scratch = torch.zeros(1000)
    del scratch
    gpu.set_phase("backward")
    assert gpu.peak_by_kind() == {"activation": 40, "temp": 4000}
    del kept


def test_a_training_step_is_classified_to_the_byte(gpu):
    model, optimizer = make_training()
    numel = sum(p.numel() for p in model.parameters())
    with device.in_phase("forward"):
        loss = model(*(t.contiguous() for t in (tokens()[:, 1:], tokens()[:, 1:])))
    with device.in_phase("backward"):
        loss.backward()
    for param in model.parameters():
        gpu.set_kind(param.grad, "grad")
    with device.tag("optimizer"):
        optimizer.step()
    del loss
    kinds = gpu.by_kind()
    assert kinds["param"] == kinds["grad"] == F32 * numel
    num_tensors = len(list(model.parameters()))
    assert kinds["optimizer"] == 2 * F32 * numel + F32 * num_tensors  # moments and step counts


# The end of the memory.


def test_out_of_memory_says_who_holds_what_in_cudas_words():
    with VirtualGPU("1MiB", index=3) as gpu, gpu.in_phase("step"):
        with gpu.tag("optimizer"):
            kept = torch.zeros(150_000)
        with gpu.tag("param"):
            more = torch.zeros(50_000)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept + 1
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 585.94 KiB. GPU 3 has a total capacity of "
            "1.00 MiB of which 242.75 KiB is free. Of the allocated memory 781.25 KiB: optimizer "
            "585.94 KiB, param 195.31 KiB. (virtual GPU 3, in aten.add, phase step, "
            "test_device_memory.py:"
        )
        assert gpu.allocated_bytes == 800_000
        torch.zeros(10)  # the GPU is still usable
    assert device.current() is None
    del more


def test_out_of_memory_carries_its_facts_through_pickle():
    with VirtualGPU(1000, index=2) as gpu, gpu.tag("grad"):
        kept = torch.zeros(100)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(200)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is torch.OutOfMemoryError
    assert error.breakdown == {"grad": 400}
    assert (error.requested, error.allocated, error.capacity) == (800, 400, 1000)
    assert (error.rank, error.op, error.phase) == (2, "aten.zeros", "idle")
    assert re.fullmatch(r"test_device_memory\.py:\d+", error.where)
    assert str(error) == str(caught.value)
    del kept


def test_the_last_byte_fits_and_the_next_does_not():
    with VirtualGPU(100) as gpu:
        x = torch.zeros(100, dtype=torch.uint8)
        assert gpu.allocated_bytes == gpu.capacity == 100
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1 bytes"):
            torch.zeros(1, dtype=torch.uint8)
        del x
        torch.zeros(100, dtype=torch.uint8)


def test_input_that_does_not_fit_raises_too():
    x = torch.zeros(1000)
    with VirtualGPU("1KiB") as gpu:
        with pytest.raises(torch.OutOfMemoryError):
            x + 1
        with pytest.raises(torch.OutOfMemoryError):
            gpu.set_kind(x, "param")
        assert gpu.allocated_bytes == 0


def test_absurd_request_is_refused_before_the_machine_is_filled():
    with VirtualGPU("1MiB"):
        for make in (torch.zeros, torch.ones, torch.empty, torch.randn):
            with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 3725\.29 TiB"):
                make(2**10 * 10**12)


@pytest.mark.parametrize("how", ["storage", "tensor"])
def test_growth_that_does_not_fit_is_undone(how):
    with VirtualGPU(1000) as gpu:
        x = torch.ones(100)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 3\.91 KiB"):
            x.untyped_storage().resize_(4000) if how == "storage" else x.resize_(1000)
        assert x.untyped_storage().nbytes() == gpu.allocated_bytes == 400
        assert x.shape == (100,)
        assert x.sum() == 100
        x.untyped_storage().resize_(600)  # beside the old 400 it just fits
        assert (gpu.allocated_bytes, gpu.peak_bytes) == (600, 1000)


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_out_of_memory_anywhere_in_a_step_leaves_books_and_modes_right(moment):
    """The capacity is lowered until exactly this moment fails; then a full step must work."""
    batch = tokens()
    with VirtualGPU() as gpu:
        model, optimizer = make_training()
        train_step(model, optimizer, batch)
        gc.collect()
        baseline = gpu.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fail_in(moment, gpu, model, optimizer, batch)
        assert type(caught.value) is torch.OutOfMemoryError
        assert caught.value.phase == moment
        assert sum(caught.value.breakdown.values()) == caught.value.allocated
        gpu.capacity = None
        caught = None
        optimizer.zero_grad()
        optimizer.state.clear()
        assert train_step(model, optimizer, batch) > 0
        gc.collect()
        assert gpu.allocated_bytes == baseline
    assert device.current() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def fail_in(moment, gpu, model, optimizer, batch):
    """Run a step in which the memory ends at the moment's first allocation."""

    def closing(name):
        gpu.capacity = gpu.allocated_bytes if name == moment else None
        return gpu.in_phase(name)

    with closing("forward"):
        loss = model(batch[:, :-1], batch[:, 1:])
    with closing("backward"):
        loss.backward()
    del loss
    optimizer.state.clear()  # so that the step has something to allocate
    with closing("step"):
        optimizer.step()


def test_error_does_not_keep_the_tensor_that_did_not_fit():
    with VirtualGPU(1000):
        x = torch.ones(200)
        born = []

        def remember(storage):
            born.append(weakref.ref(storage))

        class Spy(VirtualGPU):
            def admit(self, storage, op, kind=None):
                remember(storage)
                return super().admit(storage, op, kind)

        with Spy(100), pytest.raises(torch.OutOfMemoryError) as caught:
            torch.arange(150)
        assert caught.value.requested == 1200
        assert [ref() for ref in born] == [None]
    del x


# Empty storages of named units.


def test_using_an_empty_storage_names_unit_operation_and_remedy(gpu):
    flat = torch.ones(12)
    param = flat[2:8].view(2, 3)
    device.name_storage(flat, "blocks.3")
    param + 1  # nothing is said while it is there
    flat.untyped_storage().resize_(0)
    says = (
        r"^aten\.{} would read an empty tensor: parameters of blocks\.3 are sharded now;"
        r" use them inside forward or gather them$"
    )
    attempts = {
        "add": lambda: param + 1,
        "mm": lambda: torch.mm(torch.ones(2, 2), param),
        "cat": lambda: torch.cat([torch.ones(2, 3), param]),
        "copy_": lambda: param.copy_(torch.ones(2, 3)),
        "clone": flat.clone,
    }
    for op, attempt in attempts.items():
        with pytest.raises(RuntimeError, match=says.format(op)):
            attempt()
    with device.paused(), pytest.raises(RuntimeError, match=r"blocks\.3"):
        param.norm()


def test_shapes_and_views_of_an_empty_storage_are_allowed(gpu):
    flat = torch.ones(12)
    param = nn.Parameter(flat[2:8])
    device.name_storage(flat, "blocks.3")
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"aten\.expand .*blocks\.3"):
        param.expand(3, 6)  # torch finds no room for it
    assert param.detach().view(2, 3).shape == (2, 3)
    assert torch.zeros_like(param).sum() == 0
    assert param.new_ones(2).sum() == 2
    assert (param[:0] + 1).shape == (0,)
    param.data = torch.full((), torch.nan).expand(6)
    assert param.isnan().all()


def test_named_storage_works_again_once_it_is_filled(gpu):
    flat = torch.ones(12)
    flat.untyped_storage().resize_(0)
    device.name_storage(flat, "blocks.3")
    with pytest.raises(RuntimeError, match=r"blocks\.3"):
        flat.sum()
    flat.untyped_storage().resize_(48)
    flat.fill_(2)
    assert flat.sum() == 24


def test_names_die_with_their_storage(gpu):
    flat = torch.ones(12)
    device.name_storage(flat, "blocks.3")
    storage = weakref.ref(flat.untyped_storage())
    del flat
    assert storage() is None
    assert gpu.allocated_bytes == 0


def test_backward_through_a_resharded_weight_is_refused_not_a_crash(gpu):
    flat = torch.ones(16)
    weight = nn.Parameter(flat.view(4, 4))
    device.name_storage(flat, "head")
    loss = F.linear(torch.ones(2, 4, requires_grad=True), weight).sum()
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="parameters of head are sharded"):
        loss.backward()


# Whole training steps.


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False, "foreach": True}])
def test_nothing_leaks_from_build_to_delete(gpu, options):
    batch = tokens()
    gc.collect()
    baseline = gpu.allocated_bytes
    model, optimizer = make_training(**options)
    held = []
    for _ in range(3):
        train_step(model, optimizer, batch)
        gc.collect()
        held.append(gpu.allocated_bytes)
    assert held[0] == held[1] == held[2]
    del model, optimizer
    gc.collect()
    assert gpu.allocated_bytes == baseline
    assert gpu.by_kind() == {"temp": batch.nbytes}


def test_steps_repeat_their_events_exactly(gpu):
    model, optimizer = make_training()
    batch = tokens()
    gc.collect()
    gc.disable()
    try:
        starts = []
        for _ in range(3):
            train_step(model, optimizer, batch)
            starts.append(len(gpu.records.memory))
    finally:
        gc.enable()
    second, third = (
        [(e.delta, e.total, e.kind, e.op, e.phase, e.where) for e in gpu.records.memory[a:b]]
        for a, b in pairwise(starts)
    )
    assert second == third
    assert len(second) > 100


def test_checkpointing_trades_activations_for_recomputation(gpu):
    batch = torch.randn(64, 32)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU()) for _ in range(1)))
    held = {}
    for name in ("plain", "checkpointed"):
        gpu.set_phase("forward")
        x = batch.clone().requires_grad_()
        out = layers(x) if name == "plain" else checkpoint(layers, x, use_reentrant=False)
        out.sum().backward()
        gpu.set_phase("forward")
        out = layers(x) if name == "plain" else checkpoint(layers, x, use_reentrant=False)
        gpu.set_phase("backward")
        held[name] = gpu.by_kind()["activation"]
        out.sum().backward()
        gpu.set_phase("idle")
        del x, out
    # The input to GELU, 64 x 128 floats, is what checkpointing does not keep.
    assert held["plain"] - held["checkpointed"] == 64 * 128 * F32


def test_the_books_of_the_course_model_hold_without_a_step_of_their_own(gpu):
    """Training inside a virtual GPU gives the same losses as outside."""
    batch = tokens()
    losses = {}
    for inside in (True, False):
        torch.manual_seed(1)
        with device.paused():
            model, optimizer = make_training()
        if inside:
            losses[inside] = [train_step(model, optimizer, batch) for _ in range(3)]
        else:
            gpu.__exit__(None, None, None)
            losses[inside] = [train_step(model, optimizer, batch) for _ in range(3)]
            gpu.__enter__()
    assert losses[True] == losses[False]
