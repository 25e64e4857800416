"""Gemma 3 (Gemma Team 2025), its text models: norms before and after each branch and of each head of queries and keys,
with weights 1 + w; scaled embeddings; GeGLU; a window in five of six blocks, which have positions of their own base.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, R = N / G, F width of the
MLP, V padded vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import SIZE
from dtgpt.models.layers import (
    NO_DROPOUT,
    AttentionCore,
    Branch,
    Context,
    DeferredBiasLinear,
    Dropout,
    FinalRMSNorm,
    Linear,
    LossWeights,
    Output,
    RMSNorm,
    Table,
    add,
)
from dtgpt.models.llama import MLP, HeadNorm
from dtgpt.models.llama import ROLES as LLAMA
from dtgpt.models.roles import Role, Roles, role_of
from dtgpt.models.rotary import RotaryConfig, Window, WindowPattern
from dtgpt.ops.activations import GatedName
from dtgpt.ops.norms import norm, norm_and_pass, residual_norm
from dtgpt.ops.random.dropout import Site
from dtgpt.ops.rotary_positions import Rotation, rotary_qkv
from dtgpt.util.field_types import Bounds

ROLES: Roles = {**LLAMA, "blocks.*.after_1": Role.NORM, "blocks.*.after_2": Role.NORM}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(RotaryConfig):
    """The shape of a Gemma 3. The named sizes stand below."""

    architecture: ClassVar[str] = "gemma3_text"
    roles: ClassVar[Roles] = ROLES

    head_dim: Annotated[int, "size of a head, an even number", SIZE] = 256  # type: ignore[assignment]
    seq_length: Annotated[int, "positions; also tokens of a training sample, unless --seq_length is less", SIZE] = 32768
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 262144
    tied: Annotated[bool, "use the token embedding as output projection"] = True  # type: ignore[assignment]
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-6
    activation: Annotated[GatedName, "function of the gate in the MLP; silu: SwiGLU, gelu_tanh: GeGLU"] = "gelu_tanh"
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 1000000.0
    rope_local_theta: Annotated[float, "the same of blocks with a window, which no rope_factor scales", Bounds(1)] = (
        10000.0
    )
    attention_scalar: Annotated[int, "attention scores are divided by the square root of this", SIZE] = 256
    window: Window = 512
    window_pattern: WindowPattern = "LLLLLG"

    def initial_weight(self, name: str) -> tuple[float, float]:
        """Return (mean, standard deviation): zero for norms, whose weights are 1 + w; else as everywhere."""
        role = role_of(name.rpartition(".")[0], self.roles)
        return (0.0, 0.0) if role in (Role.NORM, Role.HEAD_NORM) else super().initial_weight(name)

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        rotation = Rotation(theta=self.rope_local_theta) if self.is_local(index) else self.rotation
        return Block(self, self.window_of(index), rotation)

    def make_head(self) -> "Head":
        return Head(self)


GEMMA3_270M = Gemma3Config(num_layers=18, hidden_size=640, num_heads=4, num_kv_heads=1, ffn_hidden_size=2048)
GEMMA3_1B = Gemma3Config(num_layers=26, hidden_size=1152, num_heads=4, num_kv_heads=1, ffn_hidden_size=6912)


def shifted(weight: Tensor) -> Tensor:
    """Return 1 + weight, in fp32 at least."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0


class ShiftedRMSNorm(RMSNorm):
    """An `RMSNorm` that multiplies the normalised values by 1 + weight."""

    def forward(  # type: ignore[override]
        self, x: Tensor, branch: Branch | None = None, site: Site = NO_DROPOUT
    ) -> tuple[Tensor, Tensor]:
        weight = shifted(self.weight)
        if branch is None:
            return norm_and_pass(x, weight, None, self.eps)
        return residual_norm(x, *branch, weight, None, self.eps, *site)


class ShiftedFinalRMSNorm(FinalRMSNorm):
    """A `FinalRMSNorm` that multiplies the normalised values by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, shifted(self.weight), None, self.eps)


class Embedding(BoundModule):
    """tokens `[B, T]` -> activations `[B, T, H]`, times sqrt(H) as their dtype has it."""

    def __init__(self, config: Gemma3Config, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.scale = dtype, torch.tensor(math.sqrt(config.hidden_size), dtype=dtype, device="cpu").item()
        self.tokens = Table(config.padded_vocab_size, config.hidden_size)
        self.drop = Dropout(config.dropout)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.drop(self.tokens(tokens).to(self.dtype) * self.scale, context.dropout_keys)


class Block(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(norm(attention(norm(x)))), then the same with the MLP."""

    def __init__(self, config: Gemma3Config, window: int | None, rotation: Rotation):
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.norm_1 = ShiftedRMSNorm(size, eps=eps)
        self.attn = Attention(config, window, rotation)
        self.after_1 = ShiftedFinalRMSNorm(size, eps=eps)
        self.drop_1 = Dropout(config.dropout, index=1)
        self.norm_2 = ShiftedRMSNorm(size, eps=eps)
        self.mlp = MLP(config)
        self.after_2 = ShiftedFinalRMSNorm(size, eps=eps)
        self.drop_2 = Dropout(config.dropout, index=2)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x, h = self.norm_1(x)
        x, h = self.norm_2(x, Branch(self.after_1(self.attn(h, context)), None), self.drop_1.site(keys))
        return add(x, Branch(self.after_2(self.mlp(h).product), None), self.drop_2.site(keys))


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`; QKV as in LLaMA."""

    def __init__(self, config: Gemma3Config, window: int | None, rotation: Rotation):
        super().__init__()
        self.head_dim, self.parts = config.head_dim, config.num_heads // config.num_kv_heads + 2
        self.rotation, self.num_positions, self.eps = rotation, config.seq_length, config.norm_eps
        self.qkv = Linear(config.hidden_size, config.num_kv_heads * self.parts * config.head_dim, bias=False)
        self.q_norm, self.k_norm = HeadNorm(config.head_dim), HeadNorm(config.head_dim)
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(
            window=window, scale=config.attention_scalar**-0.5, heads=(config.num_kv_heads, config.head_dim)
        )
        self.proj = DeferredBiasLinear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        qkv = rearrange(self.qkv(x), "b t (g parts d) -> b t g parts d", parts=self.parts, d=self.head_dim)
        q_weight, k_weight = (shifted(each.weight) for each in (self.q_norm, self.k_norm))
        q, k, v = rotary_qkv(qkv, context.positions, self.rotation, self.num_positions, q_weight, k_weight, self.eps)
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return self.proj(heads.flatten(-2))


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`."""

    def __init__(self, config: Gemma3Config):
        super().__init__()
        self.norm = ShiftedFinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.output = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)
