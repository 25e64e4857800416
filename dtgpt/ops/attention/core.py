"""Causal scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with dropout on the probabilities by index.

The choice is made here, so that no model names a kernel, and all kernels are held against one definition. PyTorch's
attention alone would not do: its dropout masks come from a generator's state, and so would depend on the plan; it knows
neither sinks nor bounded scores; and on a GPU its gradients differ from run to run. What decides (`Case`) is the same
under every plan, or the plan would change the bits.

Back ends: `explicit`, the definition, computes all probabilities with a softmax in fp32; `sdpa` is PyTorch's own, whose
masks depend on a generator's state, so that it is used only without dropout. Kernels (`dtgpt.ops.kernels`) have names
of back ends, too: `flash` computes the probabilities tile by tile and saves none of them; `fused_softmax` runs one
operation between the two matrix products. `auto` takes the first kernel that serves, then `sdpa`, then `explicit`. On a
GPU, gradients of `sdpa` differ in their last bits from run to run, since its kernels (cuDNN, FlashAttention-2) add up
those of q in any order; all others give the same bits in every run.

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
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtgpt.ops.operation import Kernel, Operation, load_kernels
from dtgpt.ops.random.dropout import attention_dropout
from dtgpt.util.errors import UserError

Backend = Literal["auto", "sdpa", "fused_softmax", "flash", "explicit"]
LARGEST_HEAD = 256  # D that `flash` takes anywhere; smaller GPUs take fewer
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


class Case(NamedTuple):
    """What decides which kernel computes attention. It does not depend on the plan."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    drops: bool = False
    softcap: bool = False
    sinks: bool = False


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
    case = Case(q.device, q.dtype, q.shape[-1], kept is not None, rule.softcap is not None, rule.sinks is not None)
    if unknown := unknown_to(backend, case.softcap, case.sinks):
        raise ValueError(f"the back end {backend} does not know {unknown}")
    check_inputs(q, k, v, key, spans, rule.sinks)
    # A window that hides nothing here is none: kernels without one are faster, and have the bits of a model without.
    if rule.window is not None and rule.window >= k.shape[1]:
        rule = rule._replace(window=None)
    kernel = kernel_for(case, backend)
    if kernel is not None:
        return kernel.run(q, k, v, kept, p, start, spans, rule)
    if kept is None and (backend == "sdpa" or (backend == "auto" and in_pytorch(case) == "sdpa")):
        return sdpa(q, k, v, hidden_by(q, k, spans, rule), rule.scale)
    return ATTENTION.definition(q, k, v, kept, p, start, spans, rule)


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    p: float,
    start: tuple[int, ...],
    spans: Tensor | None,
    rule: AttentionRule,
) -> Tensor:
    """Return causal attention `[B, T, N, D]` from inputs that fit, by all probabilities."""
    hidden, start = hidden_by(q, k, spans, rule), positions_of(q, k, start)
    return explicit(*by_heads(q, k, v), key, p, start, hidden, rule).transpose(1, 2)


ATTENTION = Operation("attention", defined, "softmax(q k^T / sqrt(D)) v, causal (Vaswani et al. 2017, 3.2.1)")


def hidden_by(q: Tensor, k: Tensor, spans: Tensor | None, rule: AttentionRule) -> Tensor | None:
    """Return `hidden_columns` for documents or a window; None where causality alone hides."""
    if spans is None and rule.window is None:
        return None
    return hidden_columns(q.shape[1], k.shape[1], q.device, spans, rule.window)


# q, k and v, views [B, T, N, D], of qkv [B, T, N, 3, D].
split_qkv = Operation("split_qkv", lambda qkv: qkv.unbind(3), "q, k, v = qkv[..., i, :], i = 0, 1, 2")


def positions_of(q: Tensor, k: Tensor, start: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the first probability within a sample; start: that of its head, its query and its column."""
    return (start[0], start[1] + k.shape[1] - q.shape[1], start[2])


def kernel_for(case: Case, backend: Backend = "auto") -> Kernel | None:
    """Return the kernel that computes attention; None: PyTorch does. Raise UserError for one that there is not."""
    if backend in ("sdpa", "explicit") or (backend == "auto" and case.device.type == "cpu"):
        return None
    load_kernels(ATTENTION.name)
    for kernel in ATTENTION.kernels:
        if kernel.name == backend or (backend == "auto" and kernel.serves(case)):
            return kernel
    if backend == "auto":
        return None
    raise UserError(f"attention={backend} is a kernel, and this dtgpt has none of that name; use --attention auto")


def in_pytorch(case: Case) -> Backend:
    """Return the back end where no kernel serves: PyTorch's own, unless something drops or it does not know a rule."""
    return "explicit" if case.drops or case.softcap or case.sinks else "sdpa"


def hidden_columns(
    queries: int, columns: int, device: torch.device, spans: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return bool `[T, S]`, or `[B, 1, T, S]` with spans, True where a query may not attend: to columns after its
    position, which is i + S - T for query i, before its document, or further back than `window` columns. spans: int32
    `[B, S, 2]`, bounds of documents."""
    column = torch.arange(columns, device=device)
    position = torch.arange(columns - queries, columns, device=device)[:, None]
    hidden = column > position
    if window is not None:
        hidden = hidden | (column <= position - window)
    return hidden if spans is None else (hidden | (column < spans[:, columns - queries :, :1]))[:, None]


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as `[B, N, T, D]` and twice `[B, N, S, D]`: heads of k and v are repeated for their queries."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, spans: Tensor | None, sinks: Tensor | None = None
) -> None:
    """Raise ValueError where shapes do not fit."""
    if not (q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3] and _covers(q, k)):
        raise ValueError(
            f"q, k, v have the shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; they need to be "
            "[B, T, N, D] and twice [B, S, N_kv, D], where S >= T and N_kv divides N"
        )
    if key is not None and key.shape != (len(q), 2):
        raise ValueError(f"keys have the shape {tuple(key.shape)}; {len(q)} samples need [{len(q)}, 2]")
    if spans is not None and (spans.shape != (*k.shape[:2], 2) or spans.dtype != torch.int32):
        raise ValueError(f"spans are {spans.dtype} {tuple(spans.shape)}; they need to be int32 [B, S, 2]")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks have the shape {tuple(sinks.shape)}; {q.shape[2]} heads need [{q.shape[2]}]")


def _covers(q: Tensor, k: Tensor) -> bool:
    return k.shape[1] >= q.shape[1] and 0 < k.shape[2] <= q.shape[2] and q.shape[2] % k.shape[2] == 0


def unknown_to(backend: Backend, softcap: bool, sinks: bool) -> str:
    """Return what a back end does not know of a layer's rule; empty where it knows all."""
    if softcap and backend in ("sdpa", "fused_softmax", "flash"):
        return "softly bounded scores"
    return "attention sinks" if sinks and backend in ("sdpa", "fused_softmax") else ""


def sdpa(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float | None = None) -> Tensor:
    """Return PyTorch's attention `[B, T, N, D]` of q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`.

    hidden: True where a query may not attend; None: what causality hides. scale: factor of q k^T; None: 1 / sqrt(D).
    PyTorch chooses a kernel by dtype, D and T, so that the choice is the same in every plan.
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    p: float,
    start: tuple[int, ...],
    hidden: Tensor | None = None,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:
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
    its layers, each (whether scores are bounded softly, whether heads have sinks)."""
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
