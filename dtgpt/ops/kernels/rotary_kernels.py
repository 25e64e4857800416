"""Triton kernels of `dtgpt.ops.rotary_positions`. Needs Triton.

A tile is some tokens of one group: the R heads of q that share a head of k and v, then these two. Its angles are loaded
once and stay in registers while the program goes over the heads. Gradients of the norms' weights are summed in two
stages, so that they are the same in every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import sum_partials
from dtgpt.ops.kernels.devices import multiprocessors


class RotaryLaunch(NamedTuple):
    """How a kernel is distributed over the device."""

    elements: int  # of half a head times the tokens of a tile
    warps: int


FORWARD = RotaryLaunch(elements=512, warps=4)
BACKWARD = RotaryLaunch(elements=512, warps=4)
MOST_TOKENS = 128  # of a tile
SUMMING = 16  # warps per multiprocessor in all programs together, where programs sum gradients of weights

# Sizes that differ between batches and shards. They are not specialised, so that one binary serves all of them.
SIZES = ["tokens", "length", "num_positions"]


@triton.jit
def load_halves(source, mask, HALF: tl.constexpr):
    """Return both halves of heads in fp32; source: pointers to the first."""
    first, second = tl.load(source, mask, 0.0), tl.load(source + HALF, mask, 0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(target, a, b, mask, HALF: tl.constexpr):
    tl.store(target, a, mask)
    tl.store(target + HALF, b, mask)


@triton.jit
def load_angles(table, positions, token, there, columns, mask, length, num_positions, HALF: tl.constexpr):
    """Return the cosines and sines of tokens' angles."""
    position = token % length
    if positions is not None:
        position = tl.load(positions + token, there, 0)
    place = (position * HALF)[:, None] + columns[None, :]
    return tl.load(table + place, mask, 0.0), tl.load(table + num_positions * HALF + place, mask, 0.0)


@triton.jit
def load_weight(weight, columns, HALF: tl.constexpr):
    a, b = load_halves(weight + columns, columns < HALF, HALF)
    return a[None, :], b[None, :]


@triton.jit
def inverse_root(a, b, eps, HALF: tl.constexpr):
    """Return the reciprocal root mean square of rows whose halves are a and b."""
    return tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]


