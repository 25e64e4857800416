"""Triton kernels of `dtgpt.ops.joint_rotary`. Needs Triton.

A program has all heads of a token, whose sums of squares it needs. Backward's programs go over tokens, and hold the
sums of the weights' gradients, which a second stage adds up: they are the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import sum_partials
from dtgpt.ops.kernels.devices import multiprocessors
from dtgpt.ops.kernels.rotary_kernels import load_angles, load_halves, store_halves

SUMMING = 16  # warps per multiprocessor in all programs of backward together
WIDE = 4096  # elements of q and k of a token up to which a program has four warps, backward half as many

# Sizes that differ between batches and shards. They are not specialised, so that one binary serves all of them.
SIZES = ["tokens", "length", "num_positions"]


@triton.jit
def bounded_half(x, LIMIT: tl.constexpr):
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x


@triton.jit
def inverse_of(a, b, eps, WIDTH: tl.constexpr):
    """Return the reciprocal root mean square of all heads, whose halves are a and b."""
    return tl.rsqrt(tl.sum(tl.sum(a * a + b * b, 1), 0) / WIDTH + eps)


@triton.jit
def angles_at(table, positions, token, columns, length, num_positions, HALF: tl.constexpr):
    """Return cosines and sines `[1, BLOCK]` of a token."""
    one = token.to(tl.int32) + tl.arange(0, 1)
    return load_angles(
        table, positions, one, one >= 0, columns, (columns < HALF)[None, :], length, num_positions, HALF
    )  # fmt: skip


@triton.jit
def turn_heads(a, b, inverse, weight_a, weight_b, cosine, sine, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """Return halves of heads normalised, rounded to DTYPE, bounded and rotated."""
    a = bounded_half((a * inverse * weight_a).to(DTYPE).to(tl.float32), LIMIT)
    b = bounded_half((b * inverse * weight_b).to(DTYPE).to(tl.float32), LIMIT)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def turn_heads_back(
    a, b, x_a, x_b, inverse, weight_a, weight_b, cosine, sine, DTYPE: tl.constexpr, LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the halves x_a and x_b that `turn_heads` takes, from those a and b of what it returns,
    and the terms of those of the weights."""
    a, b = a * cosine + b * sine, b * cosine - a * sine
    x_a, x_b = x_a * inverse, x_b * inverse
    if LIMIT > 0:
        a = tl.where(tl.abs((x_a * weight_a).to(DTYPE).to(tl.float32)) <= LIMIT, a, 0.0)
        b = tl.where(tl.abs((x_b * weight_b).to(DTYPE).to(tl.float32)) <= LIMIT, b, 0.0)
    term_a, term_b = a * x_a, b * x_b
    a, b = a * weight_a, b * weight_b
    along = tl.sum(tl.sum(a * x_a + b * x_b, 1), 0) / WIDTH
    return inverse * (a - x_a * along), inverse * (b - x_b * along), term_a, term_b


