"""What serves attention over a batch: which kernels there are, and when each is taken."""

from functools import partial

import torch
from torch import Tensor

from dtgpt.ops.attention.core import AttentionRule, Case, by_heads, hidden_by, positions_of
from dtgpt.ops.kernels.attention.flash import flash_attention
from dtgpt.ops.kernels.attention.flash_launch import largest_head
from dtgpt.ops.kernels.attention.packed import split, takes_split
from dtgpt.ops.kernels.attention.window import spans_of_window
from dtgpt.ops.kernels.devices import by_triton, why_below, why_no_build
from dtgpt.ops.kernels.fused_softmax.softmax import scaled_masked_softmax
from dtgpt.ops.operation import Kernel
from dtgpt.util.shared.gpu_limits import SIXTEEN_BITS


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    p: float,
    start: tuple[int, ...],
    spans: Tensor | None,
    rule: AttentionRule,
) -> Tensor:
    if rule.window is not None:
        spans = spans_of_window(rule.window, len(q), k.shape[1], q.device, spans)
    return flash_attention(q, k, v, key, p, start[0], spans, rule.scale, rule.sinks)


def _fused_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    p: float,
    start: tuple[int, ...],
    spans: Tensor | None,
    rule: AttentionRule,
) -> Tensor:
    hidden, start = hidden_by(q, k, spans, rule), positions_of(q, k, start)
    q, k, v = by_heads(q, k, v)
    mask = "causal" if hidden is None else _of_samples(hidden, len(q))
    scale = rule.factor(q.shape[-1])
    out = scaled_masked_softmax(q @ k.transpose(-2, -1), scale, mask, key=key, p=p, start=start) @ v
    return out.transpose(1, 2)


def _why_not_built(device: torch.device) -> str | None:
    reason = why_no_build(device)
    return reason if reason is None or device.type != "cuda" else f"{reason}: torch.compile makes the kernel, slower"


def _of_samples(hidden: Tensor, batch: int) -> Tensor:
    """Return a mask as one `[B, 1, T, S]` for samples."""
    return hidden if hidden.dim() == 4 else hidden.expand(batch, 1, -1, -1).contiguous()


def _takes_flash(case: Case) -> bool:
    """Return whether `auto` takes `flash`, which has the same bits in every run.

    Measured by `benchmarks/op_flash.py` on an H200, its forward and backward take 0.91 times as long as cuDNN's at
    head_dim 64 and 4096 tokens, and 1.10 times as long at 128, where PyTorch has no kernel with reproducible gradients
    that is as fast.
    """
    gains = case.device.type == "cuda" and case.dtype != torch.float32 and not case.softcap
    return gains and case.head_dim <= largest_head(case.dtype, case.device)


ATTENTION = (
    Kernel(
        name="flash",
        serves=_takes_flash,
        run=_flash,
        why_not=partial(why_below, SIXTEEN_BITS),
        when="16 bits, heads of up to 256, or 128 where a program may use less than 200 kB of shared memory; scores "
        "are not bounded softly",
        kept=(torch.ops.dtgpt.flash_forward.default,),
    ),
    Kernel(
        name="fused_softmax",
        serves=lambda case: False,
        run=_fused_softmax,
        why_not=_why_not_built,
        when="by --attention fused_softmax alone",
    ),
)


def _sum_rows(x: Tensor, table: Tensor) -> Tensor:
    from dtgpt.ops.kernels.attention.shared_kernels import launch_sum  # imported on first use, since it needs Triton

    return launch_sum(x.contiguous(), table)


SUM_ROWS = (by_triton(_sum_rows, when="on GPUs: each number is read and written once"),)
SPLIT_QKV = (
    Kernel(
        name="PyTorch, without a copy",
        serves=takes_split,
        run=split,
        why_not=lambda device: None,
        when="backward returns the buffer of gradients that flash writes",
    ),
)
