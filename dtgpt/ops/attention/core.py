"""Causal scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with dropout on the probabilities by index.

Back ends: `explicit`, the reference, computes all probabilities with a softmax in fp32; `sdpa` is PyTorch's own, whose
masks depend on a generator's state, so that it is used only without dropout; `fused_softmax` runs one operation between
the two matrix products; `flash` computes the probabilities tile by tile and saves none of them.

Sharding rule: samples and heads may be sharded; a shard of the heads passes the global index of its first in `start`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.attention.flash import LARGEST_HEAD, by_heads, check_inputs, flash_attention, hidden_columns
from dtgpt.ops.fast import has_triton
from dtgpt.ops.fused_softmax.softmax import scaled_masked_softmax
from dtgpt.ops.random.dropout import dropout
from dtgpt.util.errors import UserError

Backend = Literal["auto", "sdpa", "fused_softmax", "flash", "explicit"]


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None = None,
    p: float = 0.0,
    start: tuple[int, ...] = (0, 0, 0),
    spans: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return causal attention `[B, T, N, D]` of q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`.

    N_kv divides N: each head of k and v serves N / N_kv heads of q (grouped-query attention, Ainslie et al. 2023). S >=
    T: query i has the position i + S - T and attends to the columns up to it. key: int64 `[B, 2]` or None (no dropout).
    p: the probability of dropout. The mask's index within a sample is (head, position of the query, column); start:
    that of the shard's first element. spans: int32 `[B, T, 2]`, bounds [first, end) of each query's document, to which
    attention is restricted, for S = T; None: one document. Raises ValueError where shapes do not fit.
    """
    kept = key if p > 0 else None
    chosen = backend
    if backend == "auto":
        kernels = has_triton(q) and q.dtype != torch.float32
        chosen = choose(kept is not None, spans is not None, kernels, q.shape[-1])
    if chosen == "flash":
        return flash_attention(q, k, v, kept, p, start[0], spans)
    check_inputs(q, k, v, key, spans)
    queries, columns = q.shape[1], k.shape[1]
    hidden = None if spans is None else hidden_columns(queries, columns, q.device, spans)
    start = (start[0], start[1] + columns - queries, start[2])
    q, k, v = by_heads(q, k, v)
    if chosen == "sdpa" and kept is None:
        if hidden is None and queries < columns:  # PyTorch's is_causal puts the first query at the first column
            hidden = hidden_columns(queries, columns, q.device)
        seen = None if hidden is None else ~hidden
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    elif chosen == "fused_softmax":
        scale, mask = 1 / math.sqrt(q.shape[-1]), "causal" if hidden is None else hidden
        out = scaled_masked_softmax(q @ k.transpose(-2, -1), scale, mask, key=kept, p=p, start=start) @ v
    else:
        out = explicit(q, k, v, kept, p, start, hidden)
    return out.transpose(1, 2)


def choose(dropping: bool, masking: bool, kernels: bool, head_dim: int) -> Backend:
    """Return the fastest back end, with or without Triton kernels.

    As measured by `benchmarks/op_flash.py` on an H200 at head_dim 64, forward and backward of PyTorch's SDPA take 10%
    longer than flash, with copies between layouts of q, k and v, and more than twice as long with a mask. masking:
    whether attention is restricted to documents.
    """
    if kernels and head_dim <= (LARGEST_HEAD if dropping or masking else 64):
        return "flash"
    return "explicit" if dropping else "sdpa"


def explicit(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, start: tuple[int, ...], hidden: Tensor | None = None
) -> Tensor:
    """Return attention `[B, N, T, D]` of q `[B, N, T, D]` and k, v `[B, N, S, D]`.

    hidden: True where a query may not attend; None: what causality hides.
    """
    scores = (q @ k.transpose(-2, -1)).float() * (1 / math.sqrt(q.shape[-1]))
    if hidden is None:
        hidden = hidden_columns(q.shape[2], k.shape[2], q.device)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v.dtype)
    return (probabilities if key is None else dropout(probabilities, key, p, start)) @ v


def check_backend(backend: str, dropout: float, head_dim: int) -> None:
    """Raise UserError where a recipe's `attention` does not support its model's dropout or head size."""
    if backend == "flash" and head_dim > LARGEST_HEAD:
        raise UserError(
            f"attention=flash takes heads of up to {LARGEST_HEAD}, but hidden_size / num_heads is {head_dim}; use "
            "--attention auto, or more heads"
        )
    if backend == "sdpa" and dropout > 0:
        raise UserError(
            f"attention=sdpa draws masks from a generator, so those of model.dropout={dropout} would depend on the "
            "plan; use --attention auto, flash or fused_softmax, or --model.dropout 0"
        )
