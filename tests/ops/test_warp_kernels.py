"""Attention whose warps have tasks of their own: which calls take it, and the bits of the kernels that it replaces."""

import math

import pytest
import torch

from dtgpt.data.documents.masks import document_bounds
from dtgpt.ops.kernels import devices
from dtgpt.ops.kernels.attention import flash, flash_launch
from dtgpt.ops.kernels.attention.window import spans_of_window
from tests.support.bodies_flash import gradients, inputs
from tests.support.gluon import Recorder, skip_unless_compiled
from tests.support.interpreter import needs_triton
from tests.support.pairwise import each_pair

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("version, capability, expected", [
    ("3.6.0", (9, 0), True), ("3.6.0+git1b2c", (9, 0), True), ("3.5.1", (9, 0), False), ("3.60.0", (9, 0), False),
    ("4.0.0", (9, 0), False), ("3.6.0", (8, 9), False), ("3.6.0", (10, 0), False)
])  # fmt: skip
def test_hopper_and_versions_of_triton_that_were_tried_run_gluon(version, capability, expected):
    assert devices.serves_gluon(version, capability) == expected
    assert not devices.has_gluon(torch.device("cpu"))


@pytest.fixture
def hopper(monkeypatch):
    """A CPU seems to be a Hopper GPU."""
    for name in ("has_hopper", "has_gluon"):
        monkeypatch.setattr(flash_launch, name, lambda device: True)


@needs_triton
@pytest.mark.parametrize("size, columns, dtype, p, documents, expected", [
    (128, 200, BF16, 0.0, False, True), (128, 200, FP16, 0.0, False, True), (128, 200, FP32, 0.0, False, False),
    (64, 200, BF16, 0.0, False, False), (256, 200, BF16, 0.0, False, False), (128, 300, BF16, 0.0, False, False),
    (128, 200, BF16, 0.1, False, False), (128, 200, BF16, 0.0, True, False)
])  # fmt: skip
def test_calls_with_heads_of_128_take_them(size, columns, dtype, p, documents, expected, hopper, monkeypatch):
    q, k = torch.empty(2, 200, 4, size, dtype=dtype), torch.empty(2, columns, 2, size, dtype=dtype)
    words = torch.empty(8, 1, dtype=torch.int64) if p else None
    spans = torch.zeros(2, columns, 2, dtype=torch.int32) if documents else None
    call = flash_launch.Call(q, k, k, p, words, spans, None)
    assert call.by_warps == expected == (call.launches is flash_launch.WARPS_OF_SHORT)
    monkeypatch.setattr(flash_launch, "has_gluon", lambda device: False)
    other = flash_launch.Call(q, k, k, p, words, spans, None)
    assert not other.by_warps and other.by_tiles == call.by_tiles


@pytest.mark.parametrize(
    "length, name, documents", [(2047, "WARPS_OF_SHORT", False), (2048, "WARPS", False), (8192, "WARPS", True)]
)
@needs_triton
def test_the_length_decides_how_many_queries_a_program_computes(length, name, documents, hopper):
    x = torch.empty(1, length, 1, 128, dtype=BF16)
    spans = torch.empty(1, length, 2, dtype=torch.int32) if documents else None
    assert flash_launch.Call(x, x, x, 0.0, None, spans, None).launches is getattr(flash_launch, name)


@needs_triton
@pytest.mark.slow(7)
@pytest.mark.parametrize("length, documents, queries", [(1000, False, 128), (2048, True, 192)])
def test_launches_fit_the_kernels_which_compile_without_a_gpu(length, documents, queries, hopper, monkeypatch):
    """queries: of a program, in forward."""
    skip_unless_compiled()
    from dtgpt.ops.kernels.attention import warp_kernels

    monkeypatch.setattr(flash_launch, "BOUNDED", 0)
    seen = {}
    for name in ("forward", "queries", "keys"):
        seen[name] = Recorder(getattr(warp_kernels, f"{name}_by_warps"))
        monkeypatch.setattr(warp_kernels, f"{name}_by_warps", seen[name])
    q, k = torch.zeros(2, length, 8, 128, dtype=BF16), torch.zeros(2, length, 2, 128, dtype=BF16)
    spans = torch.zeros(2, length, 2, dtype=torch.int32) if documents else None
    out, sums, _ = flash_launch.launch_forward(q, k, k, None, 0.0, 0, spans, sinks=torch.zeros(8, dtype=BF16))
    flash_launch.launch_backward(out, q, k, k, out, sums, torch.empty(0), 0.0, spans, False)
    tiles = {"forward": (queries, 8), "queries": (128, 8), "keys": (128, 2)}  # rows of a program, heads
    for name, (rows, heads) in tiles.items():
        assert seen[name].grid == (math.ceil(length / rows) * 2 * heads,)
        compiled = seen[name].compiled()
        assert "wgmma" in compiled.asm["ptx"] and compiled.metadata.shared <= 232448


def check_bits(length, kv_heads, dtype, sinks, spans, monkeypatch):
    """Where there are no heads of keys and values of their own, q, k and v are packed."""
    leaves, qkv = inputs((2, length, 4, 128), dtype, "cuda", kv_heads)
    monkeypatch.setattr(flash_launch, "BOUNDED", 0)
    if not flash_launch.takes_warps(*qkv[:2], drops=False, spans=spans):
        pytest.skip("needs a Hopper GPU and a version of Triton that was tried")
    drains = [torch.randn(4, device="cuda").to(dtype).requires_grad_()] if sinks else []
    cotangent, found = torch.randn_like(qkv[0]), []
    for tried in (True, False):
        monkeypatch.setattr(flash_launch, "has_gluon", lambda device, tried=tried: tried)
        out, sums, _ = flash._forward(*qkv, None, 0.0, 0, spans, None, *drains)
        found.append([out, sums, *gradients(out, leaves, cotangent, drains)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.cuda
@each_pair(heads=[(0, BF16), (0, FP16), (1, BF16), (4, FP16)], length=[1, 64, 200, 1000, 1024, 2048],
           sinks=[False, True])  # fmt: skip
def test_they_give_the_bits_of_the_kernels_that_they_replace(heads, length, sinks, poison, monkeypatch):
    kv_heads, dtype = heads
    check_bits(length, kv_heads, dtype, sinks, None, monkeypatch)


@pytest.mark.cuda
@each_pair(
    lambda case: case["window"] or case["rate"],
    heads=[(0, FP16, False), (1, BF16, True), (2, BF16, False)], length=[200, 1000, 1024, 4096],
    window=[None, 64, 100, 1024], rate=[None, 0.003, 1.0],
)  # fmt: skip
def test_they_do_with_documents_and_windows(heads, length, window, rate, poison, monkeypatch):
    """rate: how often a document ends, beside some ends around the edges of tiles; None: there are no documents."""
    spans, (kv_heads, dtype, sinks) = None, heads
    if rate is not None:
        ends = torch.rand(2, length, device="cuda") < rate
        ends[1, [at for at in (5, 6, 63, 126, 128, 191, 192, 700) if at < length]] = True
        spans = document_bounds(ends)
    if window is not None:
        spans = spans_of_window(window, 2, length, torch.device("cuda"), spans)
    check_bits(length, kv_heads, dtype, sinks, spans, monkeypatch)
