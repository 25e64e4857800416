"""Triton kernels that process lists of tensors in one launch. Needs Triton.

A program takes one chunk of one tensor. It reads which one, and its address, from tables on the device: `chunks` and
`rows`, which are constant for the lifetime of an optimizer, and `gradients`, which autograd allocates in every step.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 2048, 8  # elements of a program, and its warps: eight elements a thread, 16 bytes of bf16

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Table:
    """The device tables that describe the tensors to which a list of gradients belongs."""

    def __init__(self, sizes: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device):
        """Build the tables. sizes: elements of each tensor; columns: further values for each, such as addresses."""
        self.chunk, self.warps = CHUNK, WARPS
        self.rows = torch.tensor([sizes, *columns], dtype=torch.int64).T.contiguous().to(device)  # [N, 1 + columns]
        self.gradients = torch.zeros(len(sizes), dtype=torch.int64, device=device)  # addresses
        self._cells = self.gradients.unbind()
        counts = torch.tensor([triton.cdiv(size, CHUNK) for size in sizes])
        tensors = torch.arange(len(sizes)).repeat_interleave(counts)
        places = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
        self.chunks = torch.stack([tensors, places], dim=1).to(device, torch.int32)  # [programs, 2]: tensor, its chunk

    def launches(self, gradients: list[Tensor], kinds: list) -> Iterator:
        """Yield each of the different `kinds` of gradients once, after writing the addresses of gradients of that kind,
        and 0 for the others, to `self.gradients`.

        The addresses reach the device as arguments of PyTorch's own multi-tensor kernel, not through host memory that
        would have to outlive the copy. So nothing waits, and a CUDA graph keeps the addresses that it captured.
        """
        for kind in dict.fromkeys(kinds) if len(self.chunks) else ():
            addresses = [g.data_ptr() if k == kind else 0 for g, k in zip(gradients, kinds, strict=True)]
            self.gradients.zero_()
            torch._foreach_add_(self._cells, addresses)
            yield kind

    @property
    def grid(self) -> tuple[int]:
        return (len(self.chunks),)


def adamw(
    table: Table, gradients: list[Tensor], narrow: list, numbers: Tensor, skip: Tensor | None, betas, eps
) -> None:
    """Apply `adamw.reference` to all tensors. narrow: dtypes, or None. Columns of the table: addresses of
    master, exp_avg, exp_avg_sq and narrow (0: none), and whether the weight decays."""
    kinds = [(g.dtype, dtype) for g, dtype in zip(gradients, narrow, strict=True)]
    beta1, beta2 = betas
    for gradient, weight in table.launches(gradients, kinds):
        _adamw[table.grid](
            table.chunks, table.rows, table.gradients, numbers, skip, 1 - beta1, beta2, 1 - beta2, eps,
            GRADIENT=DTYPES[gradient], NARROW=None if weight is None else DTYPES[weight], CHUNK=table.chunk,
            num_warps=table.warps,
        )  # fmt: skip


def accumulate(table: Table, gradients: list[Tensor]) -> None:
    """Add gradients to fp32 totals. Column of the table: addresses of the totals."""
    for dtype in table.launches(gradients, [g.dtype for g in gradients]):
        _accumulate[table.grid](
            table.chunks, table.rows, table.gradients, GRADIENT=DTYPES[dtype], CHUNK=table.chunk, num_warps=table.warps
        )


def accumulate_fixed(
    table: Table, gradients: list[Tensor], misfits: Tensor, factor: float, limit: float, first: bool
) -> None:
    """Add gradients times `factor` to int64 totals, or set these to them in the `first` call; count in `misfits` those
    beyond the limit. Column of the table: addresses of the totals."""
    for dtype in table.launches(gradients, [g.dtype for g in gradients]):
        _accumulate_fixed[table.grid](
            table.chunks, table.rows, table.gradients, misfits, factor, limit,
            GRADIENT=DTYPES[dtype], FIRST=first, CHUNK=table.chunk, num_warps=table.warps,
        )  # fmt: skip


def squares_of_rows(x: Tensor) -> Tensor:
    """Return the sum of squares of each row of a contiguous fp32 `x [R, C]`, fp64 `[R]`."""
    sums = torch.empty(len(x), dtype=torch.float64, device=x.device)
    _squares_of_rows[(len(x),)](x, sums, x[0].numel(), BLOCK=1024, num_warps=4)
    return sums


@triton.jit
def _adamw(
    chunks, rows, gradients, numbers, skip, share1, beta2, share2, eps,
    GRADIENT: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if skip is not None:  # noqa: SIM102 (Triton compiles both sides of an `and`)
        if tl.load(skip):
            return
    tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + tensor)
    if gradient == 0:
        return
    row = rows + 6 * tensor
    size = tl.load(row)
    master, mean, square, narrow = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    kept = tl.where(tl.load(row + 5) != 0, tl.load(numbers + 1), 1.0)
    scale, rate, root = tl.load(numbers), tl.load(numbers + 2), tl.load(numbers + 3)

    if (start + CHUNK <= size) & ((gradient | master | mean | square | narrow) % 16 == 0):
        _adamw_chunk(
            gradient, master, mean, square, narrow, start, None,
            scale, kept, rate, root, share1, beta2, share2, eps, GRADIENT, NARROW, CHUNK,
        )  # fmt: skip
    else:
        _adamw_chunk(
            gradient, master, mean, square, narrow, start, size,
            scale, kept, rate, root, share1, beta2, share2, eps, GRADIENT, NARROW, CHUNK,
        )  # fmt: skip


@triton.jit
def _adamw_chunk(
    gradient, master, mean, square, narrow, start, size, scale, kept, rate, root, share1, beta2, share2, eps,
    GRADIENT: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    mask = None if size is None else tl.arange(0, CHUNK) < size - start
    p = _elements(master, tl.float32, start, size, CHUNK)
    m = _elements(mean, tl.float32, start, size, CHUNK)
    v = _elements(square, tl.float32, start, size, CHUNK)
    g = tl.load(_elements(gradient, GRADIENT, start, size, CHUNK), mask).to(tl.float32) * scale
    weight, first, second = tl.load(p, mask), tl.load(m, mask), tl.load(v, mask)
    first += share1 * (g - first)
    second = beta2 * second + share2 * g * g
    weight = weight * kept - rate * (first / (tl.sqrt(second) / root + eps))
    tl.store(p, weight, mask)
    tl.store(m, first, mask)
    tl.store(v, second, mask)
    if NARROW is not None:
        tl.store(_elements(narrow, NARROW, start, size, CHUNK), weight.to(NARROW), mask)


@triton.jit
def _accumulate(chunks, rows, gradients, GRADIENT: tl.constexpr, CHUNK: tl.constexpr):
    tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + tensor)
    if gradient == 0:
        return
    size, total = tl.load(rows + 2 * tensor), tl.load(rows + 2 * tensor + 1)
    if (start + CHUNK <= size) & ((gradient | total) % 16 == 0):
        _accumulate_chunk(gradient, total, start, None, GRADIENT, CHUNK)
    else:
        _accumulate_chunk(gradient, total, start, size, GRADIENT, CHUNK)


@triton.jit
def _accumulate_chunk(gradient, total, start, size, GRADIENT: tl.constexpr, CHUNK: tl.constexpr):
    mask = None if size is None else tl.arange(0, CHUNK) < size - start
    t = _elements(total, tl.float32, start, size, CHUNK)
    g = tl.load(_elements(gradient, GRADIENT, start, size, CHUNK), mask).to(tl.float32)
    tl.store(t, tl.load(t, mask) + g, mask)


@triton.jit
def _accumulate_fixed(
    chunks, rows, gradients, misfits, factor, limit, GRADIENT: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr
):
    tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + tensor)
    if gradient == 0:
        return
    size, total = tl.load(rows + 2 * tensor), tl.load(rows + 2 * tensor + 1)
    if (start + CHUNK <= size) & ((gradient | total) % 16 == 0):
        _accumulate_fixed_chunk(gradient, total, start, None, misfits, factor, limit, GRADIENT, FIRST, CHUNK)
    else:
        _accumulate_fixed_chunk(gradient, total, start, size, misfits, factor, limit, GRADIENT, FIRST, CHUNK)


@triton.jit
def _accumulate_fixed_chunk(
    gradient, total, start, size, misfits, factor, limit,
    GRADIENT: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    mask = None if size is None else tl.arange(0, CHUNK) < size - start
    t = _elements(total, tl.int64, start, size, CHUNK)
    g = tl.load(_elements(gradient, GRADIENT, start, size, CHUNK), mask).to(tl.float32)
    fits = tl.abs(g) <= limit
    value = (tl.where(fits, g, 0.0) * factor).to(tl.int64)
    if not FIRST:
        value += tl.load(t, mask)
    tl.store(t, value, mask)
    beyond = ~fits if mask is None else ~fits & mask
    if tl.max(beyond.to(tl.int32), axis=0) > 0:
        tl.atomic_add(misfits, 1)


@triton.jit
def _squares_of_rows(x, sums, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + at, at < columns, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit
def _elements(address, DTYPE: tl.constexpr, start, size, CHUNK: tl.constexpr):
    """Return pointers to the chunk from element `start` on. size None: the chunk is whole and the tensor is aligned to
    16 bytes. With this hint, and without a mask, the compiler emits accesses of 16 bytes."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if size is None:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, CHUNK)
