"""Rotary positions (Su et al. 2021, RoFormer, section 3.2): from a packed QKV projection to q, k and v whose products
depend on the distance of their positions, with norms of heads where a model has them.

All of it is one operation, from the packed projection on, so that a kernel reads and writes each head once; a split,
norms and rotations one after the other would each be a pass over the heads.

The angles are a table of cosines and sines, one for each device, with scalings for longer contexts; the frequencies are
those of Hugging Face's transformers. They are computed in fp32 and stay so, whatever the dtype of a model: bf16 cannot
tell large positions apart.

Sharding rule: samples, positions and heads of keys and values may be sharded; a shard of the positions passes them. The
norms' weights are whole on every shard; a shard's gradients of them are partial sums.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dtgpt.ops.norms import norm_reference, row_sums
from dtgpt.ops.operation import Operation
from dtgpt.util import seams
from dtgpt.util.torch_private import constant_result

Scaling = Literal["llama3", "linear", "yarn"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


class Rotation(NamedTuple):
    """What the angles of a model follow from. `scaling`, by `factor`, where that is not 1:

    llama3: frequencies whose wave is longer than `original_length / low_frequency` positions are divided by `factor`,
    those shorter than `original_length / high_frequency` are kept, those between are blended (Dubey et al. 2024, The
    Llama 3 Herd of Models).
    linear: all are divided (Chen et al. 2023, Position Interpolation).
    yarn: frequencies with more than `beta_fast` waves in `original_length` positions are kept, those with fewer than
    `beta_slow` are divided, those between are blended by their index (Peng et al. 2023, YaRN, section 3.2).

    `truncate`: whether the indices between which YaRN blends are rounded outwards. `amplitude` multiplies cosines and
    sines. `rotated`: the fraction of the pairs of columns that rotate, the first ones; the others keep the angle 0.
    """

    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192
    rotated: float = 1.0
    scaling: Scaling = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    @property
    def numbers(self) -> list[float]:
        """The fields as numbers, which operations take."""
        return [float(SCALINGS.index(value)) if isinstance(value, str) else float(value) for value in self]


def rotation_of(numbers: Sequence[float]) -> Rotation:
    """Return the rotation of which these are the `numbers`."""
    values: dict[str, Any] = dict(zip(Rotation._fields, numbers, strict=True))
    whole, kind, flag = (values[name] for name in ("original_length", "scaling", "truncate"))
    return Rotation(**values | {"original_length": int(whole), "scaling": SCALINGS[int(kind)], "truncate": bool(flag)})


def amplitude_of_yarn(factor: float) -> float:
    """Return what cosines and sines are multiplied by under YaRN, unless a model says otherwise (Peng et al. 2023,
    equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def frequencies(rotation: Rotation, head_dim: int) -> Tensor:
    """Return the angle between two positions of each pair of columns, fp32 `[D / 2]` on the CPU. Raise UserError for a
    scaling that no capability here has."""
    with torch.device("cpu"):
        pairs = round(rotation.rotated * (head_dim // 2))
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.int64).float() / (2 * pairs)
        waves = rotation.theta**exponents
        if rotation.factor == 1 and rotation.scaling != "yarn":
            kept = 1.0 / waves
        else:
            missing = (
                f"rope_scaling={rotation.scaling} is of a capability that this dtgpt does not have; use another one"
            )
            kept = seams.first("rotary_scalings", missing)(rotation, waves)
        return torch.cat([kept, torch.zeros(head_dim // 2 - pairs)])


@cache  # without bound: CUDA graphs read the memory of tables that they were captured with
def angle_table(rotation: Rotation, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return cosine and sine of each angle, fp32 `[2, positions, D / 2]`. The table is made once for each device."""
    with torch.inference_mode(False), torch.no_grad():
        places = torch.arange(positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(places, frequencies(rotation, head_dim))
        return (torch.stack([angles.cos(), angles.sin()]) * rotation.amplitude).to(device)


def reference(
    qkv: Tensor,
    positions: Tensor | None,
    table: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, q and k rotated, in plain torch: the test oracle. table: cosines and sines `[2, P, D / 2]`."""
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
    qkv: Tensor,
    positions: Tensor | None,
    rotation: Rotation,
    num_positions: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[B, T, N, D]`, k and v `[B, T, G, D]`: q and k rotated by their positions.

    qkv: `[B, T, G, R + 2, D]`, for each of G heads of k and v its R heads of q, then k, then v; N = G R. positions:
    int64 `[B, T]`, each below num_positions; None: 0, 1, ... q_weight, k_weight: `[D]`, weights of an RMSNorm of each
    head of q and of k before the rotation (Qwen3), with `eps`; None: no norm.

    Raises ValueError where shapes do not fit.
    """
    _check_inputs(qkv, positions, num_positions, q_weight, k_weight)
    own = row_sums().rotary_qkv if q_weight is not None else None
    return (own or ROTARY_QKV)(qkv, positions, q_weight, k_weight, eps, rotation.numbers, num_positions)


def _from_numbers(
    qkv: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
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
