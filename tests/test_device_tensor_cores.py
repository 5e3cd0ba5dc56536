"""16-bit products on a virtual GPU are fp32 products rounded once, and cost no counted byte."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from zerolab.device import VirtualGPU, tensor_cores

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _cpu_without_bf16(monkeypatch):
    """Act as on a CPU without bf16 instructions, whatever this one has."""
    monkeypatch.setattr(tensor_cores, "KERNELS", frozenset(tensor_cores.PRODUCTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_fp32_products_rounded_once(dtype):
    a, b, c = (torch.randn(33, 33).to(dtype) for _ in range(3))
    wide = [x.float() for x in (a, b, c)]
    with VirtualGPU():
        assert torch.equal(a @ b, (wide[0] @ wide[1]).to(dtype))
        assert torch.equal(torch.addmm(c, a, b), torch.addmm(wide[2], *wide[:2]).to(dtype))
        batched = torch.bmm(a[None], b[None])
    assert torch.equal(batched[0], (wide[0] @ wide[1]).to(dtype))


def test_a_layer_whose_bias_is_a_parameter_is_computed_in_fp32_too():
    layer, x = torch.nn.Linear(33, 33).bfloat16(), torch.randn(5, 33).bfloat16()
    bias, weight = layer.bias.float(), layer.weight.float()
    with VirtualGPU():
        assert torch.equal(layer(x), torch.addmm(bias, x.float(), weight.t()).bfloat16())


def test_only_the_result_is_counted():
    a = torch.randn(64, 64).bfloat16()
    with VirtualGPU() as gpu:
        product = a @ a
    assert gpu.peak_bytes == a.nbytes + product.nbytes
    assert [event.op for event in gpu.records.memory] == ["aten.mm", "aten.mm"]


def test_other_dtypes_are_left_alone():
    a = torch.randn(5, 5)
    whole = torch.arange(25).view(5, 5)
    with VirtualGPU():
        assert torch.equal(a @ a, torch.mm(a, a))
        assert (whole @ whole).dtype == torch.int64


def test_attention_backward_stays_close_to_fp32():
    q, k, v = (torch.randn(1, 2, 16, 8).bfloat16().requires_grad_() for _ in range(3))
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with VirtualGPU():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum().backward()
    F.scaled_dot_product_attention(*wide, is_causal=True).sum().backward()
    for narrow, reference in zip((q, k, v), wide, strict=True):
        assert narrow.grad.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.grad.float(), reference.grad, atol=0.05, rtol=0.05)


def test_dry_run_computes_nothing_and_counts_the_same():
    held = []
    for mode in (None, FakeTensorMode()):
        with mode or torch.no_grad(), VirtualGPU() as gpu:
            a = torch.zeros(16, 16, dtype=torch.bfloat16)
            held.append((a @ a).nbytes + gpu.peak_bytes)
    assert held[0] == held[1]
