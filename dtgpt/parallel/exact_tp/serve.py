"""Which kernels can serve the sums of pieces, and when. `benchmarks/exact_tp.py --way kernels` takes them."""

from typing import Any

from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, has_hopper, has_triton, why_no_triton
from dtgpt.ops.linear import linear
from dtgpt.ops.operation import Kernel
from dtgpt.parallel.exact_tp.rows import length_of_piece

MANY = 512  # rows from which cuBLAS was seen to sum in one chain


def kernels():
    from dtgpt.parallel.exact_tp import kernels  # imported on first use, since it needs Triton

    return kernels


def _chains(x: Tensor, *_: Any) -> bool:
    return x.is_cuda and x.itemsize == 2 and len(x) > MANY


def _in_registers(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> bool:
    serves = _chains(x) and has_triton(x) and has_hopper(x.device)
    return serves and count > 1 and kernels().takes_tiles(x, weight, count, by_inputs)


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, by_inputs: bool) -> Tensor:
    return x @ weight if by_inputs else linear(x, weight, bias)


def _sums(x: Tensor, *_: Any) -> bool:
    return has_triton(x) and x.itemsize <= 4


def _row_sums(dy: Tensor, x: Tensor | None, count: int, *_: Any) -> bool:
    return _sums(dy) and length_of_piece(dy, count) % 8 == 0


def _column_sums(x: Tensor, count: int) -> Tensor:
    return kernels().piece_sums(x[None], None, 1, 0.0, False).flatten()


CHAINS = "of more than 512 rows in 16 bits on a GPU"
ADDENDS = (by_triton(lambda *given: kernels().tree_product(*given), _in_registers, f"{CHAINS} from Hopper on"),)
COLUMNS = (Kernel("cuBLAS, all columns", _chains, _whole, why_no_triton, CHAINS),)
COLUMN_SUMS = (by_triton(_column_sums, _sums),)
PIECE_SUMS = (by_triton(lambda *given: kernels().piece_sums(*given), _row_sums, "on GPUs, of pieces of 8 k positions"),)
