"""What serves the rotation of q and k that are normalised over all heads: one Triton kernel each way, fp32 inside.

Backward saves the packed input, from which it normalises the heads again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.joint_rotary import JOINT_ROTARY, packed
from dtgpt.ops.kernels.devices import by_triton, takes_custom_op
from dtgpt.ops.kernels.norm import rms_norm_gradient
from dtgpt.ops.norms import norm_reference, reciprocal_root
from dtgpt.ops.rotary_positions import angles_of, rotate, split_heads, table_of

MOST_WIDTH = 8192  # columns of q that a program holds


def kernels():
    from dtgpt.ops.kernels import joint_rotary_kernels  # imported on first use, since it needs Triton

    return joint_rotary_kernels


@torch.library.custom_op("dtgpt::joint_rotary", mutates_args=(), device_types="cpu")
def _joint(
    qkv: Tensor,
    positions: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    limit: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = JOINT_ROTARY.definition(qkv, positions, q_weight, k_weight, eps, limit, rotation, num_positions)
    return q, k, v.clone(memory_format=torch.contiguous_format)


@_joint.register_kernel("cuda")
def _(qkv, positions, q_weight, k_weight, eps, limit, rotation, num_positions):
    table = table_of(qkv.shape[-1], rotation, num_positions, qkv.device)
    return kernels().joint_forward(qkv, positions, table, q_weight, k_weight, eps, limit)


@_joint.register_fake
def _(qkv, *_):
    batch, length, groups, parts, size = qkv.shape
    k, v = (qkv.new_empty(batch, length, groups, size) for _ in range(2))
    return qkv.new_empty(batch, length, groups * (parts - 2), size), k, v


@torch.library.custom_op("dtgpt::joint_rotary_backward", mutates_args=(), device_types="cpu")
def _joint_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    positions: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    limit: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of qkv and of the weights."""
    wide = torch.promote_types(dq.dtype, torch.float32)
    cosine, sine = angles_of(table_of(dq.shape[-1], rotation, num_positions, dq.device), positions, dq.shape[1])
    q, k, v = split_heads(qkv)
    made, parts = [], ((dq, q, q_weight), (dk, k, k_weight))
    for grad, heads, weight in parts:
        x, dy = heads.flatten(-2), rotate(grad.to(wide), cosine, -sine).flatten(-2)
        dy = _within(dy, norm_reference(x, weight, None, eps), limit)
        made.append(rms_norm_gradient(dy, x, reciprocal_root(x, eps), weight))
    (dq, dq_weight), (dk, dk_weight) = made
    d_qkv = packed(dq, dk, _within(dv.to(wide), v, limit)).to(qkv.dtype)
    return d_qkv, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)


def _within(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """Return the gradient of what is bounded, from that of its bounded values."""
    return grad * (x.abs() <= limit) if limit else grad


@_joint_backward.register_kernel("cuda")
def _(dq, dk, dv, qkv, positions, q_weight, k_weight, eps, limit, rotation, num_positions):
    table = table_of(qkv.shape[-1], rotation, num_positions, qkv.device)
    return kernels().joint_backward(dq, dk, dv, qkv, positions, table, q_weight, k_weight, eps, limit)


@_joint_backward.register_fake
def _(dq, dk, dv, qkv, positions, q_weight, k_weight, *_):
    return torch.empty_like(qkv), torch.empty_like(q_weight), torch.empty_like(k_weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    qkv, positions, q_weight, k_weight, *ctx.numbers = inputs
    ctx.save_for_backward(qkv, positions, q_weight, k_weight)


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor):
    saved = ctx.saved_tensors  # read once: recomputation frees saved tensors after the first access
    d_qkv, dq_weight, dk_weight = _joint_backward(dq, dk, dv, *saved, *ctx.numbers)
    return d_qkv, None, dq_weight, dk_weight, None, None, None, None


_joint.register_autograd(_differentiate, setup_context=_save)


def _serves(qkv: Tensor, positions: Tensor | None, q_weight: Tensor, *_: Any) -> bool:
    return takes_custom_op(qkv, has_parameters=True) and q_weight.numel() <= MOST_WIDTH


JOINT = (by_triton(_joint, _serves, f"q up to {MOST_WIDTH:,} wide"),)
