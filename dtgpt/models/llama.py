"""LLaMA (Touvron et al. 2023; Llama 3: Dubey et al. 2024) and what differs from it in a number or a norm: Mistral
without its window (Jiang et al. 2023) and dense Qwen3 (Yang et al. 2025), which normalises the heads of q and k.

Rotary positions, pre-RMSNorm, SwiGLU, grouped queries, no biases; dropout, where wanted, at GPT-2's three sites.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, R = N / G, F width of the
MLP, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import LARGEST_SIZE, SIZE, ModelConfig
from dtgpt.models.inventory import Parameter, Rows
from dtgpt.models.layers import (
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
    add,
    mlp,
)
from dtgpt.models.roles import Role, Roles
from dtgpt.ops.decode.weights import BlockWeights, EmbeddingWeights, HeadWeights, Rotary
from dtgpt.ops.pointwise.activation import fused_name
from dtgpt.ops.pointwise.swiglu import swiglu
from dtgpt.ops.rotary.rotary import rotary_qkv
from dtgpt.ops.rotary.table import Rotation, angle_table
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

ROLES: Roles = {
    "embedding.tokens": Role.VOCABULARY,
    "embedding.drop": Role.STREAM_DROPOUT,
    "blocks.*.norm_1": Role.NORM,
    "blocks.*.attn.qkv": Role.QKV,
    "blocks.*.attn.q_norm": Role.HEAD_NORM,
    "blocks.*.attn.k_norm": Role.HEAD_NORM,
    "blocks.*.attn.dropout": Role.HEAD_DROPOUT,
    "blocks.*.attn.proj": Role.ROW,
    "blocks.*.drop_1": Role.STREAM_DROPOUT,
    "blocks.*.norm_2": Role.NORM,
    "blocks.*.mlp.gate_up": Role.COLUMN,
    "blocks.*.mlp.down": Role.ROW,
    "blocks.*.drop_2": Role.STREAM_DROPOUT,
    "head.norm": Role.NORM,
    "head.output": Role.OUTPUT,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shape of a LLaMA, a Mistral or a Qwen3. The named sizes stand below."""

    architecture: ClassVar[str] = "llama"
    roles: ClassVar[Roles] = ROLES

    num_kv_heads: Annotated[int, "number of heads of keys and values; divides num_heads", SIZE]
    head_dim: Annotated[int, "size of a head, an even number", SIZE] = 128  # type: ignore[assignment]
    ffn_hidden_size: Annotated[int, "width of the MLP", SIZE]
    seq_length: Annotated[int, "number of positions, and tokens of a training sample unless it has fewer", SIZE] = 4096
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 128256
    tied: Annotated[bool, "use the token embedding as output projection"] = False  # type: ignore[assignment]
    qk_norm: Annotated[bool, "normalise each head of queries and keys by RMSNorm, as Qwen3 does"] = False
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-5
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 10000.0
    rope_factor: Annotated[
        float, "Llama 3.1's scaling of rotary positions: low frequencies are divided by this; 1: none", Bounds(1)
    ] = 1.0
    rope_low_frequency: Annotated[
        float, "frequencies with fewer waves than this in rope_original_length are divided", Bounds(above=0)
    ] = 1.0
    rope_high_frequency: Annotated[
        float, "frequencies with more waves than this in rope_original_length are kept", Bounds(above=0)
    ] = 4.0
    rope_original_length: Annotated[int, "number of positions that the model had before rope_factor", SIZE] = 8192

    def check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use one of {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim={self.head_dim} is odd, but rotary positions rotate pairs of columns; use "
                f"{self.head_dim - 1 or 2} or {self.head_dim + 1}"
            )
        if self.num_heads * self.head_dim > LARGEST_SIZE:
            raise UserError(
                f"model.num_heads={self.num_heads} times model.head_dim={self.head_dim} is more than {LARGEST_SIZE}; "
                "use fewer or smaller heads"
            )
        if self.rope_low_frequency >= self.rope_high_frequency:
            raise UserError(
                f"model.rope_low_frequency={self.rope_low_frequency} is not below "
                f"model.rope_high_frequency={self.rope_high_frequency}; use 1 and 4, Llama 3.1's values"
            )

    @property
    def cut_by_tp(self) -> dict[str, int]:
        return {"num_kv_heads": self.num_kv_heads, "ffn_hidden_size": self.ffn_hidden_size}

    @property
    def rotation(self) -> Rotation:
        """What the angles of rotary positions follow from."""
        return Rotation(
            self.rope_theta, self.rope_factor, self.rope_low_frequency, self.rope_high_frequency,
            self.rope_original_length,
        )  # fmt: skip

    def pieces(self, parameter: Parameter, per_head: bool = False) -> list[Rows]:
        if not parameter.name.endswith("mlp.gate_up.weight"):
            return super().pieces(parameter, per_head)
        rows = parameter.shape[0]
        return [(range(0, rows, 2),), (range(1, rows, 2),)]

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        return Block(self)

    def make_head(self) -> "Head":
        return Head(self)


