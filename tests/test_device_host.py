"""Host memory has books of its own, and copies between host and GPU are real."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolab import device
from zerolab.device import VirtualGPU, cuda
from zerolab.errors import UsageError


@pytest.fixture
def gpu():
    """A virtual GPU without a limit, active in this thread."""
    with VirtualGPU(index=2) as gpu:
        yield gpu


def test_copies_are_real_and_counted_on_their_own_side(gpu):
    with gpu.tag("optimizer"):
        x = torch.arange(10.0)
    away = device.to_host(x)
    assert torch.equal(away, x)
    assert away.data_ptr() != x.data_ptr()
    assert gpu.by_kind() == device.host().by_kind() == {"optimizer": 40}
    del x
    assert gpu.allocated_bytes == 0
    assert device.host().allocated_bytes == 40
    back = device.to_device(away)
    assert gpu.by_kind() == {"optimizer": 40}
    assert back.data_ptr() != away.data_ptr()
    del away, back
    assert device.host().allocated_bytes == gpu.allocated_bytes == 0


def test_pinning_is_remembered(gpu):
    x = torch.zeros(10)
    pinned, pageable = device.to_host(x), device.to_host(x, pinned=False)
    host = device.host()
    assert host.is_pinned(pinned[3:])
    assert not host.is_pinned(pageable)
    assert not host.is_pinned(x)
    assert (host.pinned_bytes, host.allocated_bytes) == (40, 80)


def test_copies_have_no_history_and_are_contiguous(gpu):
    x = torch.randn(4, 3, requires_grad=True)
    away = device.to_host((x * 2).t())
    assert away.is_contiguous()
    assert not away.requires_grad
    back = device.to_device(away)
    assert torch.equal(back, (x * 2).t())


def test_full_host_says_so(gpu):
    device.host().capacity = 100
    x = torch.zeros(20)
    kept = device.to_host(x)
    with pytest.raises(torch.OutOfMemoryError, match=r"Host out of memory.*of which 20 bytes"):
        device.to_host(x)
    assert device.host().allocated_bytes == 80
    del kept


def test_full_gpu_refuses_what_comes_back():
    with VirtualGPU(100) as gpu:
        away = device.to_host(torch.zeros(20))
        kept = torch.zeros(20)
        with pytest.raises(torch.OutOfMemoryError, match="GPU 0"):
            device.to_device(away)
        assert gpu.allocated_bytes == 80
    del kept


def test_host_tensor_from_elsewhere_is_not_the_gpus(gpu):
    with VirtualGPU():
        elsewhere = torch.ones(10)
    back = device.to_device(elsewhere)
    assert gpu.by_kind() == {"temp": 40}  # the copy, not the original
    del back


def test_work_on_the_host_is_counted_there(gpu):
    grad = torch.ones(10)
    with device.on_host() as host, device.tag("optimizer"):
        moment = torch.zeros(10)
        moment.add_(grad, alpha=0.1)
        update = moment / 2
    assert gpu.by_kind() == {"temp": 40}
    assert host.by_kind() == {"optimizer": 80}
    moment.untyped_storage().resize_(0)
    assert host.allocated_bytes == 40
    del moment, update
    assert host.allocated_bytes == 0


def test_on_host_needs_a_gpu():
    with pytest.raises(UsageError, match="needs an active virtual GPU"), device.on_host():
        pass


def test_each_gpu_has_a_share_of_the_host_and_nobody_has_the_rest(gpu):
    mine = device.host()
    assert device.host() is mine
    assert mine.index == 2
    with VirtualGPU(index=1):
        assert device.host() is not mine


def test_copies_work_without_a_gpu():
    before = device.host().allocated_bytes
    away = device.to_host(torch.ones(10))
    assert device.host().allocated_bytes - before == 40
    assert torch.equal(device.to_device(away), torch.ones(10))
    del away
    assert device.host().allocated_bytes == before


def test_offload_runs_in_a_dry_run():
    with FakeTensorMode(), VirtualGPU() as gpu:
        x = torch.zeros(1000)
        away = device.to_host(x)
        del x
        back = device.to_device(away)
        assert gpu.allocated_bytes == device.host().allocated_bytes == 4000
        del back, away


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_statistics_are_zero_without_cuda():
    cuda.reset_peak()
    assert not cuda.is_available()
    assert cuda.peak_bytes() == cuda.allocated_bytes() == 0


@pytest.mark.gpu
def test_cuda_copies_use_pinned_memory_and_agree_with_torch():
    with VirtualGPU(device_type="cuda") as gpu:
        cuda.reset_peak()
        before = cuda.allocated_bytes()
        x = torch.arange(2**20, dtype=torch.float32, device="cuda")
        assert gpu.allocated_bytes == 4 * 2**20 == cuda.allocated_bytes() - before
        away = device.to_host(x)
        assert away.is_pinned()
        back = device.to_device(away)
        assert back.device == x.device
        assert torch.equal(back, x)
        assert device.host().allocated_bytes == 4 * 2**20
        assert gpu.peak_bytes <= cuda.peak_bytes()
