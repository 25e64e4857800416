"""From a packed QKV projection to q, k and v: normalise heads where the model does so, rotate by position.

Reference: `reference`. Sharding rule: samples, positions and heads of keys and values may be sharded; a shard of the
positions passes them. The norms' weights are whole on every shard; a shard's gradients of them are partial sums.
"""

import torch
from torch import Tensor

from dtgpt.ops.norm.rms_norm import rms_norm_reference
from dtgpt.ops.rotary.table import Rotation, angle_table


def reference(
    qkv: Tensor, positions: Tensor | None, table: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `rotary_qkv` does, in plain torch: the test oracle. table: as of `angle_table`."""
    q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    chosen = table[:, : qkv.shape[1]].unsqueeze(1) if positions is None else table[:, positions]
    cosine, sine = chosen.unsqueeze(-2)  # [B, T, 1, D / 2] each
    return rotate(q, cosine, sine), rotate(k, cosine, sine), v


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x `[.., D]` with column i and column i + D / 2 rotated by angle i, in fp32, rounded to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


def rotary_qkv(
    qkv: Tensor, positions: Tensor | None, rotation: Rotation, num_positions: int,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q `[B, T, N, D]`, k and v `[B, T, G, D]`: q and k rotated by their positions.

    qkv: `[B, T, G, R + 2, D]`, for each of G heads of k and v its R heads of q, then k, then v; N = G R. positions:
    int64 `[B, T]`, each below num_positions; None: 0, 1, ... q_weight, k_weight: `[D]`, weights of an RMSNorm of each
    head of q and of k before the rotation (Qwen3), with `eps`; None: no norm.
    """
    table = angle_table(rotation, qkv.shape[-1], num_positions, qkv.device)
    return reference(qkv, positions, table, q_weight, k_weight, eps)
