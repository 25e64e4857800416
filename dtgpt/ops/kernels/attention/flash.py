"""Causal attention in one pass over tiles of the scores, with dropout on the probabilities by global index.

Method: FlashAttention (Dao et al. 2022, algorithm 1) with the loops of FlashAttention-2 (Dao 2023, algorithms 1 and 2):
a running maximum and sum of the softmax instead of a `[T, T]` tensor. Backward computes the probabilities again from
the saved logarithm of the sum, in one kernel for dk and dv and one for dq. Keep decisions of dropout are drawn once, as
bits, and saved for backward, since Philox takes longer than reading them. With document bounds, tiles outside of all
documents of their queries are skipped, so that time falls with the length of documents. A sliding window is given as
such bounds, too (`dtgpt.ops.kernels.attention.window`). An attention sink begins the running sums of its head, as a
first column without a value: backward needs nothing else for the others, and its own gradient follows from saved sums.

Reference: `reference`, which computes where the kernels of `flash_launch` do not, as for heads beyond `largest_head`.
Sharding rule: samples and heads may be sharded, each shard a plain tensor. A shard of the heads passes the global index
of its first head as `head_start`; it holds all heads of q that share its heads of k and v.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from dtgpt.ops.attention.core import by_heads, hidden_columns
from dtgpt.ops.kernels.attention.flash_launch import (
    LOG2_E,
    largest_head,
    launch_backward,
    launch_forward,
    mask_words,
    sinks_gradient,
)
from dtgpt.ops.kernels.attention.packed import are_packed
from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.operation import Operation
from dtgpt.ops.random.dropout import (
    LANES,
    as_bits,
    attention_dropout,
    attention_mask,
    keep_scale,
    threshold,
    unpack_bytes,
)


def pack_bytes(mask: Tensor) -> Tensor:
    """Return uint8 `[.., ceil(elements / 8)]` for bool `[.., elements]`: bit i of a byte for lane i of its block."""
    return as_bits(functional.pad(mask, (0, -mask.shape[-1] % LANES)).unflatten(-1, (-1, LANES)).unbind(-1))


def _scores(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (scaled scores `[B, N, T, S]`, -inf where hidden, and what `by_heads` does), at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = by_heads(q.to(wide), k.to(wide), v.to(wide))
    products = q @ k.transpose(-2, -1)
    scores = products / math.sqrt(q.shape[-1]) if scale is None else products * scale
    return scores.masked_fill(hidden_columns(q.shape[2], k.shape[2], q.device, spans), -math.inf), q, k, v


def _sums(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the logarithm of the sum of exponentials `[B, N, T]`, sinks included."""
    sums = scores.logsumexp(dim=-1)
    return sums if sinks is None else torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])