LLAMA2_7B = LlamaConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_hidden_size=11008,
    vocab_size=32000,
)  # fmt: skip
LLAMA3_8B = LlamaConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden_size=14336,
    seq_length=8192, rope_theta=500000.0,
)  # fmt: skip
LLAMA32_1B = LlamaConfig(
    num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=64, ffn_hidden_size=8192, tied=True,
    rope_theta=500000.0, rope_factor=32.0,
)  # fmt: skip
LLAMA31_405B = LlamaConfig(
    num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, ffn_hidden_size=53248,
    seq_length=8192, rope_theta=500000.0, rope_factor=8.0,
)  # fmt: skip
MISTRAL_7B = LlamaConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden_size=14336,
    vocab_size=32768, rope_theta=1000000.0,
)  # fmt: skip
QWEN3_0_6B = LlamaConfig(
    num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn_hidden_size=3072, tied=True,
    vocab_size=151936, qk_norm=True, norm_eps=1e-6, rope_theta=1000000.0,
)  # fmt: skip


class Embedding(BoundModule):
    """tokens `[B, T]` -> activations `[B, T, H]`."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.drop = Dropout(config.dropout)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.drop(self.tokens(tokens).to(self.dtype), context.dropout_keys)

    def decode_weights(self) -> EmbeddingWeights:
        """Return what `dtgpt.ops.decode` needs to run this embedding."""
        return EmbeddingWeights(self.tokens.weight, None)


class Block(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)))."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm_1 = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.drop_1 = Dropout(config.dropout, index=1)
        self.norm_2 = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.drop_2 = Dropout(config.dropout, index=2)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x, h = self.norm_1(x)
        x, h = self.norm_2(x, self.attn(h, context), self.drop_1.site(keys))
        return add(x, self.mlp(h), self.drop_2.site(keys))

    def decode_weights(self) -> BlockWeights:
        """Return what `dtgpt.ops.decode` needs to run this block."""
        attn, mlp = self.attn, self.mlp
        return BlockWeights(
            norm_1=self.norm_1.weight, norm_1_bias=None, qkv=attn.qkv.weight, qkv_bias=None, proj=attn.proj.weight,
            proj_bias=None, norm_2=self.norm_2.weight, norm_2_bias=None, fc=mlp.gate_up.weight, fc_bias=None,
            out=mlp.down.weight, out_bias=None, eps=self.norm_1.eps, head_dim=attn.head_dim,
            activation=fused_name(mlp.activation, has_bias=False), rotary=attn.decode_rotary(),
        )  # fmt: skip


class HeadNorm(nn.Module):
    """The weight `[D]` of an RMSNorm of each head, which `rotary_qkv` applies."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`. The fused QKV projection is stored by heads of keys and values,
    `[G, R + 2, D]` along its output dimension, so that a cut between these keeps queries with their keys."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, self.parts = config.head_dim, config.num_heads // config.num_kv_heads + 2
        self.rotation, self.num_positions, self.eps = config.rotation, config.seq_length, config.norm_eps
        self.qkv = Linear(config.hidden_size, config.num_kv_heads * self.parts * config.head_dim, bias=False)
        self.q_norm = HeadNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim) if config.qk_norm else None
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore()
        self.proj = DeferredBiasLinear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Branch:
        qkv = rearrange(self.qkv(x), "b t (g parts d) -> b t g parts d", parts=self.parts, d=self.head_dim)
        norms = () if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight, self.eps)
        q, k, v = rotary_qkv(qkv, context.positions, self.rotation, self.num_positions, *norms)
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.document_bounds)
        return Branch(self.proj(heads.flatten(-2)), None)

    def decode_rotary(self) -> Rotary:
        """Return the angles, and the weights of norms of heads, for `decode_weights`."""
        table = angle_table(self.rotation, self.head_dim, self.num_positions, self.qkv.weight.device)
        if self.q_norm is None or self.k_norm is None:
            return Rotary(table)
        return Rotary(table, self.q_norm.weight, self.k_norm.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU, `[B, T, H]` -> `[B, T, F]` -> `[B, T, H]`. Rows of the first matrix: gate 0, up 0, gate 1, up 1, ..."""

    activation = staticmethod(swiglu)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.down = DeferredBiasLinear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Branch:
        return Branch(mlp(x, self.gate_up, self.down, self.activation), None)


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.output = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)

    def decode_weights(self) -> HeadWeights:
        """Return what `dtgpt.ops.decode` needs to run this head."""
        return HeadWeights(self.norm.weight, None, self.output.weight, self.norm.eps)
