"""Triton kernels of the experts of a few tokens: which experts a router chooses, and the products of their rows with
the matrices of these experts alone. Needs Triton.

K is one chain of tensor-core operations in each product, and results are rounded where the modules round them: a row
has the bits of the grouped products of sorted rows, whatever rows are beside it. Logits are sums in an order that does
not depend on the number of rows. An expert is read once, however many rows have chosen it.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.decode.kernels import begin, normed_row, summed_row
from dtgpt.ops.kernels.gelu_kernels import cdf
from dtgpt.ops.kernels.swiglu_kernels import sigmoid

LARGEST = tl.constexpr(7.0)  # of the inputs of clamped_swiglu
SLOPE = tl.constexpr(1.702)
ROOT = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)


@triton.jit
def router_kernel(x, weight, bias, logits, H, E, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute the logit fp32 of one expert and one row of x `[M, H]`; weight `[E, H]`, bias `[E]` or None."""
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    w = tl.load(weight + expert * H + column, inside, 0.0).to(tl.float32)
    begin(PDL)
    logit = tl.sum(w * tl.load(x + row * H + column, inside, 0.0).to(tl.float32), 0)
    if bias is not None:
        logit += tl.load(bias + expert).to(tl.float32)
    tl.store(logits + row * E + expert, logit)


