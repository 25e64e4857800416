"""Bias and GELU, and the gradient of a bias, against PyTorch's eager and compiled code."""

import torch
from cases import ONE_TILE, Case, both_ways, run_cases, variants_of
from torch import Tensor

from dtgpt.ops.activations import bias_gelu, gelu_reference
from dtgpt.ops.kernels import column_kernels, gelu_kernels
from dtgpt.ops.kernels.column_kernels import ColumnLaunch

CUDA = torch.device("cuda")
FORWARD = [ColumnLaunch(*sizes) for sizes in [(4, 8, 32, 1), (4, 8, 32, 2), (4, 8, ONE_TILE, 1), (2, 8, 32, 2)]]
BACKWARD = [
    ColumnLaunch(*sizes) for sizes in [(4, 8, 16, 1), (4, 8, 16, 2), (2, 8, 24, 1), (2, 8, 24, 2), (4, 8, 32, 1)]
]
COLUMN_SUM = [ColumnLaunch(*sizes) for sizes in [(8, 8, 32, 1), (8, 8, 32, 2), (16, 8, 16, 1), (4, 8, 48, 2)]]


def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy, bias."""
    return tuple(torch.randn(s, device=CUDA, dtype=dtype) for s in [(rows, columns), (rows, columns), (columns,)])


def forward_case(launches: list[ColumnLaunch], rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    x, _, bias = draw(rows, columns, dtype)
    variants = variants_of(launches, lambda launch: gelu_kernels.bias_gelu_forward(x, bias, launch))
    return Case(f"bias + GELU forward, {rows} x {columns}, {dtype}", variants, bytes=2 * x.nbytes)


def backward_case(launches: list[ColumnLaunch], rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    x, dy, bias = draw(rows, columns, dtype)
    variants = variants_of(launches, lambda launch: gelu_kernels.bias_gelu_backward(dy, x, bias, launch))
    return Case(f"bias + GELU backward, {rows} x {columns}, {dtype}", variants, bytes=3 * x.nbytes)


def sum_case(rows: int, columns: int) -> Case:
    x, *_ = draw(rows, columns, torch.bfloat16)
    variants = variants_of(COLUMN_SUM, lambda launch: column_kernels.column_sum(x, launch))
    variants["eager"] = lambda: x.sum(0)
    return Case(f"gradient of a bias, {rows} x {columns}", variants, bytes=x.nbytes)


def cases() -> list[Case]:
    k = 1024
    x, _, bias = draw(32 * k, 4096, torch.bfloat16)
    gelu = both_ways(f"bias + GELU, {32 * k} x 4096", bias_gelu, gelu_reference, [x, bias], 5 * x.nbytes)
    found = [backward_case(BACKWARD, 32 * k, 4096), forward_case(FORWARD, 32 * k, 4096), gelu]
    found += [backward_case(BACKWARD[:2], 16 * k, 4096), backward_case(BACKWARD[:2], 64 * k, 3072)]
    found += [backward_case(BACKWARD[:1], 16 * k, 4096, torch.float32)]
    return [
        *found,
        forward_case(FORWARD[:1], 16 * k, 4096, torch.float32),
        sum_case(16 * k, 3072),
        sum_case(32 * k, 1024),
    ]


if __name__ == "__main__":
    run_cases(cases())