@triton.jit(do_not_specialize=SIZES)
def joint_forward_kernel(
    qkv, positions, table, q_weight, k_weight, q, k, v, length, num_positions, eps,
    LIMIT: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute q `[G R, D]`, k and v `[G, D]` of one token from qkv `[G, R + 2, D]`."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    n, g = tl.arange(0, QUERIES), tl.arange(0, GROUPS)
    q_mask = (n < G * R)[:, None] & (columns < HALF)[None, :]
    k_mask = (g < G)[:, None] & (columns < HALF)[None, :]
    source = qkv + token * (G * (R + 2) * D)
    q_a, q_b = load_halves(source + ((n // R * (R + 2) + n % R) * D)[:, None] + columns[None, :], q_mask, HALF)
    k_at = ((g * (R + 2) + R) * D)[:, None] + columns[None, :]
    k_a, k_b = load_halves(source + k_at, k_mask, HALF)
    v_a, v_b = load_halves(source + k_at + D, k_mask, HALF)
    q_here, k_here = n[:, None] * D + columns[None, :], g[:, None] * D + columns[None, :]
    qw_a, qw_b = load_halves(q_weight + q_here, q_mask, HALF)
    kw_a, kw_b = load_halves(k_weight + k_here, k_mask, HALF)
    cosine, sine = angles_at(table, positions, token, columns, length, num_positions, HALF)
    inverse = inverse_of(q_a, q_b, eps, G * R * D)
    q_a, q_b = turn_heads(q_a, q_b, inverse, qw_a, qw_b, cosine, sine, q.dtype.element_ty, LIMIT)
    store_halves(q + token * (G * R * D) + q_here, q_a, q_b, q_mask, HALF)
    inverse = inverse_of(k_a, k_b, eps, G * D)
    k_a, k_b = turn_heads(k_a, k_b, inverse, kw_a, kw_b, cosine, sine, q.dtype.element_ty, LIMIT)
    store_halves(k + token * (G * D) + k_here, k_a, k_b, k_mask, HALF)
    store_halves(v + token * (G * D) + k_here, bounded_half(v_a, LIMIT), bounded_half(v_b, LIMIT), k_mask, HALF)


@triton.jit(do_not_specialize=SIZES)
def joint_backward_kernel(
    dq, dk, dv, qkv, positions, table, q_weight, k_weight, d_qkv, dq_weight, dk_weight,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    tokens, length, num_positions, eps,
    LIMIT: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute d_qkv `[tokens, G, R + 2, D]` from dq, dk and dv, whose strides are given. dq_weight and dk_weight take
    one partial row of each program."""
    HALF: tl.constexpr = D // 2
    columns = tl.arange(0, BLOCK)
    n, g = tl.arange(0, QUERIES), tl.arange(0, GROUPS)
    q_mask = (n < G * R)[:, None] & (columns < HALF)[None, :]
    k_mask = (g < G)[:, None] & (columns < HALF)[None, :]
    q_here, k_here = n[:, None] * D + columns[None, :], g[:, None] * D + columns[None, :]
    qw_a, qw_b = load_halves(q_weight + q_here, q_mask, HALF)
    kw_a, kw_b = load_halves(k_weight + k_here, k_mask, HALF)
    q_at = ((n // R * (R + 2) + n % R) * D)[:, None] + columns[None, :]
    k_at = ((g * (R + 2) + R) * D)[:, None] + columns[None, :]
    q_sum_a = tl.zeros([QUERIES, BLOCK], tl.float32)
    q_sum_b = tl.zeros([QUERIES, BLOCK], tl.float32)
    k_sum_a = tl.zeros([GROUPS, BLOCK], tl.float32)
    k_sum_b = tl.zeros([GROUPS, BLOCK], tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        sample, row = token // length, token % length
        q_from = dq + sample * q_sample + row * q_token + n.to(tl.int64)[:, None] * q_head + columns[None, :]
        k_from = dk + sample * k_sample + row * k_token + g.to(tl.int64)[:, None] * k_head + columns[None, :]
        v_from = dv + sample * v_sample + row * v_token + g.to(tl.int64)[:, None] * v_head + columns[None, :]
        a, b = load_halves(q_from, q_mask, HALF)
        dk_a, dk_b = load_halves(k_from, k_mask, HALF)
        dv_a, dv_b = load_halves(v_from, k_mask, HALF)
        place = token * (G * (R + 2) * D)
        x_a, x_b = load_halves(qkv + place + q_at, q_mask, HALF)
        k_a, k_b = load_halves(qkv + place + k_at, k_mask, HALF)
        cosine, sine = angles_at(table, positions, token, columns, length, num_positions, HALF)
        inverse = inverse_of(x_a, x_b, eps, G * R * D)
        a, b, term_a, term_b = turn_heads_back(
            a, b, x_a, x_b, inverse, qw_a, qw_b, cosine, sine, qkv.dtype.element_ty, LIMIT, G * R * D
        )
        q_sum_a += term_a
        q_sum_b += term_b
        store_halves(d_qkv + place + q_at, a, b, q_mask, HALF)
        inverse = inverse_of(k_a, k_b, eps, G * D)
        a, b, term_a, term_b = turn_heads_back(
            dk_a, dk_b, k_a, k_b, inverse, kw_a, kw_b, cosine, sine, qkv.dtype.element_ty, LIMIT, G * D
        )
        k_sum_a += term_a
        k_sum_b += term_b
        store_halves(d_qkv + place + k_at, a, b, k_mask, HALF)
        if LIMIT > 0:
            v_a, v_b = load_halves(qkv + place + k_at + D, k_mask, HALF)
            dv_a, dv_b = tl.where(tl.abs(v_a) <= LIMIT, dv_a, 0.0), tl.where(tl.abs(v_b) <= LIMIT, dv_b, 0.0)
        store_halves(d_qkv + place + k_at + D, dv_a, dv_b, k_mask, HALF)
    program = tl.program_id(0).to(tl.int64)
    store_halves(dq_weight + program * (G * R * D) + q_here, q_sum_a, q_sum_b, q_mask, HALF)
    store_halves(dk_weight + program * (G * D) + k_here, k_sum_a, k_sum_b, k_mask, HALF)


def constants(shape: torch.Size, limit: float, most: int = WIDE) -> dict[str, int | float]:
    """Return the sizes that are constants of a kernel, and its warps: four up to `most` elements of q and k."""
    _, _, groups, parts, size = shape
    heads = groups * (parts - 2)
    return {
        "LIMIT": float(limit), "G": groups, "R": parts - 2, "D": size, "QUERIES": triton.next_power_of_2(heads),
        "GROUPS": triton.next_power_of_2(groups), "BLOCK": triton.next_power_of_2(size // 2),
        "num_warps": 4 if (heads + groups) * size <= most else 8,
    }  # fmt: skip


def joint_forward(
    qkv: Tensor, positions: Tensor | None, table: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[B, T, G R, D]`, k and v `[B, T, G, D]` of qkv `[B, T, G, R + 2, D]`; table: as of `angle_table`."""
    qkv, positions = qkv.contiguous(), None if positions is None else positions.contiguous()
    batch, length, groups, parts, size = qkv.shape
    q = qkv.new_empty(batch, length, groups * (parts - 2), size)
    k, v = (qkv.new_empty(batch, length, groups, size) for _ in range(2))
    if batch * length:
        joint_forward_kernel[(batch * length,)](
            qkv, positions, table, q_weight, k_weight, q, k, v, length, table.shape[1], eps,
            **constants(qkv.shape, limit),
        )  # fmt: skip
    return q, k, v


def joint_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor | None, table: Tensor,
    q_weight: Tensor, k_weight: Tensor, eps: float, limit: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv and of the weights."""
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    qkv, positions = qkv.contiguous(), None if positions is None else positions.contiguous()
    tokens, d_qkv, chosen = qkv.shape[0] * qkv.shape[1], torch.empty_like(qkv), constants(qkv.shape, limit, WIDE // 2)
    programs = max(min(tokens, multiprocessors(qkv.device) * (SUMMING // int(chosen["num_warps"]))), 1)
    sums = [torch.empty(1, programs, w.numel(), dtype=torch.float32, device=qkv.device) for w in (q_weight, k_weight)]
    joint_backward_kernel[(programs,)](
        dq, dk, dv, qkv, positions, table, q_weight, k_weight, d_qkv, *sums,
        *(stride for tensor in (dq, dk, dv) for stride in tensor.stride()[:3]),
        tokens, qkv.shape[1], table.shape[1], eps, **chosen,
    )  # fmt: skip
    gradients = torch.empty_like(q_weight), torch.empty_like(k_weight)
    for partials, gradient in zip(sums, gradients, strict=True):
        sum_partials(partials, gradient)
    return d_qkv, *gradients
