"""Triton kernels of `dtgpt.ops.random.dropout` and of the keys of its sites. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.triton_philox import keep_tile, philox
from dtgpt.ops.random.philox import FOLD

ROWS, BLOCKS = 8, 64  # of a tile: 8 rows of 64 x 8 columns


@triton.jit
def dropout_kernel(
    x,
    key,
    key_stride,
    out,
    rows,
    columns,
    drop,
    scale,
    first_row,
    first_column,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Drop elements of x `[B, rows, columns]`; a program takes one tile of a sample."""
    sample = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.program_id(0) * BLOCKS * 8 + tl.arange(0, BLOCKS * 8)
    k0, k1 = tl.load(key + key_stride * sample), tl.load(key + key_stride * sample + 1)
    keep = keep_tile(k0, k1, row + first_row, block + first_column // 8, 0, 0, drop)
    place = (sample * rows + row[:, None]) * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + place, inside).to(tl.float32)
    tl.store(out + place, tl.where(keep, values * scale, 0.0), inside)


def launch_dropout(x: Tensor, key: Tensor, drop: int, scale: float, start: list[int]) -> Tensor:
    """Return x `[B, R, C]`, contiguous, after dropout. key: `[B, 2]`, the two words of each adjacent; start: global row
    and column of the first element, the column a multiple of eight."""
    samples, rows, columns = x.shape
    out = torch.empty_like(x)
    grid = (triton.cdiv(columns, 8 * BLOCKS), triton.cdiv(rows, ROWS), samples)
    stride = key.stride(0)  # keys of one site are a slice of those of all sites
    dropout_kernel[grid](x, key, stride, out, rows, columns, drop, scale, *start, ROWS=ROWS, BLOCKS=BLOCKS)
    return out


@triton.jit
def fold_words(k0, k1, data):
    """Fold an int64 into a key, as `philox.fold`: the first two words of Philox with the data as counter."""
    low, high = (data & 0xFFFFFFFF).to(tl.uint32), ((data >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, _, _ = philox(k0.to(tl.uint32), k1.to(tl.uint32), low, high, low * 0, low * 0 + FOLD_WORD)
    return w0.to(tl.int64) & 0xFFFFFFFF, w1.to(tl.int64) & 0xFFFFFFFF


FOLD_WORD = tl.constexpr(FOLD)


@triton.jit
def keys_kernel(key, samples, out, sites, SITES: tl.constexpr):
    """Write out `[B, sites, 2]`, the keys of all sites; a program takes one sample."""
    sample = tl.load(samples + tl.program_id(0))
    site = tl.arange(0, SITES)
    k0, k1 = fold_words(tl.load(key), tl.load(key + 1), sample)
    k0, k1 = fold_words(k0, k1, site.to(tl.int64))
    place = out + (tl.program_id(0) * sites + site) * 2
    tl.store(place, k0, site < sites)
    tl.store(place + 1, k1, site < sites)


def launch_keys(key: Tensor, sample_ids: Tensor, sites: int) -> Tensor:
    """Return int64 `[B, sites, 2]` for key int64 `[2]` and sample_ids int64 `[B]`."""
    out = torch.empty(len(sample_ids), sites, 2, dtype=torch.int64, device=key.device)
    keys_kernel[(len(sample_ids),)](key, sample_ids, out, sites, SITES=triton.next_power_of_2(sites))
    return out
