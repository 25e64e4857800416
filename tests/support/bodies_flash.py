"""What tests of flash attention do in Triton's interpreter and on a GPU."""

import torch
from torch import Tensor

from dtgpt.data.documents.masks import document_bounds
from dtgpt.ops.attention.core import PLAIN_RULE, AttentionRule
from dtgpt.ops.kernels.attention import flash, flash_launch
from dtgpt.ops.kernels.attention.packed import split as split_qkv
from dtgpt.ops.kernels.attention.window import spans_of_window
from dtgpt.ops.random.dropout import LEVELS, attention_mask, threshold
from dtgpt.ops.random.philox import fold, root_key

# ‖out - ref‖ / ‖ref‖: the probabilities are rounded to the dtype once, gradients twice.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def keys_of(samples: int, seed: int = 5, device: str = "cpu") -> Tensor:
    """Keys `[B, 2]` as the model has them: a slice of those of many sites."""
    return fold(root_key(seed), torch.arange(samples)[:, None], torch.arange(3)).to(device)[:, 1]


def inputs(
    shape: tuple, dtype: torch.dtype, device: str = "cpu", kv_heads: int = 0, columns: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """(leaves, q, k, v) for a q of `shape` (B, T, N, D): views of one packed leaf, or three leaves where k and v have
    `kv_heads` or `columns` of their own."""
    batch, length, heads, size = shape
    if not kv_heads and not columns:
        qkv = torch.randn(batch, length, heads, 3, size).to(dtype).to(device).requires_grad_()
        return [qkv], list(split_qkv(qkv))
    other = batch, columns or length, kv_heads or heads, size
    leaves = [torch.randn(s).to(dtype).to(device).requires_grad_() for s in (shape, other, other)]
    return leaves, leaves


def truth(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, head_start: int = 0, ends: Tensor | None = None,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:  # fmt: skip
    """In float64, head by head and from the definition. ends: bool `[B, S]`, the last tokens of documents."""
    (batch, length, heads, width), columns = q.shape, k.shape[1]
    group, first, out = heads // k.shape[2], columns - length, []
    for sample in range(batch):
        causal = torch.ones(columns, columns, dtype=torch.float64, device=q.device).tril()
        if ends is not None:
            for last in ends[sample].nonzero().flatten().tolist():
                causal[last + 1 :, : last + 1] = 0
        if rule.window is not None:
            causal = causal.triu(1 - rule.window)
        for head in range(heads):
            keys, values = (x[sample, :, head // group].double() for x in (k, v))
            scores = q[sample, :, head].double() @ keys.T * (width**-0.5 if rule.scale is None else rule.scale)
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            scores = scores.masked_fill(causal[first:] == 0, float("-inf"))
            top = scores.amax(1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(1, keepdim=True)
            weights = weights / (total if rule.sinks is None else total + torch.exp(rule.sinks[head].double() - top))
            if key is not None:
                ranges = [range(head_start + head, head_start + head + 1), range(first, columns), range(columns)]
                kept = attention_mask(key[sample], ranges, p)[0]
                weights = weights * kept * LEVELS / (LEVELS - threshold(p))
            out.append(weights @ values)
    return torch.stack(out).unflatten(0, (batch, heads)).transpose(1, 2)


def gradients(out: Tensor, leaves: list[Tensor], cotangent: Tensor, more: list[Tensor] | None = None) -> list[Tensor]:
    """dq, dk, dv, and those of `more`; leaves: as of `inputs`."""
    of_all = [*leaves, *(more or [])]
    found = torch.autograd.grad(out, of_all, cotangent.to(out.dtype))
    assert all(t.shape == leaf.shape and t.is_contiguous() for t, leaf in zip(found, of_all, strict=True))
    return list(found if len(leaves) == 3 else (*found[0].unbind(3), *found[1:]))


def error(found: Tensor, true: Tensor) -> float:
    assert not found.isnan().any()
    return ((found - true).norm() / true.norm().clamp(min=1e-300)).item()


def check(
    shape: tuple, dtype: torch.dtype, p: float, head_start: int = 0, device: str = "cpu", documents: float = 0.0,
    kv_heads: int = 0, columns: int = 0, window: int | None = None, sinks: float | None = None,
    scale: float | None = None,
) -> None:  # fmt: skip
    """`flash._forward` and its gradients; shape, kv_heads, columns: as of `inputs`. documents: the share of tokens that
    end one; sinks: the mean of the heads' sinks; window, scale: as of `AttentionRule`."""
    batch, length, heads, _ = shape
    leaves, qkv = inputs(shape, dtype, device, kv_heads, columns)
    cotangent = torch.randn(shape).to(dtype).to(device)
    key = keys_of(batch, device=device) if p else None
    ends = torch.rand(batch, columns or length, device=device) < documents if documents else None
    spans = None if ends is None else document_bounds(ends)
    if window is not None:
        spans = spans_of_window(window, batch, columns or length, cotangent.device, spans)
    drains = [] if sinks is None else [torch.randn(heads).add(sinks).to(dtype).to(device).requires_grad_()]
    out, *_ = flash._forward(*qkv, key, p, head_start, spans, scale, *drains)
    assert out.shape == shape and out.is_contiguous() and out.dtype == dtype
    found = gradients(out, leaves, cotangent, drains)
    wide = [t.detach().double().requires_grad_() for t in (*qkv, *drains)]
    rule = AttentionRule(window=window, scale=scale, sinks=wide[3] if drains else None)
    true = truth(*wide[:3], key, p, head_start, ends, rule)
    assert error(out, true) < TOLERANCE[dtype]
    expected = torch.autograd.grad(true, wide, cotangent.double())
    for name, one, other in zip("qkvs", found, expected, strict=False):
        assert one.dtype == dtype
        if name == "s":  # a sum over all queries, of either sign: it is held against the size of its addends
            shares = 1 - truth(*wide[:2], torch.ones_like(wide[2]), None, 0.0, head_start, ends, rule)
            addends = shares[..., 0] * (true * cotangent).sum(-1)
            assert (one - other).norm() < TOLERANCE[dtype] * addends.norm()
        elif name == "v" or ((columns or length) > 1 and documents < 1):  # one column has the probability 1
            assert error(one, other) < TOLERANCE[dtype], name
        else:
            assert one.abs().max() < 0.05


def interpret(*cases: tuple) -> None:
    """In a process with TRITON_INTERPRET=1: the kernels on the CPU in place of the ops' references, as on a GPU that
    copies tiles."""
    flash_launch.has_hopper = lambda device: True
    for op in (flash._forward, flash._backward):
        op._backend_fns["cpu"] = op._backend_fns["cuda"]
    for case in cases:
        named = case[-1] if isinstance(case[-1], dict) else {}
        check(*case[: len(case) - bool(named)], **named)
    flash_launch.PLACES = 0  # places of rows take 64 bits
    check(*cases[0])