@triton.jit
def turn(a, b, cosine, sine, weight_a, weight_b, eps, HALF: tl.constexpr):
    """Return halves a and b normalised, where there is a weight, and rotated."""
    if weight_a is not None:
        inverse = inverse_root(a, b, eps, HALF)
        a, b = a * inverse * weight_a, b * inverse * weight_b
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit(do_not_specialize=SIZES)
def rotary_forward_kernel(
    qkv, positions, table, q_weight, k_weight, q, k, v, tokens, length, num_positions, eps,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute q `[tokens, G, R, D]`, k and v `[tokens, G, D]` from qkv `[tokens, G, R + 2, D]`."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0) // G * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK)
    there = token < tokens
    mask = there[:, None] & (columns < HALF)[None, :]
    group = token.to(tl.int64) * G + tl.program_id(0) % G
    source = qkv + (group * ((R + 2) * D))[:, None] + columns[None, :]
    a, b = load_halves(source, mask, HALF)
    cosine, sine = load_angles(table, positions, token, there, columns, mask, length, num_positions, HALF)
    q_a, q_b, k_a, k_b = None, None, None, None
    if q_weight is not None:
        q_a, q_b = load_weight(q_weight, columns, HALF)
        k_a, k_b = load_weight(k_weight, columns, HALF)
    target = q + (group * (R * D))[:, None] + columns[None, :]
    for head in range(R):
        next_a, next_b = load_halves(source + (head + 1) * D, mask, HALF)  # while this head is on its way
        a, b = turn(a, b, cosine, sine, q_a, q_b, eps, HALF)
        store_halves(target + head * D, a, b, mask, HALF)
        a, b = next_a, next_b
    next_a, next_b = load_halves(source + (R + 1) * D, mask, HALF)
    a, b = turn(a, b, cosine, sine, k_a, k_b, eps, HALF)
    place = (group * D)[:, None] + columns[None, :]
    store_halves(k + place, a, b, mask, HALF)
    store_halves(v + place, next_a, next_b, mask, HALF)


@triton.jit
def turn_back(a, b, cosine, sine, source, mask, weight_a, weight_b, sum_a, sum_b, eps, HALF: tl.constexpr):
    """Return the gradients of the halves that `turn` takes, from those a and b of what it returns, and the sums to
    which those of the weights are added; source: pointers to what `turn` took."""
    a, b = a * cosine + b * sine, b * cosine - a * sine
    if weight_a is not None:
        x_a, x_b = load_halves(source, mask, HALF)
        inverse = inverse_root(x_a, x_b, eps, HALF)
        x_a, x_b = x_a * inverse, x_b * inverse
        sum_a += tl.where(mask, a * x_a, 0.0)  # of rows that do not exist the product is 0 / 0 where eps is 0
        sum_b += tl.where(mask, b * x_b, 0.0)
        a, b = a * weight_a, b * weight_b
        along = tl.sum(a * x_a + b * x_b, 1)[:, None] / (2 * HALF)
        a, b = inverse * (a - x_a * along), inverse * (b - x_b * along)
    return a, b, sum_a, sum_b


@triton.jit(do_not_specialize=[*SIZES, "tiles"])
def rotary_backward_kernel(
    dq, dk, dv, qkv, positions, table, q_weight, k_weight, d_qkv, dq_weight, dk_weight,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    tokens, length, num_positions, tiles, eps,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute d_qkv `[tokens, G, R + 2, D]` from dq, dk and dv, whose strides are given. dq_weight and dk_weight take
    one partial row of each program; without weights qkv is not read."""
    HALF: tl.constexpr = D // 2
    columns = tl.arange(0, BLOCK)
    q_a, q_b, k_a, k_b = None, None, None, None
    if q_weight is not None:
        q_a, q_b = load_weight(q_weight, columns, HALF)
        k_a, k_b = load_weight(k_weight, columns, HALF)
    q_sum_a = tl.zeros([TOKENS, BLOCK], tl.float32)
    q_sum_b = tl.zeros([TOKENS, BLOCK], tl.float32)
    k_sum_a = tl.zeros([TOKENS, BLOCK], tl.float32)
    k_sum_b = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = tile // G * TOKENS + tl.arange(0, TOKENS)
        there = token < tokens
        mask = there[:, None] & (columns < HALF)[None, :]
        group = tl.cast(tile % G, tl.int64)
        sample, row = (token // length).to(tl.int64), (token % length).to(tl.int64)
        q_from = dq + (sample * q_sample + row * q_token + group * R * q_head)[:, None] + columns[None, :]
        k_from = dk + (sample * k_sample + row * k_token + group * k_head)[:, None] + columns[None, :]
        v_from = dv + (sample * v_sample + row * v_token + group * v_head)[:, None] + columns[None, :]
        a, b = load_halves(q_from, mask, HALF)
        dk_a, dk_b = load_halves(k_from, mask, HALF)
        dv_a, dv_b = load_halves(v_from, mask, HALF)
        cosine, sine = load_angles(table, positions, token, there, columns, mask, length, num_positions, HALF)
        place = ((token.to(tl.int64) * G + group) * ((R + 2) * D))[:, None] + columns[None, :]
        for head in range(R):
            ahead = mask & (head + 1 < R)
            next_from = q_from + tl.cast(head + 1, tl.int64) * q_head
            next_a, next_b = load_halves(next_from, ahead, HALF)  # while this head is on its way
            a, b, q_sum_a, q_sum_b = turn_back(
                a, b, cosine, sine, None if qkv is None else qkv + place + head * D, mask, q_a, q_b, q_sum_a, q_sum_b,
                eps, HALF,
            )  # fmt: skip
            store_halves(d_qkv + place + head * D, a, b, mask, HALF)
            a, b = next_a, next_b
        a, b, k_sum_a, k_sum_b = turn_back(
            dk_a, dk_b, cosine, sine, None if qkv is None else qkv + place + R * D, mask, k_a, k_b, k_sum_a, k_sum_b,
            eps, HALF,
        )  # fmt: skip
        store_halves(d_qkv + place + R * D, a, b, mask, HALF)
        store_halves(d_qkv + place + (R + 1) * D, dv_a, dv_b, mask, HALF)
    if q_weight is not None:
        partial, inside = tl.program_id(0) * D + columns, columns < HALF
        store_halves(dq_weight + partial, tl.sum(q_sum_a, 0), tl.sum(q_sum_b, 0), inside, HALF)
        store_halves(dk_weight + partial, tl.sum(k_sum_a, 0), tl.sum(k_sum_b, 0), inside, HALF)


def tiling(qkv_shape: torch.Size, launch: RotaryLaunch) -> tuple[int, int, dict[str, int]]:
    """Return (tokens, tiles, the sizes that are constants of a kernel)."""
    batch, length, groups, parts, size = qkv_shape
    block = triton.next_power_of_2(size // 2)
    rows = min(max(launch.elements // block, 1), MOST_TOKENS)
    tokens = batch * length
    constants = {"G": groups, "R": parts - 2, "D": size, "TOKENS": rows, "BLOCK": block}
    return tokens, triton.cdiv(tokens, rows) * groups, constants


def rotary_forward(
    qkv: Tensor, positions: Tensor | None, table: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, launch: RotaryLaunch = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q `[B, T, G R, D]`, k and v `[B, T, G, D]` of qkv `[B, T, G, R + 2, D]`; table: as of `angle_table`."""
    qkv, positions = qkv.contiguous(), None if positions is None else positions.contiguous()
    batch, length, groups, parts, size = qkv.shape
    q = qkv.new_empty(batch, length, groups * (parts - 2), size)
    k, v = (qkv.new_empty(batch, length, groups, size) for _ in range(2))
    tokens, tiles, constants = tiling(qkv.shape, launch)
    rotary_forward_kernel[(tiles,)](
        qkv, positions, table, q_weight, k_weight, q, k, v, tokens, length, table.shape[1], eps, **constants,
        num_warps=launch.warps,
    )  # fmt: skip
    return q, k, v


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, positions: Tensor | None, table: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, launch: RotaryLaunch = BACKWARD,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return (d_qkv, dq_weight, dk_weight); the latter two, and qkv, are None without norms."""
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    qkv, positions = (None if t is None else t.contiguous() for t in (qkv, positions))
    batch, length, groups, size = dk.shape
    d_qkv = dq.new_empty(batch, length, groups, dq.shape[2] // groups + 2, size)
    tokens, tiles, constants = tiling(d_qkv.shape, launch)
    programs, partials = tiles, None
    if q_weight is not None:
        programs = max(min(tiles, multiprocessors(dq.device) * max(SUMMING // launch.warps, 1)), 1)
        partials = torch.empty(2, programs, size, dtype=torch.float32, device=dq.device)
    rotary_backward_kernel[(programs,)](
        dq, dk, dv, qkv, positions, table, q_weight, k_weight, d_qkv,
        *((None, None) if partials is None else partials),
        *(stride for tensor in (dq, dk, dv) for stride in tensor.stride()[:3]),
        tokens, length, table.shape[1], tiles, eps, **constants, num_warps=launch.warps,
    )  # fmt: skip
    if partials is None or q_weight is None or k_weight is None:
        return d_qkv, None, None
    dq_weight, dk_weight = torch.empty_like(q_weight), torch.empty_like(k_weight)
    sum_partials(partials, dq_weight, dk_weight)
    return d_qkv, dq_weight, dk_weight
