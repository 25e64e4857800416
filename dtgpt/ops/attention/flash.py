"""Causal attention in one pass over tiles of the scores, with dropout on the probabilities by global index.

Method: FlashAttention (Dao et al. 2022, algorithm 1) with the loops of FlashAttention-2 (Dao 2023, algorithms 1 and 2):
a running maximum and sum of the softmax instead of a `[T, T]` tensor. Backward computes the probabilities again from
the saved logarithm of the sum, in one kernel for dk and dv and one for dq. Keep decisions of dropout are drawn as bits,
one for each probability, into a temporary buffer; backward draws them again. With document bounds, tiles outside of all
documents of their queries are skipped, so that time falls with the length of documents.

Reference: `reference`. Fast path: Triton kernels (`flash_kernels`), for heads of up to 128; otherwise the reference.
Sharding rule: samples and heads may be sharded, each shard a plain tensor. A shard of the heads passes the global index
of its first head as `head_start`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.fast import has_triton
from dtgpt.ops.random.dropout import dropout, keep_mask, keep_scale, threshold

LOG2_E = 1 / math.log(2)
LARGEST_HEAD = 128  # D that the kernels hold in registers


def hidden_columns(spans: Tensor) -> Tensor:
    """Return bool `[B, 1, T, T]`, True where a query may not attend: to columns after it or before its document.

    spans: `[B, T, 2]`, as of `flash_attention`.
    """
    columns = torch.arange(spans.shape[1], device=spans.device)
    return ((columns > columns[:, None]) | (columns < spans[:, :, :1]))[:, None]


def _scores(qkv: Tensor, spans: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (scaled scores `[B, N, T, T]`, -inf where hidden, q, k, v `[B, N, T, D]`), at least fp32."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = (part.transpose(1, 2).to(wide) for part in qkv.unbind(3))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if spans is None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    else:
        hidden = hidden_columns(spans)
    return scores.masked_fill(hidden, -math.inf), q, k, v


def reference(qkv: Tensor, key: Tensor | None, p: float, head_start: int = 0, spans: Tensor | None = None) -> Tensor:
    """Return what `flash_attention` does, in plain torch: the test oracle."""
    scores, _, _, v = _scores(qkv, spans)
    probabilities = scores.softmax(dim=-1)
    if key is not None:
        probabilities = dropout(probabilities, key, p, (head_start, 0, 0))
    return (probabilities @ v).to(qkv.dtype).transpose(1, 2)


def flash_attention(
    qkv: Tensor, key: Tensor | None = None, p: float = 0.0, head_start: int = 0, spans: Tensor | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v `[B, T, N, D]` of qkv `[B, T, N, 3, D]`, over the columns up to the query's.

    key: int64 `[B, 2]`, a key for each sample, or None (no dropout). p: the probability of dropout. The mask's index
    within a sample is (head, query, column); head_start: global index of the shard's first head. spans: int32
    `[B, T, 2]`, bounds [first, end) of each query's document, to which attention is restricted; None: one document.
    Saves qkv, the output and 4 bytes per head and query. Raises ValueError where a shape does not fit.
    """
    if qkv.dim() != 5 or qkv.shape[3] != 3:
        raise ValueError(f"qkv has the shape {tuple(qkv.shape)}; it needs to be [B, T, N, 3, D]")
    if key is not None and key.shape != (len(qkv), 2):
        raise ValueError(f"keys have the shape {tuple(key.shape)}; {len(qkv)} samples need [{len(qkv)}, 2]")
    if spans is not None and (spans.shape != (*qkv.shape[:2], 2) or spans.dtype != torch.int32):
        raise ValueError(f"spans are {spans.dtype} {tuple(spans.shape)}; they need to be int32 [B, T, 2]")
    if threshold(p) == 0:
        key = None
    if has_triton(qkv) and qkv.shape[-1] <= LARGEST_HEAD:
        return _forward(qkv.contiguous(), key, p, head_start, None if spans is None else spans.contiguous())[0]
    return reference(qkv, key, p, head_start, spans)


