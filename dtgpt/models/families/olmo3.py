"""OLMo 3 (Team OLMo 2025): norms after the branches, an RMSNorm of queries and of keys over all heads together, and a
window in three of four blocks, whose positions are not scaled by YaRN as those of the others are.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, R = N / G, F width of the
MLP, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import PLAIN, Binding, BoundModule
from dtgpt.models.config import SIZE
from dtgpt.models.layers import (
    AttentionCore,
    Branch,
    Context,
    DeferredBiasLinear,
    Dropout,
    FinalRMSNorm,
    Linear,
    add,
)
from dtgpt.models.llama import MLP, Embedding, Head
from dtgpt.models.llama import ROLES as LLAMA
from dtgpt.models.roles import Role, Roles
from dtgpt.models.rotary import RotaryConfig, Window, WindowPattern
from dtgpt.ops.joint_rotary import JOINT_ROTARY, bounded, packed
from dtgpt.ops.norms import RowSums, norm, row_sums
from dtgpt.ops.rotary_positions import Rotation, rotary_qkv, split_heads
from dtgpt.util.field_types import Bounds
from dtgpt.util.torch_private import is_dtensor

ROLES: Roles = {**LLAMA, "blocks.*.attn.q_norm": Role.JOINT_NORM, "blocks.*.attn.k_norm": Role.JOINT_NORM}


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(RotaryConfig):
    """The shape of an OLMo 3. The named sizes stand below."""

    architecture: ClassVar[str] = "olmo3"
    roles: ClassVar[Roles] = ROLES

    seq_length: Annotated[int, "positions; also tokens of a training sample, unless --seq_length is less", SIZE] = 8192
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 100278
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-6
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 500000.0
    window: Window = 4096
    window_pattern: WindowPattern = "LLLG"

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        rotation = Rotation(theta=self.rope_theta) if self.is_local(index) else self.rotation
        return Block(self, self.window_of(index), rotation)

    def make_head(self) -> Head:
        return Head(self)


OLMO3_7B = Olmo3Config(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008)
OLMO3_32B = Olmo3Config(num_layers=64, hidden_size=5120, num_heads=40, num_kv_heads=8, ffn_hidden_size=27648)


class JointNorm(nn.Module):
    """RMSNorm of all heads together, `[B, T, N D]`; a rank may have some of the heads, and the sum over all of them by
    `bound.sum_of_heads`, or the whole norm by `bound.product`. Computed in fp32 at least and rounded once."""

    bound: Binding = PLAIN

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))

    @property
    def held(self) -> Tensor:
        """What this rank has of the weight."""
        return self.weight.to_local() if is_dtensor(self.weight) else self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.held
        if self.bound.product is not None:
            return self.bound.product(x, weight)
        if self.bound.sum_of_heads is None:
            return norm(x, weight, None, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.bound.sum_of_heads(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.width + self.eps) * weight.to(wide.dtype)).to(x.dtype)


class Block(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(norm(attention(x))), then x = x + dropout(norm(mlp(x)))."""

    def __init__(self, config: Olmo3Config, window: int | None, rotation: Rotation):
        super().__init__()
        self.attn = Attention(config, window, rotation)
        self.norm_1 = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.drop_1 = Dropout(config.dropout, index=1)
        self.mlp = MLP(config)
        self.norm_2 = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.drop_2 = Dropout(config.dropout, index=2)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x = add(x, Branch(self.norm_1(self.attn(x, context).product), None), self.drop_1.site(keys))
        return add(x, Branch(self.norm_2(self.mlp(x).product), None), self.drop_2.site(keys))


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`; QKV as in LLaMA."""

    def __init__(self, config: RotaryConfig, window: int | None, rotation: Rotation):
        super().__init__()
        self.head_dim, self.parts = config.head_dim, config.num_heads // config.num_kv_heads + 2
        self.rotation, self.num_positions, self.limit = rotation, config.seq_length, 0.0
        self.qkv = Linear(config.hidden_size, config.num_kv_heads * self.parts * config.head_dim, bias=False)
        self.q_norm = JointNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = JointNorm(config.num_kv_heads * config.head_dim, config.norm_eps)
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(window=window, heads=(config.num_kv_heads, config.head_dim))
        self.proj = DeferredBiasLinear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Branch:
        qkv = rearrange(self.qkv(x), "b t (g parts d) -> b t g parts d", parts=self.parts, d=self.head_dim)
        q, k, v = self.turned(qkv, context.positions)
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return Branch(self.proj(heads.flatten(-2)), None)

    def turned(self, qkv: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[B, T, N, D]`, k and v `[B, T, G, D]` of qkv `[B, T, G, R + 2, D]`: normalised over all heads,
        bounded by `limit` where that is not 0, and rotated."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm.bound.sum_of_heads is q_norm.bound.product is None and type(row_sums()) is RowSums:
            weights, numbers = (q_norm.held, k_norm.held, q_norm.eps, self.limit), self.rotation.numbers
            return JOINT_ROTARY(qkv, positions, *weights, numbers, self.num_positions)
        q, k, v = split_heads(qkv)
        parts = bounded(self.limit, q_norm(q.flatten(-2)), k_norm(k.flatten(-2)), v)
        return rotary_qkv(packed(*parts), positions, self.rotation, self.num_positions)
