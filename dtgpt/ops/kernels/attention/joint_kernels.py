"""A Triton kernel that turns the heads of a decode step's tokens where queries, and keys, are normalised over all heads
together. Needs Triton."""

import triton
import triton.language as tl

from dtgpt.ops.kernels.decode.kernels import begin


@triton.jit
def normed_heads(heads, inside, weight, rstd, d, LIMIT: tl.constexpr):
    """Return columns d `[SIZE]` of heads `[R, SIZE]` at pointers `[R, 1]`, times rstd and a weight at pointers
    `[R, 1]`, rounded, and at most LIMIT away from zero where that is not 0; fp32."""
    x = tl.load(heads + d[None, :], inside, 0.0)
    normed = x.to(tl.float32) * rstd * tl.load(weight + d[None, :], inside, 0.0).to(tl.float32)
    return clamped(normed.to(x.dtype), LIMIT).to(tl.float32)


@triton.jit
def clamped(x, LIMIT: tl.constexpr):
    """Return x, at most LIMIT away from zero where that is not 0."""
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -LIMIT), LIMIT).to(x.dtype)
    return x


@triton.jit
def joint_rstds(
    packed, eps, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return 1 / the root of the mean squares of all queries and of all keys of a row at `packed`, fp32."""
    every, d = tl.arange(0, HEADS), tl.arange(0, SIZE)
    there = (every < KV_HEADS * (GROUP + 2))[:, None]
    wide = tl.load(packed + every[:, None] * SIZE + d[None, :], there, 0.0).to(tl.float32)
    squares, part = tl.sum(wide * wide, 1), every % (GROUP + 2)
    of_q = tl.sum(tl.where(part < GROUP, squares, 0.0), 0) / (KV_HEADS * GROUP * SIZE)
    of_k = tl.sum(tl.where(part == GROUP, squares, 0.0), 0) / (KV_HEADS * SIZE)
    return (1.0 / tl.sqrt(of_q + eps)).to(tl.float32), (1.0 / tl.sqrt(of_k + eps)).to(tl.float32)


@triton.jit
def turned_heads(heads, inside, weight, rstd, cosine, turn, LIMIT: tl.constexpr, SIZE: tl.constexpr):
    """Return heads `[R, SIZE]` as `normed_heads` has them, rotated by cosine `[SIZE]` and turn `[1, SIZE]`, rounded."""
    d = tl.arange(0, SIZE)
    a = normed_heads(heads, inside, weight, rstd, d, LIMIT)
    b = normed_heads(heads, inside, weight, rstd, (d + SIZE // 2) % SIZE, LIMIT)
    return tl.fma(a, tl.broadcast_to(cosine[None, :], a.shape), b * turn).to(heads.dtype.element_ty)


@triton.jit
def angles(table, places, position, SIZE: tl.constexpr):
    """Return the cosine `[SIZE]` of each column at a position, and the sine, `[1, SIZE]`, with its sign."""
    HALF: tl.constexpr = SIZE // 2
    d = tl.arange(0, SIZE)
    angle = position * HALF + d % HALF
    cosine, sine = tl.load(table + angle), tl.load(table + places * HALF + angle)
    return cosine, tl.where(d < HALF, -sine, sine)[None, :]


@triton.jit
def joint_rotate_kernel(
    packed, turned, keys, values, slots, positions, table, q_norm, k_norm, eps, q_row, places,
    LIMIT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, LENGTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do what `cached_kernels.rotate_kernel` does, but that q_norm `[N D]` and k_norm `[N_kv D]` are of all heads
    together: each head's program sums their squares again. LIMIT: bounds queries, keys and values; 0: does not. HEADS:
    KV_HEADS (GROUP + 2), as a power of two."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, SIZE)
    r = tl.arange(0, QUERIES)[:, None]
    behind = tl.arange(0, 1)[:, None] + GROUP
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    cosine, turn = angles(table, places, position, SIZE)
    begin(PDL)
    packed += row * q_row
    q_rstd, k_rstd = joint_rstds(packed, eps, KV_HEADS, GROUP, HEADS, SIZE)
    heads = packed + head * ((GROUP + 2) * SIZE)
    q_weight, k_weight = q_norm + (head * GROUP + r) * SIZE, k_norm + head * SIZE + 0 * behind
    query = turned_heads(heads + r * SIZE, r < GROUP, q_weight, q_rstd, cosine, turn, LIMIT, SIZE)
    tl.store(turned + ((row * KV_HEADS + head) * GROUP + r) * SIZE + d[None, :], query, r < GROUP)
    new_k = turned_heads(heads + behind * SIZE, behind == GROUP, k_weight, k_rstd, cosine, turn, LIMIT, SIZE)
    new_v = clamped(tl.load(heads + (behind + 1) * SIZE + d[None, :]), LIMIT)
    here = ((slot * KV_HEADS + head) * LENGTH + position) * SIZE + d[None, :]
    tl.store(keys + here, new_k)
    tl.store(values + here, new_v)
