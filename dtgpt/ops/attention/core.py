"""Causal scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with dropout on the probabilities by index.

Back ends: `explicit`, the reference, computes all probabilities with a softmax in fp32; `sdpa` is PyTorch's own, whose
masks depend on a generator's state, so that it is used only without dropout; `fused_softmax` runs one operation between
the two matrix products; `flash` computes the probabilities tile by tile and saves none of them. On a GPU, gradients of
`sdpa` differ in their last bits from run to run, since its kernels (cuDNN, FlashAttention-2) add up those of q in any
order; all others give the same bits in every run.

Sharding rule: samples and heads may be sharded; a shard of the heads passes the global index of its first in `start`.
"""

import math
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtgpt.ops.attention.flash import LARGEST_HEAD, by_heads, check_inputs, flash_attention, hidden_columns
from dtgpt.ops.fast import has_triton
from dtgpt.ops.fused_softmax.softmax import scaled_masked_softmax
from dtgpt.ops.random.dropout import attention_dropout
from dtgpt.util.errors import UserError

Backend = Literal["auto", "sdpa", "fused_softmax", "flash", "explicit"]
# Kernels of PyTorch for a mask. cuDNN's backward computes NaN for some lengths (PyTorch's issue 196678).
MASKED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    that of the shard's first element. spans: int32 `[B, S, 2]`, bounds [first, end) of the document of each column, at
    most S, to which attention is restricted; None: one document. Raises ValueError where shapes do not fit.
    """
    kept = key if p > 0 else None
    chosen = backend
    if backend == "auto":
        kernels = has_triton(q) and q.dtype != torch.float32
        chosen = choose(kept is not None, kernels, q.shape[-1])
    if chosen == "flash":
        return flash_attention(q, k, v, kept, p, start[0], spans)
    check_inputs(q, k, v, key, spans)
    queries, columns = q.shape[1], k.shape[1]
    hidden = None if spans is None else hidden_columns(queries, columns, q.device, spans)
    start = (start[0], start[1] + columns - queries, start[2])
    if chosen == "sdpa" and kept is None:
        return sdpa(q, k, v, hidden)
    q, k, v = by_heads(q, k, v)
    if chosen == "fused_softmax":
        scale, mask = 1 / math.sqrt(q.shape[-1]), "causal" if hidden is None else hidden
        out = scaled_masked_softmax(q @ k.transpose(-2, -1), scale, mask, key=kept, p=p, start=start) @ v
    else:
        out = explicit(q, k, v, kept, p, start, hidden)
    return out.transpose(1, 2)


def choose(dropping: bool, kernels: bool, head_dim: int) -> Backend:
    """Return the back end for a model: `flash` where its kernels serve, which gives the same bits in every run, else
    `sdpa`, or `explicit` where something drops.

    dropping: whether there is dropout. kernels: whether Triton kernels can run, in 16 bits. Neither depends on the
    plan. Measured by `benchmarks/op_flash.py` on an H200, forward and backward of flash take 0.91 times as long as
    cuDNN's at head_dim 64 and 4096 tokens, and 1.10 times as long at 128, where PyTorch has no kernel with reproducible
    gradients that is as fast.
    """
    if kernels and head_dim <= LARGEST_HEAD:
        return "flash"
    return "explicit" if dropping else "sdpa"


def sdpa(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Return PyTorch's attention `[B, T, N, D]` of q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`.

    hidden: as of `explicit`. PyTorch chooses a kernel by dtype, D and T, so that the choice is the same in every plan.
    """
    if hidden is None and q.shape[1] < k.shape[1]:  # PyTorch's is_causal puts the first query at the first column
        hidden = hidden_columns(q.shape[1], k.shape[1], q.device)
    grouped = reads_groups(q.device, q.dtype, hidden is not None)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v)) if grouped else by_heads(q, k, v)
    seen, shared = None if hidden is None else ~hidden, q.shape[1] != k.shape[1]
    with nullcontext() if seen is None else sdpa_kernel(MASKED):
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=shared)
    return out.transpose(1, 2)


def reads_groups(device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether PyTorch's kernels take fewer heads of k and v than of q. The GPU kernels for fp32 and for masks do
    not: PyTorch would compute all probabilities instead."""
    return device.type != "cuda" or (dtype.itemsize == 2 and not masked)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, start: tuple[int, ...], hidden: Tensor | None = None
) -> Tensor:
    """Return attention `[B, N, T, D]` of q `[B, N, T, D]` and k, v `[B, N, S, D]`.

    hidden: True where a query may not attend; None: what causality hides.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * (1 / math.sqrt(q.shape[-1]))
    if hidden is None:
        hidden = hidden_columns(q.shape[2], k.shape[2], q.device)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v.dtype)
    return (probabilities if key is None else attention_dropout(probabilities, key, p, start)) @ v


def check_backend(backend: str, dropout: float, head_dim: int) -> None:
    """Raise UserError where a recipe's `attention` does not support its model's dropout or head size."""
    if backend == "flash" and head_dim > LARGEST_HEAD:
        raise UserError(
            f"attention=flash takes heads of up to {LARGEST_HEAD}, but those of this model have the size {head_dim}; "
            "use --attention auto, or smaller heads"
        )
    if backend == "sdpa" and dropout > 0:
        raise UserError(
            f"attention=sdpa draws masks from a generator, so those of model.dropout={dropout} would depend on the "
            "plan; use --attention auto, flash or fused_softmax, or --model.dropout 0"
        )
