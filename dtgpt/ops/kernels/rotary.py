"""What serves the rotation of q and k: one Triton kernel each way, fp32 inside.

Backward needs nothing but the angles, which follow from the positions; with norms the packed input is saved, from which
backward normalises the heads again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, takes_custom_op
from dtgpt.ops.kernels.norm import like, rms_norm_gradient
from dtgpt.ops.norms import reciprocal_root
from dtgpt.ops.rotary_positions import angles_of, reference, rotate, split_heads, table_of


def kernels():
    from dtgpt.ops.kernels import rotary_kernels  # imported on first use, since it needs Triton

    return rotary_kernels


@torch.library.custom_op("dtgpt::rotary_qkv", mutates_args=(), device_types="cpu")
def _rotary(
    qkv: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    table = table_of(qkv.shape[-1], rotation, num_positions, qkv.device)
    q, k, v = reference(qkv, positions, table, q_weight, k_weight, eps)
    return q, k, v.clone(memory_format=torch.contiguous_format)


@_rotary.register_kernel("cuda")
def _(qkv, positions, q_weight, k_weight, eps, rotation, num_positions):
    table = table_of(qkv.shape[-1], rotation, num_positions, qkv.device)
    return kernels().rotary_forward(qkv, positions, table, q_weight, k_weight, eps)


@_rotary.register_fake
def _(qkv, *_):
    batch, length, groups, parts, size = qkv.shape
    k, v = (qkv.new_empty(batch, length, groups, size) for _ in range(2))
    return qkv.new_empty(batch, length, groups * (parts - 2), size), k, v


@torch.library.custom_op("dtgpt::rotary_qkv_backward", mutates_args=(), device_types="cpu")
def _rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (d_qkv, dq_weight, dk_weight); qkv is None, and the latter two are empty, without norms."""
    wide = torch.promote_types(dq.dtype, torch.float32)
    cosine, sine = angles_of(table_of(dq.shape[-1], rotation, num_positions, dq.device), positions, dq.shape[1])
    q, k = (rotate(t.to(wide), cosine, -sine) for t in (dq, dk))
    dq_weight, dk_weight = dq.new_empty(0), dq.new_empty(0)
    if qkv is not None and q_weight is not None and k_weight is not None:
        q_heads, k_heads, _ = split_heads(qkv)
        q, dq_weight = rms_norm_gradient(q, q_heads, reciprocal_root(q_heads, eps), q_weight)
        k, dk_weight = rms_norm_gradient(k, k_heads, reciprocal_root(k_heads, eps), k_weight)
        dq_weight, dk_weight = dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)
    parts = q.unflatten(2, (dk.shape[2], -1)), k.unsqueeze(3), dv.to(wide).unsqueeze(3)
    return torch.cat(parts, dim=3).to(dq.dtype), dq_weight, dk_weight


@_rotary_backward.register_kernel("cuda")
def _(dq, dk, dv, qkv, positions, q_weight, k_weight, eps, rotation, num_positions):
    table = table_of(dq.shape[-1], rotation, num_positions, dq.device)
    d_qkv, *sums = kernels().rotary_backward(dq, dk, dv, qkv, positions, table, q_weight, k_weight, eps)
    return d_qkv, *(dq.new_empty(0) if t is None else t for t in sums)


@_rotary_backward.register_fake
def _(dq, dk, dv, qkv, positions, q_weight, k_weight, *_):
    batch, length, groups, size = dk.shape
    d_qkv = dq.new_empty(batch, length, groups, dq.shape[2] // groups + 2, size)
    return d_qkv, like(q_weight, dq), like(k_weight, dq)


def _save(ctx, inputs, output) -> None:
    qkv, positions, q_weight, k_weight, *ctx.numbers = inputs
    ctx.save_for_backward(None if q_weight is None else qkv, positions, q_weight, k_weight)


def _differentiate(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
    saved = ctx.saved_tensors  # read once: recomputation frees saved tensors after the first access
    d_qkv, *d_weights = _rotary_backward(dq, dk, dv, *saved, *ctx.numbers)
    return d_qkv, None, *((None, None) if saved[2] is None else d_weights), None, None, None


_rotary.register_autograd(_differentiate, setup_context=_save)


def _serves(qkv: Tensor, positions: Tensor | None, q_weight: Tensor | None, *_: Any) -> bool:
    return takes_custom_op(qkv, has_parameters=q_weight is not None)


ROTARY_QKV = (by_triton(_rotary, _serves),)