def reference(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, head_start: int = 0, spans: Tensor | None = None,
    scale: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what `flash_attention` does, in plain torch: the test oracle."""
    scores, _, _, values = _scores(q, k, v, spans, scale)
    probabilities = scores.softmax(dim=-1) if sinks is None else torch.exp(scores - _sums(scores, sinks)[..., None])
    if key is not None:
        probabilities = attention_dropout(probabilities, key, p, (head_start, k.shape[1] - q.shape[1], 0))
    return (probabilities @ values).to(q.dtype).transpose(1, 2)


FLASH = Operation("flash", reference, "softmax(q k^T / sqrt(D)) v over tiles of the scores (Dao et al. 2022; Dao 2023)")


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None = None, p: float = 0.0, head_start: int = 0,
    spans: Tensor | None = None, scale: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(q k^T / sqrt(D)) v `[B, T, N, D]`, over the columns up to the query's position.

    q: `[B, T, N, D]`; k, v: `[B, S, N_kv, D]`, where S >= T and N_kv divides N. Each head of k and v serves N / N_kv
    heads of q (grouped-query attention, Ainslie et al. 2023), and query i has the position i + S - T. Views of one
    packed tensor are read in place. key: int64 `[B, 2]`, a key for each sample, or None (no dropout). p: the
    probability of dropout. The mask's index within a sample is (head, position of the query, column); head_start:
    global index of the shard's first head. spans: int32 `[B, S, 2]`: the first column that the query at each position
    sees, and the end, at most S, of the queries that see the column there, neither falling from one position to the
    next; None: all. scale: factor of q k^T; None: 1 / sqrt(D). sinks: `[N]`, logits that take part in the softmax of
    each head without a value; None: none. Saves q, k, v, the output, 4 bytes per head and query and, with dropout, bits
    per head, query and column: about one in the kernels, where S = T. Shapes fit, as `check_inputs` has it.
    """
    if threshold(p) == 0:
        key = None
    if has_triton(q) and q.shape[-1] <= largest_head(q.dtype, q.device):
        return _forward(q, k, v, key, p, head_start, spans, scale, sinks)[0]
    return reference(q, k, v, key, p, head_start, spans, scale, sinks)


@torch.library.custom_op("dtgpt::flash_forward", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None,
    scale: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (output `[B, T, N, D]`, binary logarithm of the sum of exponentials `[B, N, T]`, keep decisions).

    Keep decisions are as of `pack_bytes`, uint8 `[B, N, T, ceil(S / 8)]`, here, and as of `flash_mask`, int64
    `[B N, mask_words]`, on a GPU; without a key they are empty.
    """
    sums = _sums(_scores(q, k, v, spans, scale)[0], sinks) * LOG2_E
    kept = q.new_empty(0, dtype=torch.uint8)
    if key is not None:
        heads, (first, columns) = range(head_start, head_start + q.shape[2]), (k.shape[1] - q.shape[1], k.shape[1])
        kept = pack_bytes(attention_mask(key, [heads, range(first, columns), range(columns)], p))
    return reference(q, k, v, key, p, head_start, spans, scale, sinks).contiguous(), sums, kept


_forward.register_kernel("cuda", launch_forward)


@_forward.register_fake
def _(q, k, v, key, p, head_start, spans, scale=None, sinks=None):
    (batch, length, heads, _), columns = q.shape, k.shape[1]
    sums = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    if q.device.type == "cuda":
        kept = q.new_empty(batch * heads, 0 if key is None else mask_words(length, columns), dtype=torch.int64)
    else:
        shape = (0,) if key is None else (batch, heads, length, -(-columns // LANES))
        kept = q.new_empty(shape, dtype=torch.uint8)
    return q.new_empty(q.shape), sums, kept


@torch.library.custom_op("dtgpt::flash_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, kept: Tensor, p: float,
    spans: Tensor | None, packed: bool, scale: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) or, if `packed`, one buffer `[B, T, N, 3, D]` of all three and two empty tensors; then the
    gradient of the sinks, empty without."""
    scores, queries, keys, values = _scores(q, k, v, spans, scale)
    grad, out = (x.transpose(1, 2).to(scores.dtype) for x in (grad, out))
    probabilities = torch.exp2(scores * LOG2_E - sums[..., None])
    mask = torch.ones_like(scores)
    if kept.numel():
        mask = unpack_bytes(kept, slice(k.shape[1])).to(scores.dtype) * keep_scale(p)
    d_probabilities = grad @ values.transpose(-2, -1) * mask
    products = (grad * out).sum(-1)
    d_scores = probabilities * (d_probabilities - products[..., None])
    d_scores = d_scores / math.sqrt(q.shape[-1]) if scale is None else d_scores * scale
    d_sinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks, sums, products)
    dk, dv = d_scores.transpose(-2, -1) @ queries, (probabilities * mask).transpose(-2, -1) @ grad
    dk, dv = (t.unflatten(1, (k.shape[2], -1)).sum(2) for t in (dk, dv))  # over the queries' heads of a group
    gradients = [t.transpose(1, 2).to(q.dtype) for t in (d_scores @ keys, dk, dv)]
    if packed:
        return torch.stack(gradients, dim=3), q.new_empty(0), q.new_empty(0), d_sinks
    dq, dk, dv = (t.contiguous() for t in gradients)
    return dq, dk, dv, d_sinks


_backward.register_kernel("cuda", launch_backward)


@_backward.register_fake
def _(grad, q, k, v, out, sums, kept, p, spans, packed, scale=None, sinks=None):
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    if packed:
        return q.new_empty(*q.shape[:3], 3, q.shape[3]), q.new_empty(0), q.new_empty(0), d_sinks
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _save(ctx, inputs, output) -> None:
    q, k, v, _, ctx.p, _, spans, ctx.scale, sinks = inputs
    ctx.packed = are_packed(q, k, v)
    ctx.save_for_backward(q, k, v, *output, spans, sinks)
    ctx.set_materialize_grads(False)  # the sums and the keep decisions have no gradient


def _differentiate(ctx, grad: Tensor, *_):
    *saved, spans, sinks = ctx.saved_tensors
    *made, d_sinks = _backward(grad.contiguous(), *saved, ctx.p, spans, ctx.packed, ctx.scale, sinks)
    gradients = made[0].unbind(3) if ctx.packed else made
    return *gradients, None, None, None, None, None, None if sinks is None else d_sinks


_forward.register_autograd(_differentiate, setup_context=_save)
