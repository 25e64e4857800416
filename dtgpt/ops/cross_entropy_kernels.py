"""Triton kernels of `dtgpt.ops.cross_entropy`. To be imported where Triton is.

A row of 50304 bf16 logits is 100 KB. Few programs at a time, each with a row of its own, keep the rows in flight small
enough for the caches, so that a kernel that goes through a row twice reads it from device memory once.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 16384  # of a row, that a program takes at once
WARPS = 16
PROGRAMS = 2  # per multiprocessor
REGISTERS = 65536  # of a multiprocessor

LANE = tl.constexpr(8)  # neighbours that one thread reads: 16 bytes of a 16-bit dtype
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # for -inf, whose difference from itself is no number


@triton.jit
def load_block(line, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Logits `[BLOCK]` from column `first` on. The bound is WIDTH, a constant, and not where the padding begins, so
    that a thread's neighbours share one wide access."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(line + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def store_block(line, first, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    tl.store(line + columns, values.to(line.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def leave_padding(values, first, real, BLOCK: tl.constexpr):
    """In fp32, -inf from column `real` on, whatever lies there."""
    return tl.where(first + tl.arange(0, BLOCK) < real, values.to(tl.float32), float("-inf"))


@triton.jit
def exponential(difference):
    """Of a difference of logits, taken first: they may have a large common offset."""
    return tl.exp2(difference * LOG2E)


@triton.jit
def add_block(largest, total, values, BLOCK: tl.constexpr):
    """The running maximum and sum of exponentials of each lane, with a block more (Milakov and Gimelshein 2018): the
    threads meet only when the row is through."""
    lanes = tl.reshape(values, (BLOCK // LANE, LANE))
    peak = tl.maximum(largest, tl.max(lanes, 1))
    return peak, total * exponential(largest - peak) + tl.sum(exponential(lanes - peak[:, None]), 1)


@triton.jit
def statistics(line, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row and the sum of exponentials relative to it. A block is asked for while the one before
    it is worked on."""
    largest = tl.full((BLOCK // LANE,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    whole = real // BLOCK * BLOCK
    ahead = load_block(line, 0, WIDTH, BLOCK)
    for first in range(0, whole, BLOCK):
        values = ahead
        ahead = load_block(line, first + BLOCK, WIDTH, BLOCK)
        largest, total = add_block(largest, total, values.to(tl.float32), BLOCK)
    if whole < real:
        largest, total = add_block(largest, total, leave_padding(ahead, whole, real, BLOCK), BLOCK)
    top = tl.max(largest, 0)
    return top, tl.sum(total * exponential(largest - top), 0)


@triton.jit
def overwrite(line, real, column, hit, largest, total, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row becomes scale x (softmax - onehot), and 0 in the padding. Last columns first: they were read last."""
    share = scale / total
    whole = real // BLOCK * BLOCK
    ahead = load_block(line, tl.maximum(whole - BLOCK, 0), WIDTH, BLOCK)
    for first in range(whole, WIDTH, BLOCK):
        values = leave_padding(load_block(line, first, WIDTH, BLOCK), first, real, BLOCK)
        store_block(line, first, exponential(values - largest) * share, WIDTH, BLOCK)
    for done in range(0, whole, BLOCK):
        first = whole - BLOCK - done
        values = ahead
        ahead = load_block(line, tl.maximum(first - BLOCK, 0), WIDTH, BLOCK)
        store_block(line, first, exponential(values.to(tl.float32) - largest) * share, WIDTH, BLOCK)
    tl.debug_barrier()  # the target's column belongs to another thread
    gradient = (exponential(hit - largest) / total - 1) * scale
    tl.store(line + column, gradient.to(line.dtype.element_ty), mask=(column >= 0) & (column < real))


@triton.jit
def load_target(line, targets, row, start, real):
    """(local column of a row's target, its logit or 0 where it is not here)."""
    column = (tl.load(targets + row) - start).to(tl.int32)
    mine = (column >= 0) & (column < real)
    return column, tl.load(line + column, mask=mine, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["targets", "terms", "rows", "start", "real"])
def terms_kernel(logits, targets, terms, rows, start, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """terms fp32 `[3, rows]`: the largest logit, the sum of exponentials, the target's logit."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        _, hit = load_target(line, targets, row, start, real)
        largest, total = statistics(line, real, WIDTH, BLOCK)
        tl.store(terms + row, largest)
        tl.store(terms + rows + row, total)
        tl.store(terms + 2 * rows + row, hit)


@triton.jit(do_not_specialize=["targets", "largest", "total", "scale", "rows", "start", "real"])
def gradient_kernel(
    logits, targets, largest, total, scale, rows, start, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Logits become their gradient, from the statistics of whole rows."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        column, hit = load_target(line, targets, row, start, real)
        tl.debug_barrier()  # all threads have the target's logit before one of them overwrites it
        top, mass = tl.load(largest + row), tl.load(total + row)
        overwrite(line, real, column, hit, top, mass, tl.load(scale), WIDTH, BLOCK)


@triton.jit(do_not_specialize=["targets", "losses", "scale", "rows", "real"])
def loss_kernel(logits, targets, losses, scale, rows, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Both of the above where a row is whole, with its loss: a row comes from device memory once."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        column, hit = load_target(line, targets, row, 0, real)
        largest, total = statistics(line, real, WIDTH, BLOCK)  # its sums over threads are barriers too
        tl.store(losses + row, tl.log(total) - (hit - largest))
        overwrite(line, real, column, hit, largest, total, tl.load(scale), WIDTH, BLOCK)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(kernel, logits: Tensor, *arguments) -> None:
    rows, width = logits.shape
    grid = (min(rows, PROGRAMS * _multiprocessors(logits.device)),)
    block = min(BLOCK_BYTES // logits.element_size(), max(triton.next_power_of_2(width), LANE.value))
    options = {"num_warps": WARPS, "maxnreg": REGISTERS // (32 * WARPS * PROGRAMS)}
    kernel[grid](logits, *arguments, WIDTH=width, BLOCK=block, **options)


def launch_terms(logits: Tensor, targets: Tensor, start: int, real: int) -> Tensor:
    """logits `[rows, V_local]`, contiguous; targets int64 `[rows]` -> fp32 `[3, rows]`."""
    terms = torch.empty(3, len(logits), device=logits.device)
    _launch(terms_kernel, logits, targets, terms, len(logits), start, real)
    return terms


def launch_gradient(
    logits: Tensor, targets: Tensor, largest: Tensor, total: Tensor, scale: Tensor, start: int, real: int
) -> None:
    """In place. largest, total fp32 `[rows]` of whole rows; scale fp32 `[]`."""
    _launch(gradient_kernel, logits, targets, largest, total, scale, len(logits), start, real)


def launch_loss(logits: Tensor, targets: Tensor, scale: Tensor, real: int) -> Tensor:
    """Losses fp32 `[rows]`; the logits become scale x their gradients."""
    losses = torch.empty(len(logits), device=logits.device)
    _launch(loss_kernel, logits, targets, losses, scale, len(logits), real)
    return losses


@triton.jit
def scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < count)
    tl.store(out + place, values.to(tl.float32) * tl.load(factor), mask=place < count)


def launch_scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times the fp32 scalar `factor` that lies on the device."""
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 4096),)](x, factor, out, x.numel(), BLOCK=4096, num_warps=8)
    return out
