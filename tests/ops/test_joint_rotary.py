"""Queries and keys that are normalised over all heads and rotated: kernels against float64, by the interpreter and on a
GPU, the same gradients in every run, and modules that take the operation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dtgpt.ops.joint_rotary import JOINT_ROTARY
from dtgpt.ops.rotary_positions import Rotation, angle_table
from tests.support.interpreter import needs_triton, run_interpreted

PLACES = 640
Shape = tuple[int, int, int, int, int]  # B, T, G, R, D
CASES: list[tuple[Shape, float, bool]] = [  # with a limit, and positions that are given
    ((2, 5, 2, 2, 8), 0.0, False), ((1, 7, 3, 1, 12), 0.8, True), ((1, 40, 1, 3, 4), 0.9, False),
]  # fmt: skip
LARGE: list[tuple[Shape, float, bool]] = [((2, 600, 16, 1, 128), 0.0, False), ((1, 300, 8, 5, 128), 1.0, True)]


def inputs(shape: Shape, given: bool, dtype: torch.dtype, device: Any = "cpu") -> tuple[Tensor | None, list[Tensor]]:
    """Positions, and qkv and the two weights."""
    batch, length, groups, each, size = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    positions = torch.randint(0, PLACES, (batch, length), generator=generator).to(device) if given else None
    qkv = numbers(batch, length, groups, each + 2, size)
    weights = [1 + 0.1 * numbers(groups * each * size), 1 + 0.1 * numbers(groups * size)]
    return positions, [t.to(dtype).to(device) for t in (qkv, *weights)]


def check(shape: Shape, limit: float, given: bool, dtype: torch.dtype, tolerance: float, device: Any = "cpu") -> None:
    from dtgpt.ops.kernels import joint_rotary_kernels as kernels

    positions, (qkv, *weights) = inputs(shape, given, dtype, device)
    table = angle_table(Rotation(), shape[-1], PLACES, torch.device(device))
    found = kernels.joint_forward(qkv, positions, table, *weights, 1e-5, limit)
    leaves = [t.double().requires_grad_() for t in (qkv, *weights)]
    numbers = 1e-5, limit, Rotation().numbers, PLACES
    expected = JOINT_ROTARY.definition(leaves[0], positions, *leaves[1:], *numbers)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=tolerance, atol=tolerance)
    towards = [torch.randn_like(t).transpose(1, 2).contiguous().transpose(1, 2) for t in found]  # as attention has them
    back = (*towards, qkv, positions, table, *weights, 1e-5, limit)
    gradients = kernels.joint_backward(*back)
    exact = torch.autograd.grad(expected, leaves, [t.double() for t in towards])
    rounded = [t.requires_grad_() for t in (qkv, *weights)]  # rounding decides on which side of a limit a value is
    plain = JOINT_ROTARY.definition(rounded[0], positions, *rounded[1:], *numbers)
    by_definition = torch.autograd.grad(plain, rounded, towards)
    for one, rough, other in zip(gradients, by_definition, exact, strict=True):
        error, its = ((each.double() - other).norm() / other.norm() for each in (one, rough))
        assert error < 3 * tolerance + (its if limit else 0), (error, its)
    assert all(map(torch.equal, gradients, kernels.joint_backward(*back)))


INTERPRETED = """
import torch
from tests.ops.test_joint_rotary import CASES, check
for shape, limit, given in CASES:
    check(shape, limit, given, torch.float32, 1e-5)
check(*CASES[1], torch.float16, 4e-3)
"""


@needs_triton
@pytest.mark.slow(8)
def test_kernels_are_the_definition_in_the_interpreter():
    run_interpreted(INTERPRETED)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "limit", "given"), LARGE)
def test_kernels_are_the_definition(shape, limit, given, dtype):
    check(shape, limit, given, dtype, 2e-5 if dtype == torch.float32 else 2e-2, "cuda")


@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_the_custom_op_and_its_gradient_are_those_of_the_definition(limit):
    from dtgpt.ops.kernels.joint_rotary import _joint

    positions, leaves = inputs((1, 7, 3, 1, 12), True, torch.float64)
    numbers = 1e-5, limit, Rotation().numbers, PLACES
    found = []
    for function in (_joint, JOINT_ROTARY.definition):
        given = [t.clone().requires_grad_() for t in leaves]
        made = function(given[0], positions, *given[1:], *numbers)
        found.append([*made, *torch.autograd.grad(sum((i + 1) * t.square().sum() for i, t in enumerate(made)), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
