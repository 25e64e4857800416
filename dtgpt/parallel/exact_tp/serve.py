"""What serves the sums of pieces on a GPU, and when. No condition depends on how many pieces a rank has: all plans take
the same kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.activations import bias_gelu
from dtgpt.ops.kernels.devices import by_triton, has_hopper, has_triton, may_fuse, why_below
from dtgpt.ops.linear import linear
from dtgpt.ops.more_activations import bias_relu2
from dtgpt.ops.operation import Kernel
from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.exact_tp.rows import length_of_piece
from dtgpt.util.shared.gpu_limits import HOPPER

FEW = 512  # rows up to which cuBLAS was seen to split the sums of a product
LONG, MANY = 4096, 2**21  # terms of a sum that it may split in small products, and numbers of one that is not small
ALIGNED = 64  # columns, a multiple of which all pieces begin at, so that all have the same alignment
COLUMNS_OF_TILE, FEWEST = 128, 256  # columns that pieces are multiples of, and have at least, to be summed by threads


def kernels():
    from dtgpt.parallel.exact_tp import kernels  # imported on first use, since it needs Triton

    return kernels


def row_kernels():
    from dtgpt.parallel.exact_tp import row_kernels  # likewise

    return row_kernels


def _many_rows(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and len(x) > FEW and has_hopper(x.device)


def _in_registers(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> bool:
    columns = weight.shape[0 if by_inputs else 1]
    return has_triton(x) and _many_rows(x) and kernels().fits(len(x), columns, x.shape[1] // count)


def _in_one_chain(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, by_inputs: bool) -> bool:
    of_piece = weight.shape[1 if by_inputs else 0] // count
    return _many_rows(x) and of_piece % ALIGNED == 0 and (x.shape[1] < LONG or len(x) * of_piece >= MANY)


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, by_inputs: bool) -> Tensor:
    return x @ weight if by_inputs else linear(x, weight, bias)


def _aligned(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> bool:
    return _many_rows(dy) and (x if by_inputs else dy).shape[1] // count % ALIGNED == 0


def _views(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Return what `WEIGHT_GRADIENT` does: of views, each written to its place."""
    dy, x = operand(dy), operand(x)
    if by_inputs:
        return torch.cat([dy.t() @ part for part in x.chunk(count, 1)], dim=1)
    made = dy.new_empty(dy.shape[1], x.shape[1])
    for part, out in zip(dy.chunk(count, 1), made.chunk(count), strict=True):
        torch.mm(part.t(), x, out=out)
    return made


def _sizes(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> tuple[int, int]:
    """Return the sizes of a piece of the gradient of a weight."""
    height, width = dy.shape[1], x.shape[1]
    return (height, width // count) if by_inputs else (height // count, width)


def _large(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> bool:
    height, width = _sizes(dy, x, count, by_inputs)
    return _aligned(dy, x, count, by_inputs) and height * width >= MANY


def _in_chains(dy: Tensor, x: Tensor, *cut: Any) -> bool:
    return has_triton(dy) and _many_rows(dy) and kernels().serves_gradient(len(dy), _sizes(dy, x, *cut))


def _sums(x: Tensor, *_: Any) -> bool:
    return has_triton(x) and x.itemsize <= 4


def _column_tiles(x: Tensor, count: int) -> bool:
    of_piece = x.shape[-1] // count
    return _sums(x) and of_piece % COLUMNS_OF_TILE == 0 and of_piece >= FEWEST


def _row_groups(dy: Tensor, x: Tensor | None, count: int, *_: Any) -> bool:
    return _sums(dy) and length_of_piece(dy, count) % 8 == 0


def _in_one_pass(
    x: Tensor, branch: Any, branch_bias: Any, weight: Any, bias: Any, eps: float, key: Any, *rest: Any
) -> bool:
    given = [vector for vector in (branch_bias, weight, bias) if vector is not None]
    alike = len({vector.dtype for vector in given}) == 1 or (not given and key is not None)
    return may_fuse(x) and x.dim() == 3 and alike and _row_groups(x, None, rest[-1].number)


why_older = partial(why_below, HOPPER)
ROWS = f"bf16, over {FEW} rows"
ADDENDS = (
    Kernel(
        "Triton: pieces added as they are made",
        _in_registers,
        lambda *x: kernels().tree_product(*x),
        why_older,
        f"{ROWS} in tiles of 128 x 128, or 128 x 256 by warps that take turns where Gluon runs; pieces of 64 k terms",
    ),
)
COLUMNS = (
    Kernel(
        "cuBLAS, all columns at once",
        _in_one_chain,
        _whole,
        why_older,
        f"{ROWS}, pieces of {ALIGNED} k columns, below {LONG:,} terms or from 2^21 numbers on",
    ),
)
WEIGHT_GRADIENT = (
    Kernel(
        "cuBLAS, all pieces at once",
        _large,
        lambda dy, x, *_: operand(dy).t() @ operand(x),
        why_older,
        f"{ROWS}, pieces of {ALIGNED} k rows or columns and 2^21 numbers",
    ),
    Kernel(
        "Triton, all pieces at once",
        _in_chains,
        lambda *x: kernels().gradient_product(*x),
        why_older,
        f"{ROWS}, 256 k of them, pieces of 128 k rows and columns",
    ),
    Kernel("cuBLAS, pieces in place", _aligned, _views, why_older, f"{ROWS}, pieces of {ALIGNED} k rows or columns"),
)
# Of fewer columns a tile has its rows on several threads, and their sums another order.
OF_COLUMNS = f"pieces of {COLUMNS_OF_TILE} k columns, {FEWEST} of them at least"
COLUMN_SUMS = (by_triton(lambda *x: row_kernels().column_sums(*x), _column_tiles, OF_COLUMNS),)
ACTIVATED = (
    by_triton(
        lambda x, bias, activation, count: row_kernels().ActivatedInPieces.apply(x, bias, activation is bias_relu2),
        lambda x, bias, activation, count: (
            may_fuse(x) and activation in (bias_gelu, bias_relu2) and _column_tiles(x, count)
        ),
        f"gelu_tanh and relu2, {OF_COLUMNS}",
    ),
)
POSITIONS = "pieces of 8 k positions"
PIECE_SUMS = (by_triton(lambda *x: row_kernels().piece_sums(*x), _row_groups, POSITIONS),)
NORM_IN_PIECES = (by_triton(lambda *x: row_kernels().NormInPieces.apply(*x), _in_one_pass, POSITIONS),)
TREE_OF_STACK = (
    by_triton(
        lambda *x: row_kernels().tree_of_stack(*x), lambda x, *_: has_triton(x) and x.dtype == torch.float32, "fp32"
    ),
)