@triton.jit
def norm_router_kernel(
    x, branch, branch_bias, slot_weights, places, norm, weight, bias, total, out, logits, rows, H, E, eps,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute what the norm of `kernels.norm_kernel`, an RMSNorm, and then `router_kernel` do, for one expert and one
    row: each expert's program sums and normalises the row again, which takes less time than another launch."""
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    scale = tl.load(norm + column, inside, 0.0).to(tl.float32)
    w = tl.load(weight + expert * H + column, inside, 0.0).to(tl.float32)
    begin(PDL)
    value = summed_row(x, branch, branch_bias, slot_weights, places, row, rows, H, column, inside, GROUPS)
    normed = normed_row(value, scale, None, H, eps).to(out.dtype.element_ty)
    logit = tl.sum(w * normed.to(tl.float32), 0)
    if bias is not None:
        logit += tl.load(bias + expert).to(tl.float32)
    tl.store(logits + row * E + expert, logit)
    if expert == 0:
        tl.store(out + row * H + column, normed, inside)
        if GROUPS > 0:
            tl.store(total + row * H + column, value, inside)


@triton.jit
def weighed_experts(
    logits, E: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, FACTOR: tl.constexpr
):
    """Return the experts, the place of each among all by its logit, of equal ones the smaller first, and their weights:
    the softmax over all experts or, where NORMALISED, over the CHOSEN first, times FACTOR. EXPERTS: E, as a power of
    two; logits fp32 `[E]`."""
    expert = tl.arange(0, EXPERTS)
    own = tl.load(logits + expert, expert < E, float("-inf"))
    left, right = own[None, :], own[:, None]
    first = (left > right) | ((left == right) & (expert[None, :] < expert[:, None]))
    rank = tl.sum(first.to(tl.int32), 1)
    power = tl.exp(own - tl.max(own, 0))
    counted = power if not NORMALISED else tl.where(rank < CHOSEN, power, 0.0)
    weights = power / tl.sum(counted, 0)
    if FACTOR != 1:
        weights *= FACTOR
    return expert, rank, weights


@triton.jit
def choose_kernel(
    logits, experts, weights, E: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the experts int64 `[CHOSEN]` of one row, and their weights fp32 `[CHOSEN]`."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    expert, rank, weight = weighed_experts(logits + row * E, E, EXPERTS, CHOSEN, NORMALISED, FACTOR)
    at = row * CHOSEN + rank
    tl.store(experts + at, expert.to(tl.int64), rank < CHOSEN)
    tl.store(weights + at, weight, rank < CHOSEN)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return f(gate) * up, by the name of `dtgpt.ops.more_activations`."""
    if ACTIVATION == "silu":
        return gate * sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":
        return gate * cdf(gate) * up
    elif ACTIVATION == "gelu":
        return gate * (0.5 * (1.0 + tl.erf(gate * ROOT))) * up
    elif ACTIVATION == "relu2":
        kept = tl.maximum(gate, 0.0)
        return kept * kept * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        kept = tl.minimum(gate, LARGEST)
        factor = tl.minimum(tl.maximum(up, -LARGEST), LARGEST) + 1.0
        return kept * sigmoid(kept * SLOPE) * factor


@triton.jit
def expert_kernel(
    x, weight, bias, logits, experts, weights, out, rows, N, K, per_expert,
    E: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, NORMALISED: tl.constexpr,
    FACTOR: tl.constexpr, ONE: tl.constexpr, PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product of an expert's rows with its matrix `[N, K]`, of weight `[E, N, K]`, bias `[E, N]` or
    None: with an ACTIVATION of x `[M, K]`, and of each two columns, gate and up, that of their sums to out
    `[M CHOSEN, N / 2]`; without (None) of x `[M CHOSEN, K]` to out `[M CHOSEN, N]`. Row m CHOSEN + j is slot j of m.

    experts: int64 `[M, CHOSEN]`. ONE: there is one row. PAIRS: the program's first index is that of a slot among all,
    whose expert it takes unless an earlier one has it; else an expert, which has no work where none has chosen it.
    logits: fp32 `[E]` of the one row, from which to choose first, and to write experts and weights `[CHOSEN]`; None:
    they are there. SLOTS: CHOSEN, as a power of two; other arguments are those of `weighed_experts`.
    """
    index = tl.program_id(0)
    first_column = tl.program_id(1) * BN
    n = first_column + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    begin(PDL)
    if logits is not None:
        known, rank, weighed = weighed_experts(logits, E, EXPERTS, CHOSEN, NORMALISED, FACTOR)
        expert = tl.sum(tl.where(rank == index, known, 0), 0).to(tl.int64)
        writes = (rank < CHOSEN) & (index == 0) & (first_column == 0)
        tl.store(experts + rank, known.to(tl.int64), writes)
        tl.store(weights + rank, weighed, writes)
    elif PAIRS:
        expert = tl.load(experts + index)
    else:
        expert = index.to(tl.int64)
    if ONE:
        own, slot = m == 0, index
    else:
        place = m[:, None] * CHOSEN + tl.arange(0, SLOTS)[None, :]
        inside = (m < rows)[:, None] & (tl.arange(0, SLOTS) < CHOSEN)[None, :]
        same = tl.load(experts + place, inside, -1) == expert
        if tl.sum(tl.sum(same.to(tl.int32), 1), 0) == 0:
            return
        if PAIRS:  # noqa: SIM102, since a condition must be either of constants or of values
            if tl.sum(tl.sum((same & (place < index)).to(tl.int32), 1), 0) > 0:
                return
        own = tl.sum(same.to(tl.int32), 1) > 0
        slot = tl.sum(tl.where(same, tl.arange(0, SLOTS)[None, :], 0), 1)
    expert = tl.minimum(tl.maximum(expert, 0), E - 1)  # of numbers that are none there may be any
    at = m.to(tl.int64) * CHOSEN + slot
    source = m.to(tl.int64) if ACTIVATION is not None else at
    x_at = x + source[:, None] * K + k[None, :]
    w_at = weight + expert * per_expert + n.to(tl.int64)[None, :] * K + k[:, None]
    column_inside = ((n < N) | EVEN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = (start + k < K) | EVEN
        x_part = tl.load(x_at + start, own[:, None] & left[None, :], 0.0)
        w_part = tl.load(w_at + start, column_inside & left[:, None], 0.0)
        total = tl.dot(x_part, w_part, total, input_precision="ieee")
    made = total.to(out.dtype.element_ty)
    if bias is not None:
        shift = tl.load(bias + expert * N + n, n < N, 0.0).to(tl.float32)[None, :]
        made = (made.to(tl.float32) + shift).to(out.dtype.element_ty)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(made.to(tl.float32), (BM, BN // 2, 2)))
        half = first_column // 2 + tl.arange(0, BN // 2)
        here = out + at[:, None] * (N // 2) + half[None, :]
        tl.store(
            here, activated(gate, up, ACTIVATION).to(out.dtype.element_ty), own[:, None] & (half < N // 2)[None, :]
        )
    else:
        tl.store(out + at[:, None] * N + n[None, :], made, own[:, None] & column_inside)
