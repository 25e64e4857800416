"""Triton kernels of `dtgpt.ops.loss.cross_entropy`. Needs Triton.

A row of 50304 bf16 logits is 100 KB. Few programs run at a time, each on its own row, so that the rows in flight fit in
the caches and a kernel that goes through a row twice reads it from device memory once. Of narrow rows there are more,
each of fewer warps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.devices import multiprocessors

BLOCK_BYTES = 16384  # of a row, that a program takes at once
WARPS = 16
PROGRAMS = 2  # per multiprocessor
NARROW = 8192  # columns of rows for which a program has a part of the warps, and there are as many more programs:
TERMS_PARTS, GRADIENT_PARTS = 16, 2
REGISTERS = 65536  # of a multiprocessor

LANE = tl.constexpr(8)  # neighbours that one thread reads: 16 bytes of a 16-bit dtype
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # for -inf, whose difference from itself is NaN


@triton.jit
def load_block(line, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return logits `[BLOCK]` from column `first` on. The bound is the constant WIDTH, not the start of the padding, so
    that a thread's neighbours share one wide access."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(line + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def store_block(line, first, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    tl.store(line + columns, values.to(line.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def leave_padding(values, first, real, BLOCK: tl.constexpr):
    """Return the values in fp32, with -inf from column `real` on."""
    return tl.where(first + tl.arange(0, BLOCK) < real, values.to(tl.float32), float("-inf"))


@triton.jit
def shrinkage(values, CAP: tl.constexpr):
    """Return the ratio of capped logits to the logits, fp32; the slope of the cap is its third power."""
    return tl.rsqrt(values * values * (1 / (CAP * CAP)) + 1.0)


@triton.jit
def softly(values, CAP: tl.constexpr):
    """Return the logits in fp32, bounded by `dtgpt.ops.loss.cross_entropy.capped`."""
    values = values.to(tl.float32)
    if CAP > 0:
        values *= shrinkage(values, CAP)
    return values


@triton.jit
def gradient_of(values, largest, factor, CAP: tl.constexpr):
    """Return factor x exp(capped logit - largest), times the slope of the cap; values: logits in fp32."""
    if CAP > 0:
        root = shrinkage(values, CAP)
        return exponential(values * root - largest) * factor * (root * root * root)
    return exponential(values - largest) * factor


@triton.jit
def exponential(difference):
    """Return the exponential of a difference of logits, whose large common offset is gone."""
    return tl.exp2(difference * LOG2E)


@triton.jit
def add_block(largest, total, values, BLOCK: tl.constexpr):
    """Update the running maximum and sum of exponentials of each lane with a block (Milakov and Gimelshein 2018):
    threads synchronise only at the end of the row."""
    lanes = tl.reshape(values, (BLOCK // LANE, LANE))
    peak = tl.maximum(largest, tl.max(lanes, 1))
    return peak, total * exponential(largest - peak) + tl.sum(exponential(lanes - peak[:, None]), 1)


@triton.jit
def statistics(line, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):
    """Return the largest logit of a row and the sum of exponentials relative to it. The next block is loaded while the
    current one is processed."""
    largest = tl.full((BLOCK // LANE,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    whole = real // BLOCK * BLOCK
    ahead = load_block(line, 0, WIDTH, BLOCK)
    for first in range(0, whole, BLOCK):
        values = ahead
        ahead = load_block(line, first + BLOCK, WIDTH, BLOCK)
        largest, total = add_block(largest, total, softly(values, CAP), BLOCK)
    if whole < real:
        largest, total = add_block(largest, total, leave_padding(softly(ahead, CAP), whole, real, BLOCK), BLOCK)
    top = tl.max(largest, 0)
    return top, tl.sum(total * exponential(largest - top), 0)


@triton.jit
def overwrite(
    line, real, column, hit, largest, total, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr
):
    """Replace the row by scale x (softmax - onehot), times the slope of the cap, and by 0 in the padding. The last
    columns come first, since they were read last and are still in the cache."""
    factor = scale / total
    whole = real // BLOCK * BLOCK
    ahead = load_block(line, tl.maximum(whole - BLOCK, 0), WIDTH, BLOCK)
    for first in range(whole, WIDTH, BLOCK):
        values = gradient_of(load_block(line, first, WIDTH, BLOCK).to(tl.float32), largest, factor, CAP)
        values = tl.where(first + tl.arange(0, BLOCK) < real, values, 0.0)
        store_block(line, first, values, WIDTH, BLOCK)
    for done in range(0, whole, BLOCK):
        first = whole - BLOCK - done
        values = ahead
        ahead = load_block(line, tl.maximum(first - BLOCK, 0), WIDTH, BLOCK)
        store_block(line, first, gradient_of(values.to(tl.float32), largest, factor, CAP), WIDTH, BLOCK)
    tl.debug_barrier()  # the target's column belongs to another thread
    gradient = (exponential(softly(hit, CAP) - largest) / total - 1) * scale
    if CAP > 0:
        root = shrinkage(hit, CAP)
        gradient *= root * root * root
    tl.store(line + column, gradient.to(line.dtype.element_ty), mask=(column >= 0) & (column < real))


@triton.jit
def load_target(line, targets, row, start, real):
    """Return (local column of a row's target, its logit, or 0 where another rank holds it)."""
    column = (tl.load(targets + row) - start).to(tl.int32)
    mine = (column >= 0) & (column < real)
    return column, tl.load(line + column, mask=mine, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["targets", "terms", "rows", "start", "real"])
def terms_kernel(
    logits, targets, terms, rows, start, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr
):
    """Write terms, fp32 `[3, rows]`: the largest logit, the sum of exponentials, the target's logit."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        _, hit = load_target(line, targets, row, start, real)
        largest, total = statistics(line, real, WIDTH, BLOCK, CAP)
        tl.store(terms + row, largest)
        tl.store(terms + rows + row, total)
        tl.store(terms + 2 * rows + row, softly(hit, CAP))


@triton.jit(do_not_specialize=["targets", "largest", "total", "scale", "rows", "start", "real"])
def gradient_kernel(
    logits,
    targets,
    largest,
    total,
    scale,
    rows,
    start,
    real,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Replace logits by their gradient, from the statistics of whole rows. SCALES: 1 where each row has one, else 0."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        column, hit = load_target(line, targets, row, start, real)
        tl.debug_barrier()  # all threads have the target's logit before one of them overwrites it
        top, mass = tl.load(largest + row), tl.load(total + row)
        overwrite(line, real, column, hit, top, mass, tl.load(scale + row * SCALES), WIDTH, BLOCK, CAP)


@triton.jit(do_not_specialize=["targets", "losses", "scale", "rows", "real"])
def loss_kernel(
    logits,
    targets,
    losses,
    scale,
    rows,
    real,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Do the work of both kernels above for whole rows, and write losses: a row is read from device memory once. scale
    None: the logits stay."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * WIDTH
        column, hit = load_target(line, targets, row, 0, real)
        largest, total = statistics(line, real, WIDTH, BLOCK, CAP)  # its sums over threads are barriers too
        tl.store(losses + row, tl.log(total) - (softly(hit, CAP) - largest))
        if scale is not None:
            factor = tl.load(scale + row * SCALES)
            overwrite(line, real, column, hit, largest, total, factor, WIDTH, BLOCK, CAP)


def _launch(kernel, logits: Tensor, *arguments, cap: float, parts: int = 1, **constants: int) -> None:
    rows, width = logits.shape
    parts = parts if width <= NARROW else 1
    grid = (min(rows, PROGRAMS * parts * multiprocessors(logits.device)),)
    block = min(BLOCK_BYTES // parts // logits.element_size(), max(triton.next_power_of_2(width), LANE.value))
    options = {"num_warps": WARPS // parts, "maxnreg": REGISTERS // (32 * WARPS * PROGRAMS)}
    kernel[grid](logits, *arguments, WIDTH=width, BLOCK=block, CAP=cap, **constants, **options)


def launch_terms(logits: Tensor, targets: Tensor, start: int, real: int, cap: float = 0.0) -> Tensor:
    """Return fp32 `[3, rows]` for logits `[rows, V_local]`, contiguous, and targets int64 `[rows]`."""
    terms = torch.empty(3, len(logits), device=logits.device)
    _launch(terms_kernel, logits, targets, terms, len(logits), start, real, cap=cap, parts=TERMS_PARTS)
    return terms


def launch_gradient(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    scale: Tensor,
    start: int,
    real: int,
    cap: float = 0.0,
) -> None:
    """Replace logits by their gradient; largest, total: fp32 `[rows]` of whole rows; scale: fp32 `[]` or `[rows]`."""
    arguments = targets, largest, total, scale, len(logits), start, real
    _launch(gradient_kernel, logits, *arguments, cap=cap, parts=GRADIENT_PARTS, SCALES=scale.dim())


def launch_loss(logits: Tensor, targets: Tensor, scale: Tensor | None, real: int, cap: float = 0.0) -> Tensor:
    """Return losses, fp32 `[rows]`, and replace the logits by scale x their gradients, unless scale is None."""
    losses = torch.empty(len(logits), device=logits.device)
    scales = 0 if scale is None else scale.dim()
    _launch(loss_kernel, logits, targets, losses, scale, len(logits), real, cap=cap, SCALES=scales)
    return losses


@triton.jit
def scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < count)
    tl.store(out + place, values.to(tl.float32) * tl.load(factor), mask=place < count)


def launch_scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times the fp32 scalar `factor`, which is on the device."""
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 4096),)](x, factor, out, x.numel(), BLOCK=4096, num_warps=8)
    return out
