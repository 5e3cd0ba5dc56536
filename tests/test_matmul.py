"""bf16 products by fp32 sums: torch's numbers, torch's memory, without torch's wait."""

import pytest
import torch
from torch.nn import functional as F

from zerolab import device, matmul


@pytest.fixture(params=[True, False], ids=["wide", "torch"])
def slow(request, monkeypatch):
    monkeypatch.setattr(matmul, "SLOW_BF16", request.param)
    return request.param


def tensors(dtype, seed=0):
    dice = torch.Generator().manual_seed(seed)
    shapes = ((3, 5, 16), (8, 16), (8,), (3, 5, 8))
    x, weight, bias, grad = (torch.randn(shape, generator=dice).to(dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (x, weight, bias)], grad


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_matches_torch_in_values_and_gradients(dtype, biased):
    (x, weight, bias), grad = tensors(dtype)
    bias = bias if biased else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    ours = matmul.linear(x, weight, bias)
    theirs = F.linear(x, weight, bias)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs)
    for our, their in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(our, their)


def test_a_wide_product_is_the_exact_product_rounded_once():
    dice = torch.Generator().manual_seed(0)
    left = torch.randint(-8, 9, (7, 256), generator=dice).to(torch.bfloat16)
    right = torch.randint(-8, 9, (256, 5), generator=dice).to(torch.bfloat16)
    bias = torch.full((5,), 0.5, dtype=torch.bfloat16)
    exact = left.double() @ right.double() + 0.5  # whole numbers: fp32 sums are exact too
    assert torch.equal(matmul.wide_product(left, right, bias), exact.to(torch.bfloat16))


def measure(wide, monkeypatch):
    monkeypatch.setattr(matmul, "SLOW_BF16", wide)
    gpu = device.VirtualGPU()
    with gpu:
        (x, weight, bias), grad = tensors(torch.bfloat16)
        gpu.reset_peak()
        out = matmul.linear(x, weight, bias)
        after_forward = gpu.allocated_bytes
        out.backward(grad)
        return after_forward, gpu.allocated_bytes, gpu.peak_bytes


def test_the_ledger_sees_what_it_sees_with_torch(monkeypatch):
    assert measure(True, monkeypatch) == measure(False, monkeypatch)


def test_only_the_gradients_that_are_needed_are_computed(monkeypatch):
    monkeypatch.setattr(matmul, "SLOW_BF16", True)
    (x, weight, bias), grad = tensors(torch.bfloat16)
    matmul.linear(x.detach(), weight, bias).backward(grad)
    assert x.grad is None
    assert weight.grad.shape == weight.shape
