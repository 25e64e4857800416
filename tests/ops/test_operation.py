"""What serves an operation: kernels in their order, else its definition; and when kernels are imported."""

import subprocess
import sys

import pytest
import torch

from dtgpt.capabilities import CAPABILITIES
from dtgpt.ops import operation
from dtgpt.ops.operation import Operation, split_backward
from dtgpt.util import seams


@pytest.fixture
def example():
    """Return an operation that a throw-away capability serves."""
    seams.use(["tests.support.example_kernels"])
    yield Operation("example", lambda x, w: x * w, "x w")
    seams.use(module for module, _ in CAPABILITIES)
    operation.OPERATIONS.pop("example")
    operation._loaded.discard("example")


def numbers(count, dtype=torch.bfloat16):
    return torch.ones(count, dtype=dtype), torch.ones((), dtype=dtype)


def test_the_first_kernel_that_serves_is_taken_and_else_the_definition(example):
    assert example(*numbers(9)).tolist() == [3] * 9
    assert example(*numbers(8)).tolist() == [2] * 8
    with split_backward():
        assert example(*numbers(8)).tolist() == [1] * 8
        assert example(*numbers(9)).tolist() == [3] * 9


def test_numbers_of_32_bits_on_a_cpu_meet_no_kernel(example):
    assert example(*numbers(9, torch.float32)).tolist() == [1] * 9
    assert not example.kernels
    example(torch.ones(9, device="meta"), torch.ones(()))
    assert example.kernels


def test_an_operation_that_no_capability_serves_has_its_definition(example):
    seams.use([])
    assert example(*numbers(9)).tolist() == [1] * 9


@pytest.mark.slow(3)
def test_a_compiled_function_has_what_serves_it(example):
    """Also where the kernels are imported while it is traced, and where another shape is served by another one."""
    compiled = torch.compile(lambda x, w: example(x, w) * 2, fullgraph=True, backend="aot_eager", dynamic=False)
    assert compiled(*numbers(9)).tolist() == [6] * 9
    assert compiled(*numbers(8)).tolist() == [4] * 8
    with split_backward():
        assert compiled(*numbers(8)).tolist() == [2] * 8
    assert compiled(*numbers(8)).tolist() == [4] * 8
    assert compiled(*numbers(8, torch.float32)).tolist() == [2] * 8


PROGRAM = """
import sys, torch
from dtgpt.ops.norms import norm
from dtgpt.ops.activations import bias_gelu
from dtgpt.ops.linear import linear
from dtgpt.ops.operation import load_kernels

def layer(x, weight, gain, bias):
    return bias_gelu(linear(norm(x, gain, bias, 1e-5), weight, None), bias)

def kernels():
    return sorted(name for name in sys.modules if name.startswith("dtgpt.ops.kernels."))

inputs = torch.randn(2, 8), torch.randn(8, 8), torch.ones(8), torch.zeros(8)
layer(*inputs)
assert not kernels(), kernels()
load_kernels("swiglu")
x = torch.randn(4, 8).bfloat16()
eager = torch.ops.dtgpt.swiglu(x)
assert "torch._dynamo" not in sys.modules, "imported by the op"
assert "dtgpt.ops.kernels.norm" not in kernels()
inputs = [each.bfloat16().requires_grad_() for each in inputs]
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
assert "dtgpt.ops.kernels.norm" in kernels()
made = layer(*inputs)
gradients = [torch.autograd.grad(each.sum(), inputs) for each in (compiled, made)]
assert torch.equal(compiled, made) and all(map(torch.equal, *gradients))
op = torch.compile(lambda x: torch.ops.dtgpt.swiglu(x), fullgraph=True, backend="eager")
assert torch.equal(op(x), eager) and torch.equal(torch.ops.dtgpt.swiglu(x), eager)
"""


@pytest.mark.slow(6)
@pytest.mark.compiler
def test_fp32_imports_no_kernels_an_op_no_compiler_and_a_first_compiled_call_both():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
