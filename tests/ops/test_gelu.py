"""GELU after a bias, the gradients of biases and the linear map that uses them, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from dtgpt.ops.activations import bias_gelu
from dtgpt.ops.kernels import bias, pointwise
from dtgpt.ops.kernels.linear import linear_by_column_sum
from dtgpt.ops.linear import linear
from tests.support.bodies_norm import check, check_gelu, custom_ops, cut_linear, draw, in_interpreter, results
from tests.support.interpreter import needs_triton
from tests.support.ranks import pool

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype):
    with custom_ops():
        check_gelu((2, 7), 40, dtype)


def test_the_ops_keep_the_contract_of_custom_ops():
    x, _, shift, *_ = draw((2, 3), 24, torch.float32)
    opcheck(bias._column_sum, (x,))
    opcheck(pointwise._bias_gelu, (x.requires_grad_(), shift.requires_grad_()))


def test_backward_saves_nothing_but_x_and_the_bias():
    x, _, shift, *_ = draw((2, 3), 24, torch.bfloat16)
    x, sizes = x.requires_grad_(), []
    with custom_ops(), torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        bias_gelu(x, shift)
    assert sorted(sizes) == sorted([x.nbytes, shift.nbytes])


def test_a_linear_map_has_the_values_and_gradients_of_pytorchs():
    x, _, shift, *_ = draw((2, 7), 24, torch.float32)
    inputs = [x, torch.randn(24, 24) / 5, shift]
    with custom_ops():
        check(linear_by_column_sum, F.linear, inputs)
        check(linear, F.linear, inputs)


@pytest.mark.slow(2)
@pytest.mark.compiler
def test_compiled_equals_eager():
    x, _, shift, *_ = draw((2, 3), 24, torch.float32)
    inputs = [t.requires_grad_() for t in (x, torch.randn(24, 24), shift)]

    def layer(x, weight, shift):
        return bias_gelu(linear_by_column_sum(x, weight, shift), shift)

    with custom_ops():
        eager = results(layer, inputs, inputs[:1])
        compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), inputs, inputs[:1])
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


def test_a_linear_map_cut_by_columns_has_the_gradients_of_pytorchs():
    x, _, shift, *_ = draw((2, 6), 24, torch.float64)
    for found, true in pool().run(2, cut_linear, x, torch.randn(24, 24, dtype=torch.float64), shift):
        assert [placement for placement, _ in found] == [placement for placement, _ in true]
        for (_, one), (_, other) in zip(found, true, strict=True):
            torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter():
    in_interpreter(check_gelu="((2, 5), 44, torch.float32), ((1,), 8, torch.float32), ((3, 9), 1100, torch.float32)")


SHAPES = [((3, 33), 4096, torch.bfloat16), ((1,), 4096, torch.bfloat16), ((2, 4096), 4096, torch.bfloat16)]
SHAPES += [((2, 77), 3072, torch.float16), ((3, 50), 100, torch.float32), ((1000,), 1600, torch.float32)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape, columns, dtype", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, columns, dtype):
    check_gelu(shape, columns, dtype, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_values_do_not_overflow(dtype):
    x = torch.tensor([[-6e4, -1e3, -30.0, -8.0, 0.0, 8.0, 1e3, 6e4]], dtype=dtype, device=CUDA).requires_grad_()
    y = bias_gelu(x, torch.zeros(8, dtype=dtype, device=CUDA))
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), x.detach().relu(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope[x != 0], (x > 0).to(dtype)[x != 0], atol=1e-6, rtol=1e-6)


@pytest.mark.cuda
def test_a_linear_map_on_a_gpu_eager_compiled_and_in_a_graph():
    x, _, shift, *_ = draw((4, 128), 256, torch.bfloat16, CUDA)
    weight = torch.randn(256, 256, device=CUDA).to(torch.bfloat16) / 16
    inputs = [t.requires_grad_() for t in (x, weight, shift)]
    check(linear, F.linear, [t.detach() for t in inputs])

    def layer(x, weight, shift):
        return bias_gelu(linear(x, weight, shift), shift)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = results(layer, inputs, inputs[:1])
        compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), inputs, inputs[:1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = results(layer, inputs, inputs[:1])
    graph.replay()
    for one, two, three in zip(eager, compiled, captured, strict=True):
        assert torch.equal(one, three)
        torch.testing.assert_close(one, two, rtol=2**-6, atol=1e-2)
