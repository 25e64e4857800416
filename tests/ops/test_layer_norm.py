"""LayerNorm with and without the residual addition before it, against float64."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

from dtgpt.ops.norm import layer_norm as ops
from dtgpt.ops.norm.layer_norm import layer_norm, layer_norm_reference, norm_and_pass, residual_norm
from dtgpt.ops.norm.residual import residual, residual_reference
from tests.support.bodies_layer_norm import EPS, check_mask, check_norms, custom_ops, draw, keys_of, results

CUDA = torch.device("cuda")


def interpret(body: str, cases: str) -> None:
    """`body(*case)` of `tests.support.bodies_layer_norm` in a process of its own."""
    code = f"import torch; from tests.support import bodies_layer_norm as b; b.interpret(b.{body}, {cases})"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype):
    with custom_ops():
        check_norms((2, 7), 40, dtype)


def test_the_references_are_what_they_say():
    x, branch, shift, weight, offset = draw((2, 3), 10, torch.float64)
    total = residual_reference(x, branch, shift, None, 0.0, (0, 0))
    assert torch.equal(total, x + branch + shift)
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + offset
    torch.testing.assert_close(layer_norm_reference(total, weight, offset, EPS), normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_sums_gradients_of_16_bits_in_fp32(dtype):
    """Of 900 rows whose sum nearly cancels, a sum in 16 bits would lose two digits."""
    x, gradient = torch.randn(900, 18).to(dtype), (0.1 * torch.randn(900, 18) + 0.003).to(dtype)
    weight, bias = (torch.ones(18, dtype=dtype, requires_grad=True) for _ in range(2))
    exact = gradient.double().sum(0)
    for norm in (layer_norm_reference, layer_norm):
        bias.grad = None
        norm(x, weight, bias, EPS).backward(gradient)
        assert (bias.grad - exact).norm() < torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_ops_keep_the_contract_of_custom_ops(dropped, biased):
    x, branch, shift, weight, offset = (t.requires_grad_() for t in draw((2, 3), 24, torch.float32))
    key, shift = keys_of(2) if dropped else None, shift if biased else None
    opcheck(ops._residual_norm, (x, branch, shift, weight, offset, EPS, key, 0.3, [3, 0]))
    if dropped and biased:
        opcheck(ops._layer_norm, (x.detach(), weight.detach(), offset.detach(), EPS))
        opcheck(torch.ops.dtgpt.residual, (x, branch, shift, key, 0.3, [3, 0]))


def test_an_unused_output_has_no_gradient():
    inputs = [t.requires_grad_() for t in draw((2, 3), 24, torch.float64)]
    with custom_ops():
        for index in (0, 1):
            found, true = (
                torch.autograd.grad(f(*inputs, EPS, None, 0.0, (0, 0))[index].square().sum(), inputs[:3])
                for f in (residual_norm, ops.residual_norm_reference)
            )
            torch.testing.assert_close(found, true)


def test_fp32_weights_serve_bf16_activations():
    *activations, shift, weight, offset = draw((2, 3), 24, torch.bfloat16)
    vectors = [t.float().requires_grad_() for t in (shift, weight, offset)]
    with custom_ops():
        made = residual_norm(*activations, *vectors, EPS, keys_of(2), 0.3)
    assert {t.dtype for t in made} == {torch.bfloat16}
    gradients = torch.autograd.grad(made, vectors, made)
    assert {t.dtype for t in gradients} == {torch.float32}


def test_no_probability_means_no_mask():
    x, branch, *_ = draw((2, 3), 24, torch.float32)
    with custom_ops():
        assert torch.equal(residual(x, branch, None, keys_of(2), 0.0), x + branch)


def test_a_shard_that_begins_within_a_block_of_eight_is_refused():
    x, branch, *_ = draw((2, 3), 24, torch.float32)
    with pytest.raises(ValueError, match="multiple of 8"):
        residual(x, branch, None, keys_of(2), 0.3, (0, 4))


@pytest.mark.compiler
def test_compiled_equals_eager():
    inputs, key = [t.requires_grad_() for t in draw((2, 3), 24, torch.float32)], keys_of(2)

    def layer(*inputs):
        return residual_norm(*inputs, EPS, key, 0.3, (8, 0))

    with custom_ops():
        eager = results(layer, inputs, inputs[:2])
        compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), inputs, inputs[:2])
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter():
    interpret("check_norms", "((2, 5), 44, torch.float32), ((1, 1), 8, torch.float32), ((3, 2), 24, torch.float16)")


@needs_triton
def test_the_kernels_draw_the_documented_mask():
    interpret("check_mask", "((3, 5), 44, torch.float32)")


SHAPES = [((3, 33), 1024, torch.bfloat16), ((1, 1), 1024, torch.bfloat16), ((2, 4096), 1024, torch.bfloat16)]
SHAPES += [((2, 77), 768, torch.float16), ((2, 31), 1600, torch.bfloat16), ((3, 50), 100, torch.float32)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape, columns, dtype", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, columns, dtype):
    check_norms(shape, columns, dtype, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("columns, dtype", [(1024, torch.bfloat16), (100, torch.float32)], ids=str)
def test_the_kernels_on_a_gpu_draw_the_documented_mask(columns, dtype):
    check_mask((3, 37), columns, dtype, CUDA)


@pytest.mark.cuda
def test_a_row_too_wide_for_registers_is_right_all_the_same():
    check_norms((2, 9), 12288, torch.bfloat16, CUDA)


@pytest.mark.cuda
def test_gradients_are_the_same_in_every_run_and_in_a_replayed_graph():
    inputs = [t.requires_grad_() for t in draw((4, 1024), 1024, torch.bfloat16, CUDA)]
    cotangents, key = [torch.randn_like(inputs[0]) for _ in range(2)], keys_of(4, CUDA)
    other = keys_of(8, CUDA)[4:]

    def work(key):
        return results(lambda *inputs: residual_norm(*inputs, EPS, key, 0.3), inputs, cotangents)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [work(key), work(other)]
        static = key.clone()
        work(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work(static)
    for keys, true in zip((key, other, key), (*expected, expected[0]), strict=True):
        static.copy_(keys)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))


@pytest.mark.cuda
def test_compiled_equals_eager_on_a_gpu():
    inputs = [t.requires_grad_() for t in draw((4, 128), 1024, torch.bfloat16, CUDA)]
    key = keys_of(4, CUDA)

    def layer(*inputs):
        return residual_norm(*inputs, EPS, key, 0.3, (8, 0))

    eager = results(layer, inputs, inputs[:2])
    compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), inputs, inputs[:2])
    assert all(torch.equal(one, other) for one, other in zip(compiled, eager, strict=True))


@pytest.mark.parametrize("used", ["both", "stream alone", "norm alone"])
def test_a_norm_that_passes_its_input_on_adds_both_gradients(used):
    x, _, _, weight, offset = draw((2, 3), 24, torch.float64)
    found = []
    for function in (norm_and_pass, lambda x, *rest: (x, layer_norm_reference(x, *rest))):
        leaves = [t.clone().requires_grad_() for t in (x, weight, offset)]
        with custom_ops():
            passed, normed = function(*leaves, EPS)
        loss = (passed.square().sum() if used != "norm alone" else 0) + (
            normed.pow(3).sum() if used != "stream alone" else 0
        )
        loss.backward()
        found.append([passed, normed, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
