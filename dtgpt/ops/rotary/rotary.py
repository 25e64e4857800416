"""From a packed QKV projection to q, k and v: normalise heads where the model does so, rotate by position.

Sharding rule: samples, positions and heads of keys and values may be sharded; a shard of the positions passes them. The
norms' weights are whole on every shard; a shard's gradients of them are partial sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.norm.norm import norm_reference
from dtgpt.ops.rotary.table import Rotation, angle_table, rotation_of
from dtgpt.ops.serve import Operation
from dtgpt.util.torch_private import constant_result


def reference(
    qkv: Tensor, positions: Tensor | None, table: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `rotary_qkv` does, in plain torch: the test oracle. table: as of `angle_table`."""
    q, k, v = split_heads(qkv)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    if q_weight is not None and k_weight is not None:
        q, k = norm_reference(q, q_weight, None, eps), norm_reference(k, k_weight, None, eps)
    cosine, sine = angles_of(table, positions, qkv.shape[1])
    return rotate(q, cosine, sine).to(qkv.dtype), rotate(k, cosine, sine).to(qkv.dtype), v


def split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[B, T, N, D]`, k and v `[B, T, G, D]` of qkv `[B, T, G, R + 2, D]`."""
    return qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]


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

    Raises ValueError where shapes do not fit.
    """
    _check_inputs(qkv, positions, num_positions, q_weight, k_weight)
    return ROTARY_QKV(qkv, positions, q_weight, k_weight, eps, rotation.numbers, num_positions)


def _from_numbers(
    qkv: Tensor, positions: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    rotation: Sequence[float], num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    table = table_of(qkv.shape[-1], rotation, num_positions, qkv.device)
    return reference(qkv, positions, table, q_weight, k_weight, eps)


ROTARY_QKV = Operation("rotary_qkv", _from_numbers, "q, k and v; columns i and i + D / 2 of q and k rotated by angle i")


def _check_inputs(
    qkv: Tensor, positions: Tensor | None, num_positions: int, q_weight: Tensor | None, k_weight: Tensor | None
) -> None:
    """Raise ValueError where shapes do not fit: the kernels do not check."""
    shape = tuple(qkv.shape)
    if qkv.dim() != 5 or shape[3] < 3 or shape[4] % 2:
        raise ValueError(f"qkv has the shape {shape}; it needs to be [B, T, G, R + 2, D] with R > 0 and an even D")
    if positions is not None and (positions.shape != shape[:2] or positions.dtype != torch.int64):
        raise ValueError(f"positions are {positions.dtype} {tuple(positions.shape)}; they need to be int64 {shape[:2]}")
    if positions is None and shape[1] > num_positions:
        raise ValueError(f"{shape[1]} positions need angles for as many, not for num_positions={num_positions}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("heads of q and of k are both normalised or neither")
    for weight in (q_weight, k_weight):
        if weight is not None and weight.shape != shape[4:]:
            raise ValueError(f"the weight of a head's norm has the shape {tuple(weight.shape)}, not {shape[4:]}")


def angles_of(table: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[B, T, 1, D / 2]`."""
    chosen = table[:, :length].unsqueeze(1) if positions is None else table[:, positions]
    cosine, sine = chosen.unsqueeze(-2)
    return cosine, sine


@constant_result  # Dynamo looks through caches, and would trace how the table is made
def table_of(head_dim: int, rotation: Sequence[float], num_positions: int, device: torch.device) -> Tensor:
    """Return `angle_table`. The ops take the numbers that it follows from, so that they neither save nor trace it."""
    return angle_table(rotation_of(rotation), head_dim, num_positions, device)
