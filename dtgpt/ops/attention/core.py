"""Causal scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with dropout on the probabilities by index.

Back ends: `explicit`, the reference, computes all probabilities with a softmax in fp32; `sdpa` is PyTorch's own, whose
masks depend on a generator's state, so that it is used only without dropout; `fused_softmax` runs one operation between
the two matrix products; `flash` computes the probabilities tile by tile and saves none of them. On a GPU, gradients of
`sdpa` differ in their last bits from run to run, since its kernels (cuDNN, FlashAttention-2) add up those of q in any
order; all others give the same bits in every run.

An `AttentionRule` says what differs from layer to layer. Every back end knows the window and the scale. Sinks are known
to `explicit` and `flash`, softly bounded scores to `explicit` alone: `auto` takes what knows them, the others refuse.

Sharding rule: samples and heads may be sharded; a shard of the heads passes the global index of its first in `start`.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtgpt.ops.attention.window import spans_of_window
from dtgpt.ops.kernels.attention.flash import LARGEST_HEAD, by_heads, check_inputs, flash_attention, hidden_columns
from dtgpt.ops.kernels.attention.flash_launch import largest_head
from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.kernels.fused_softmax.softmax import scaled_masked_softmax
from dtgpt.ops.random.dropout import attention_dropout
from dtgpt.util.errors import UserError

Backend = Literal["auto", "sdpa", "fused_softmax", "flash", "explicit"]
# Kernels of PyTorch for a mask. cuDNN's backward computes NaN for some lengths (PyTorch's issue 196678).
MASKED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class AttentionRule(NamedTuple):
    """What a layer's attention does beside causality; the defaults change nothing."""

    window: int | None = None  # query i sees the columns i - window + 1 to i; None: all up to i
    softcap: float | None = None  # scores s become c tanh(s / c), c being this (Gemma Team 2024, Gemma 2, section 2)
    scale: float | None = None  # factor of q k^T; None: 1 / sqrt(D)
    # [N]: a logit of each head that takes part in its softmax, without a value (Agarwal et al. 2025, gpt-oss, 2.2)
    sinks: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """Return the factor of the scores."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN_RULE = AttentionRule()


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None = None,
    p: float = 0.0,
    start: tuple[int, ...] = (0, 0, 0),
    spans: Tensor | None = None,
    backend: Backend = "auto",
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:
    """Return causal attention `[B, T, N, D]` of q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`.

    N_kv divides N: each head of k and v serves N / N_kv heads of q (grouped-query attention, Ainslie et al. 2023). S >=
    T: query i has the position i + S - T and attends to the columns up to it. key: int64 `[B, 2]` or None (no dropout).
    p: the probability of dropout. The mask's index within a sample is (head, position of the query, column); start:
    that of the shard's first element. spans: int32 `[B, S, 2]`, bounds [first, end) of the document of each column, at
    most S, to which attention is restricted; None: one document. rule: what the layer does beside. Raises ValueError
    where shapes do not fit, or where the back end does not know the rule.
    """
    kept = key if p > 0 else None
    chosen, has_sinks = backend, rule.sinks is not None
    if backend == "auto":
        kernels = has_triton(q) and in_kernels(q.device, q.dtype, q.shape[-1])
        chosen = choose(kept is not None, kernels, rule.softcap is not None, has_sinks)
    elif unknown := unknown_to(backend, rule.softcap is not None, has_sinks):
        raise ValueError(f"the back end {backend} does not know {unknown}")
    queries, columns = q.shape[1], k.shape[1]
    window = None if rule.window is None or rule.window >= columns else rule.window
    if chosen == "flash":
        if window is not None:
            spans = spans_of_window(window, len(q), columns, q.device, spans)
        return flash_attention(q, k, v, kept, p, start[0], spans, rule.scale, rule.sinks)
    check_inputs(q, k, v, key, spans, rule.sinks)
    bounded = spans is not None or window is not None
    hidden = hidden_columns(queries, columns, q.device, spans, window) if bounded else None
    start = (start[0], start[1] + columns - queries, start[2])
    if chosen == "sdpa" and kept is None:
        return sdpa(q, k, v, hidden, rule.scale)
    q, k, v = by_heads(q, k, v)
    if chosen == "fused_softmax":
        scale, mask = rule.factor(q.shape[-1]), "causal" if hidden is None else _of_samples(hidden, len(q))
        out = scaled_masked_softmax(q @ k.transpose(-2, -1), scale, mask, key=kept, p=p, start=start) @ v
    else:
        out = explicit(q, k, v, kept, p, start, hidden, rule)
    return out.transpose(1, 2)


def _of_samples(hidden: Tensor, batch: int) -> Tensor:
    """Return a mask as one `[B, 1, T, S]` for samples."""
    return hidden if hidden.dim() == 4 else hidden.expand(batch, 1, -1, -1).contiguous()


def in_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `auto` takes Triton kernels for such heads on such a device, where it has Triton. It does not
    depend on the plan."""
    return device.type == "cuda" and dtype != torch.float32 and head_dim <= largest_head(dtype, device)


def choose(dropping: bool, kernels: bool, softcap: bool = False, sinks: bool = False) -> Backend:
    """Return the back end for a layer: `flash` where its kernels serve, which gives the same bits in every run, else
    `sdpa`, or `explicit` where something drops or `sdpa` does not know the layer's rule.

    dropping: whether there is dropout. kernels: as of `in_kernels`. softcap, sinks: whether the layer has them.
    Measured by `benchmarks/op_flash.py` on an H200, forward and backward of flash take 0.91 times as long as cuDNN's at
    head_dim 64 and 4096 tokens, and 1.10 times as long at 128, where PyTorch has no kernel with reproducible gradients
    that is as fast.
    """
    if kernels and not softcap:
        return "flash"
    return "explicit" if dropping or softcap or sinks else "sdpa"


def operations() -> list[OpOverload]:
    """Return the operations, of `flash` and of `sdpa`, that an attention core's output comes from."""
    aten = torch.ops.aten
    return [
        torch.ops.dtgpt.flash_forward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


def unknown_to(backend: Backend, softcap: bool, sinks: bool) -> str:
    """Return what a back end does not know of a layer's rule; empty where it knows all."""
    if softcap and backend in ("sdpa", "fused_softmax", "flash"):
        return "softly bounded scores"
    return "attention sinks" if sinks and backend in ("sdpa", "fused_softmax") else ""


def sdpa(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float | None = None) -> Tensor:
    """Return PyTorch's attention `[B, T, N, D]` of q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`.

    hidden: as of `explicit`; scale: as of `AttentionRule`. PyTorch chooses a kernel by dtype, D and T, so that the
    choice is the same in every plan.
    """
    if hidden is None and q.shape[1] < k.shape[1]:  # PyTorch's is_causal puts the first query at the first column
        hidden = hidden_columns(q.shape[1], k.shape[1], q.device)
    grouped = reads_groups(q.device, q.dtype, hidden is not None)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v)) if grouped else by_heads(q, k, v)
    seen, shared = None if hidden is None else ~hidden, q.shape[1] != k.shape[1]
    with nullcontext() if seen is None else sdpa_kernel(MASKED):
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2)


def reads_groups(device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether PyTorch's kernels take fewer heads of k and v than of q. The GPU kernels for fp32 and for masks do
    not: PyTorch would compute all probabilities instead."""
    return device.type != "cuda" or (dtype.itemsize == 2 and not masked)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, start: tuple[int, ...],
    hidden: Tensor | None = None, rule: AttentionRule = PLAIN_RULE,
) -> Tensor:  # fmt: skip
    """Return attention `[B, N, T, D]` of q `[B, N, T, D]` and k, v `[B, N, S, D]`.

    hidden: True where a query may not attend, the rule's window included; None: what causality hides.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * rule.factor(q.shape[-1])
    if hidden is None:
        hidden = hidden_columns(q.shape[2], k.shape[2], q.device)
    probabilities = softmax_by_rule(scores, hidden, rule).to(v.dtype)
    return (probabilities if key is None else attention_dropout(probabilities, key, p, start)) @ v


def softmax_by_rule(scores: Tensor, hidden: Tensor, rule: AttentionRule) -> Tensor:
    """Return the probabilities of scaled scores `[B, N, T, S]`, at least fp32, hidden where True."""
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is None:
        return scores.softmax(dim=-1)
    sinks = rule.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def check_backend(backend: Backend, dropout: float, head_dim: int, rules: Iterable[tuple[bool, bool]] = ()) -> None:
    """Raise UserError where a recipe's `attention` does not support its model's dropout, head size, or the `rules` of
    its layers, which are (softcap, sinks) as of `unknown_to`."""
    if unknown := next(filter(None, (unknown_to(backend, *rule) for rule in rules)), ""):
        raise UserError(
            f"attention={backend} does not know {unknown}, which layers of this model have; use --attention auto"
        )
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
