"""Triton kernels of `dtgpt.ops.experts`. Needs Triton. Rows and elements of stacks are addressed by 64 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048  # that a program of rows or sums takes, at most
PART = 1024  # that a program of gradients takes at a time, at most: another number sums in another order


@triton.jit
def find_rows(ends, tile, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return (expert, first row, end of the expert's rows) of a tile, of ROWS rows of one expert each; expert E: there
    are no more. EXPERTS: a power of two from E on."""
    own = tl.arange(0, EXPERTS)
    last = tl.load(ends + own, own < E, 0)
    first = tl.load(ends + own - 1, (own > 0) & (own < E), 0)
    tiles = tl.where(own < E, (last - first + ROWS - 1) // ROWS, 0)
    up_to = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((up_to <= tile) & (own < E), 1, 0), 0)
    before = tl.sum(tl.where(own < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(own == expert, first, 0), 0)
    end = tl.sum(tl.where(own == expert, last, 0), 0)
    return expert, begin + (tile - before) * ROWS, end


@triton.jit
def product_kernel(
    x,
    weight,
    ends,
    y,
    N,
    K,
    per_expert,
    per_row,
    per_column,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute a tile of y `[M, N]` from x `[M, K]` and the matrix `[N, K]` of the tile's expert."""
    expert, begin, end = find_rows(ends, tl.program_id(0), E, EXPERTS, ROWS)
    if expert < E:
        rows = (begin + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, INNER)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        own = weight + expert.to(tl.int64) * per_expert
        for k in range(0, K, INNER):
            here = k + inner
            a = tl.load(x + rows[:, None] * K + here[None, :], (rows[:, None] < end) & (here[None, :] < K), 0.0)
            at = columns[None, :].to(tl.int64) * per_row + here[:, None].to(tl.int64) * per_column
            b = tl.load(own + at, (columns[None, :] < N) & (here[:, None] < K), 0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(
            y + rows[:, None] * N + columns[None, :],
            total.to(y.dtype.element_ty),
            (rows[:, None] < end) & (columns[None, :] < N),
        )


@triton.jit
def outer_kernel(dy, x, ends, dweight, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """Compute a tile of the gradient `[N, K]` of an expert's matrix from its rows of dy `[M, N]` and x `[M, K]`, in
    their order; zeros where it has none."""
    expert = tl.program_id(2)
    begin = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.program_id(1) * INNER + tl.arange(0, INNER)
    total = tl.zeros((COLUMNS, INNER), tl.float32)
    for first in range(begin, end, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        a = tl.load(dy + rows[None, :] * N + columns[:, None], (rows[None, :] < end) & (columns[:, None] < N), 0.0)
        b = tl.load(x + rows[:, None] * K + inner[None, :], (rows[:, None] < end) & (inner[None, :] < K), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = (expert.to(tl.int64) * N + columns[:, None]) * K + inner[None, :]
    tl.store(dweight + at, total.to(dweight.dtype.element_ty), (columns[:, None] < N) & (inner[None, :] < K))


@triton.jit
def spread_kernel(x, places, y, F, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a part of one token's row `[F]` to each of its places, but -1: it is read once, and not once for each of
    them."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * F + columns, columns < F)
    for slot in tl.static_range(SLOTS):
        row = tl.load(places + token * SLOTS + slot)
        tl.store(y + row * F + columns, value, (columns < F) & (row >= 0))


@triton.jit
def weighted_kernel(y, weights, places, out, F, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a part of one token's sum `[F]` over its slots of weight, None: of 1, times row of y; places None: as they
    lie; -1: the slot has none."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        at = token * SLOTS + slot
        row = at if places is None else tl.load(places + at)
        value = tl.load(y + row * F + columns, (columns < F) & (row >= 0), 0.0).to(tl.float32)
        if weights is None:
            total += value
        else:
            total += tl.load(weights + at) * value
    tl.store(out + token * F + columns, total.to(out.dtype.element_ty), columns < F)


@triton.jit
def gradients_kernel(grad, y, weights, places, dy, dweights, F, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write for one slot the gradient `[F]` of its row, and that of its weight. Row -1: it has none, and zero."""
    slot = tl.program_id(0).to(tl.int64)
    token, row = slot // SLOTS, tl.load(places + slot)
    weight = tl.load(weights + slot)
    product = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        here = (columns < F) & (row >= 0)
        own = tl.load(grad + token * F + columns, here, 0.0).to(tl.float32)
        product += own * tl.load(y + row * F + columns, here, 0.0).to(tl.float32)
        tl.store(dy + row * F + columns, (weight * own).to(dy.dtype.element_ty), here)
    tl.store(dweights + slot, tl.sum(product, 0))


def _tile(x: Tensor) -> dict[str, int]:
    """Return the sides of a tile, and how it is distributed: products of fp32 are no work of tensor cores."""
    if x.dtype == torch.float32:
        return {"ROWS": 32, "COLUMNS": 64, "INNER": 32, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 64, "COLUMNS": 128, "INNER": 32, "num_warps": 4, "num_stages": 3}


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x w^T `[M, N]` of x `[M, K]`, each row by the matrix of its expert of `[E, N, K]`, which may have any
    strides."""
    x, tile = x.contiguous(), _tile(x)
    (rows, inner), (count, columns, _) = x.shape, weight.shape
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    # Each expert may leave a tile unfilled.
    grid = (triton.cdiv(rows, tile["ROWS"]) + count, triton.cdiv(columns, tile["COLUMNS"]))
    experts = max(2, triton.next_power_of_2(count))
    product_kernel[grid](x, weight, ends, y, columns, inner, *weight.stride(), E=count, EXPERTS=experts, **tile)
    return y


def grouped_outer(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return for each expert the sum over its rows of dy `[M, N]` times x `[M, K]`: `[E, N, K]`."""
    dy, x, tile = dy.contiguous(), x.contiguous(), _tile(x)
    (_, columns), inner, count = dy.shape, x.shape[1], len(ends)
    dweight = torch.empty(count, columns, inner, dtype=x.dtype, device=x.device)
    tile = {**tile, "INNER": 64}
    grid = (triton.cdiv(columns, tile["COLUMNS"]), triton.cdiv(inner, tile["INNER"]), count)
    outer_kernel[grid](dy, x, ends, dweight, columns, inner, **tile)
    return dweight


def _parts(x: Tensor) -> tuple[int, dict[str, int]]:
    """Return how many programs share a row of x, which are few, since memory is fastest where rows are written at once,
    and what each is launched with: a thread moves 16 bytes of a row."""
    block = min(triton.next_power_of_2(x.shape[1]), COLUMNS)
    return triton.cdiv(x.shape[1], block), {"BLOCK": block, "num_warps": max(1, block * x.element_size() // 512)}


def spread_rows(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return so many rows of a contiguous x `[N, F]`: at each of the places int64 `[N, k]`, but -1, its token's."""
    (count, slots), size = places.shape, x.shape[1]
    y = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    parts, options = _parts(x)
    spread_kernel[(count, parts)](x, places, y, size, SLOTS=slots, **options)
    return y


def weighted_rows(y: Tensor, weights: Tensor | None, places: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return what the operation does of a contiguous y `[M, F]`, in its type or in another one. places None: y has the
    rows of slots in order."""
    shaped = places if weights is None else weights
    assert shaped is not None
    (count, slots), size = shaped.shape, y.shape[1]
    y, weights = y.contiguous(), None if weights is None else weights.contiguous()
    out = torch.empty(count, size, dtype=dtype or y.dtype, device=y.device)
    parts, options = _parts(y)
    weighted_kernel[(count, parts)](y, weights, places, out, size, SLOTS=slots, **options)
    return out


def weighted_rows_gradients(
    grad: Tensor, y: Tensor, weights: Tensor, places: Tensor, tokens: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weights."""
    count, size = places.shape[1], y.shape[1]
    grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    block = min(triton.next_power_of_2(size), PART)
    gradients_kernel[(places.numel(),)](grad, y, weights, places, dy, dweights, size, SLOTS=count, BLOCK=block)
    return dy, dweights
