"""SwiGLU, and other functions of the gate, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from dtgpt.ops.activations import swiglu, swiglu_reference
from dtgpt.ops.kernels import pointwise
from dtgpt.ops.more_activations import BIASED, FUNCTIONS, GATED
from tests.support.bodies_norm import (
    capture,
    check,
    check_geglu,
    check_swiglu,
    custom_ops,
    in_interpreter,
    results,
    saved_bytes,
)
from tests.support.interpreter import needs_triton

CUDA = torch.device("cuda")


def test_the_reference_is_what_it_says():
    gate, up = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    x = torch.stack([gate, up], dim=-1).flatten(-2)
    torch.testing.assert_close(swiglu(x), gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype):
    check_swiglu((2, 7), 21, dtype)
    with custom_ops():
        check_swiglu((2, 7), 21, dtype)


def test_the_op_keeps_the_contract_of_custom_ops():
    opcheck(pointwise._swiglu, (torch.randn(2, 3, 24).requires_grad_(),))


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 7\) has an odd number"):
        swiglu(torch.zeros(2, 7))


def test_backward_saves_nothing_but_x():
    x = torch.randn(2, 3, 24, dtype=torch.bfloat16)
    with custom_ops():
        assert saved_bytes(swiglu, [x]) == x.nbytes
    assert saved_bytes(swiglu, [x.to("meta")]) == x.nbytes


def test_a_cut_between_pairs_changes_no_column():
    x = torch.randn(2, 24)
    assert torch.equal(torch.cat([swiglu(part) for part in x.split(6, dim=-1)], dim=-1), swiglu(x))


def test_compiled_equals_eager():
    x = torch.randn(2, 3, 24).requires_grad_()

    def layer(x):
        return swiglu(2 * x) + 1

    with custom_ops():
        eager = results(layer, [x], [torch.ones(2, 3, 12)])
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        for one, other in zip(results(compiled, [x], [torch.ones(2, 3, 12)]), eager, strict=True):
            torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter():
    shapes = "((2, 5), 13, torch.float32), ((1,), 1, torch.float32), ((3, 9), 300, torch.float32)"
    in_interpreter(check_swiglu=shapes, check_geglu=shapes)


OF_GATE = {
    "silu": lambda x: x / (1 + torch.exp(-x)), "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: x.clamp(min=0) ** 2, "clamped_swiglu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}  # fmt: skip


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_gate_has_the_function_of_its_name(name, dtype):
    def formula(x):
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        if name == "clamped_swiglu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        return OF_GATE[name](gate) * up

    x = [((4 if name == "clamped_swiglu" else 2) * torch.randn(2, 7, 42)).to(dtype)]
    check(GATED[name], formula, x)
    with custom_ops():
        check(GATED[name], formula, x)
        assert saved_bytes(GATED[name], x) == x[0].nbytes
    assert saved_bytes(GATED[name], [x[0].to("meta")]) == x[0].nbytes


@pytest.mark.parametrize("name", BIASED)
def test_a_sum_with_a_bias_has_the_function_of_its_name(name):
    of_sum = OF_GATE | {"relu": lambda x: x.clamp(min=0)}
    x = [torch.randn(2, 7, 21), torch.randn(21)]
    check(BIASED[name], lambda x, bias: of_sum[name](x + bias), x)


def test_other_functions_keep_the_contract_of_custom_ops():
    for name in FUNCTIONS:
        opcheck(pointwise._gated, (torch.randn(2, 3, 24).requires_grad_(), name))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_geglu_have_the_values_and_gradients_of_float64(dtype):
    check_geglu((2, 77), 3072, dtype, CUDA)


SHAPES = [((3, 33), 8192, torch.bfloat16), ((1,), 8192, torch.bfloat16), ((2, 4096), 14336, torch.bfloat16)]
SHAPES += [((2, 77), 3072, torch.float16), ((3, 50), 101, torch.float32), ((7,), 1, torch.bfloat16)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape, columns, dtype", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, columns, dtype):
    check_swiglu(shape, columns, dtype, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_gates_do_not_overflow(dtype):
    gate = torch.tensor([-6e4, -1e3, -100.0, 0.0, 100.0, 1e3, 6e4], dtype=dtype, device=CUDA)
    x = torch.stack([gate, torch.ones_like(gate)], dim=-1).flatten().requires_grad_()
    y = swiglu(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), gate.relu())
    torch.testing.assert_close(slope[1::2], gate.relu())
    torch.testing.assert_close(slope[::2][gate != 0], (gate > 0).to(dtype)[gate != 0])


@pytest.mark.cuda
def test_strided_inputs_compiled_and_in_a_graph():
    x = torch.randn(6, 4, 64, device=CUDA, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
    dy = torch.randn(4, 6, 32, device=CUDA).to(torch.bfloat16)[:1, :1].expand(4, 6, 32)

    def layer(x):
        return swiglu(2 * x)

    eager = results(layer, [x], [dy])
    torch.testing.assert_close(eager, results(lambda x: swiglu_reference(2 * x), [x], [dy]), rtol=2**-7, atol=1e-3)
    compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), [x], [dy])
    replayed = capture(lambda: results(layer, [x], [dy]))
    for one, two, three in zip(eager, compiled, replayed, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