class Launch(NamedTuple):
    """Tile sizes and compile options of a kernel."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


NARROW = {"forward": Launch(64, 64, 4, 3), "keys": Launch(64, 64, 4, 2), "queries": Launch(64, 64, 4, 3)}  # D <= 64
WIDE = {"forward": Launch(128, 64, 8, 2), "keys": Launch(64, 64, 8, 2), "queries": Launch(64, 64, 4, 2)}
SINGLE = {"forward": Launch(32, 64, 8, 1), "keys": Launch(16, 64, 8, 1), "queries": Launch(32, 64, 8, 1)}  # fp32
BAND = 32  # heads whose keys and values should fit in the L2 cache together


class _Call:
    """The arguments that the kernels of one operation share."""

    def __init__(self, qkv: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None):
        from dtgpt.ops.attention import flash_kernels

        self.kernels = flash_kernels
        self.key = (None, 0, 0) if key is None else (key, *key.stride())
        self.batch, self.length, self.heads, _, self.size = qkv.shape
        self.grid = (self.batch * self.heads, math.ceil(self.length / flash_kernels.WORD.value))
        self.shape = {"D": self.size, "WIDTH": max(16, 1 << (self.size - 1).bit_length())}
        self.rescale = 1.0 if key is None else keep_scale(p)
        self.start = (head_start, threshold(p))
        self.simd = qkv.is_cuda and torch.cuda.get_device_capability(qkv.device) >= (9, 0)
        self.words = None if key is None else qkv.new_empty(*self.grid, self.length, dtype=torch.int64)
        self.spans = spans
        self.launches = SINGLE if qkv.dtype == torch.float32 else NARROW if self.size <= 64 else WIDE

    def run(self, name: str, *tensors: Tensor, scales: tuple[float, ...] = ()) -> None:
        """Launch the kernel `name` over tiles of keys or of queries."""
        how = self.launches[name]
        tiles = math.ceil(self.length / (how.BLOCK_N if name == "keys" else how.BLOCK_M))
        getattr(self.kernels, f"{name}_kernel")[(tiles * self.grid[0],)](
            *tensors, None if self.words is None else self.words.view(torch.int32), self.spans, self.length,
            self.heads, self.grid[0], LOG2_E / math.sqrt(self.size), self.rescale, *scales, **self.shape,
            **how._asdict(), BAND=BAND, BOUND=self.length % max(how.BLOCK_M, how.BLOCK_N) != 0,
            DROP=self.words is not None, SPANS=self.spans is not None,
        )  # fmt: skip


def launch_forward(
    qkv: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `_forward`."""
    call = _Call(qkv, key, p, head_start, spans)
    out = qkv.new_empty(call.batch, call.length, call.heads, call.size)
    sums = qkv.new_empty(call.batch, call.heads, call.length, dtype=torch.float32)
    if key is not None:
        call.kernels.draw_kernel[call.grid](
            *call.key, call.words, spans, call.length, call.heads, *call.start, SIMD=call.simd, SPANS=spans is not None
        )
    call.run("forward", qkv, out, sums)
    return out, sums


def launch_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, key: Tensor | None, p: float, head_start: int,
    spans: Tensor | None,
) -> Tensor:  # fmt: skip
    """Launch the kernels of `_backward`."""
    call = _Call(qkv, key, p, head_start, spans)
    pairs, gradient = sums.new_empty(*sums.shape, 2), torch.empty_like(qkv)
    call.kernels.prepare_kernel[call.grid](
        *call.key, call.words, spans, out, grad, sums, pairs, call.length, call.heads, *call.start, call.rescale,
        **call.shape, DROP=key is not None, SIMD=call.simd, SPANS=spans is not None,
    )  # fmt: skip
    for name in ("keys", "queries"):
        call.run(name, qkv, grad, pairs, gradient, scales=(1 / math.sqrt(call.size),))
    return gradient


@torch.library.custom_op("dtgpt::flash_forward", mutates_args=(), device_types="cpu")
def _forward(qkv: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (output `[B, T, N, D]`, binary logarithm of the sum of exponentials `[B, N, T]`)."""
    sums = _scores(qkv, spans)[0].logsumexp(dim=-1) * LOG2_E
    return reference(qkv, key, p, head_start, spans).contiguous(), sums


_forward.register_kernel("cuda", launch_forward)


@_forward.register_fake
def _(qkv: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, length, heads, _, width = qkv.shape
    wide = torch.promote_types(qkv.dtype, torch.float32)
    return qkv.new_empty(batch, length, heads, width), qkv.new_empty(batch, heads, length, dtype=wide)


@torch.library.custom_op("dtgpt::flash_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, key: Tensor | None, p: float, head_start: int,
    spans: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of qkv, packed like qkv."""
    scores, q, k, v = _scores(qkv, spans)
    grad, out = (x.transpose(1, 2).to(scores.dtype) for x in (grad, out))
    probabilities = torch.exp2(scores * LOG2_E - sums[..., None])
    kept = torch.ones_like(scores)
    if key is not None:
        ranges = [range(head_start, head_start + q.shape[1]), range(q.shape[2]), range(q.shape[2])]
        kept = keep_mask(key, ranges, p).to(scores.dtype) * keep_scale(p)
    d_probabilities = grad @ v.transpose(-2, -1) * kept
    d_scores = probabilities * (d_probabilities - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    parts = [d_scores @ k, d_scores.transpose(-2, -1) @ q, (probabilities * kept).transpose(-2, -1) @ grad]
    return torch.stack([part.transpose(1, 2) for part in parts], dim=3).to(qkv.dtype)


_backward.register_kernel("cuda", launch_backward)
_backward.register_fake(lambda grad, qkv, *_: qkv.new_empty(qkv.shape))


def _save(ctx, inputs, output) -> None:
    qkv, key, ctx.p, ctx.head_start, spans = inputs
    ctx.save_for_backward(qkv, *output, key, spans)
    ctx.set_materialize_grads(False)  # the sums have no gradient


def _differentiate(ctx, grad: Tensor, _):
    qkv, out, sums, key, spans = ctx.saved_tensors
    return _backward(grad.contiguous(), qkv, out, sums, key, ctx.p, ctx.head_start, spans), *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_save)
