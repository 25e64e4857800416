"""LLaMA (Touvron et al. 2023; Llama 3: Dubey et al. 2024) and what differs from it in a number, a bias or a norm:
Mistral (Jiang et al. 2023) with its window, Phi-3 (Abdin et al. 2024), Qwen2.5 (Yang et al. 2024) with biases of q, k
and v, and dense Qwen3 (Yang et al. 2025), which normalises the heads of q and k.

One file has all of these, since they differ in numbers, biases and two norms, and a copy for each would be the same
lines; families with other modules are capabilities (`models/families`). The rows of matrices are in an order that
allows a cut: those of queries stand beside their keys and values, and each gate beside its factor, so that a
tensor-parallel rank has one range of rows and all that is computed from it.

Rotary positions, pre-RMSNorm, SwiGLU, grouped queries; dropout, where wanted, at GPT-2's three sites.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, R = N / G, F width of the
MLP, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import SIZE
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
    PreNormBlock,
    Table,
    mlp,
)
from dtgpt.models.roles import Role, Roles
from dtgpt.models.rotary import RotaryConfig
from dtgpt.ops.activations import activation
from dtgpt.ops.rotary_positions import rotary_qkv

Biases = Literal["none", "qkv", "all"]  # of attention
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
class LlamaConfig(RotaryConfig):
    """The shape of a LLaMA, a Mistral, a Phi-3, a Qwen2.5 or a Qwen3. The named sizes stand below."""

    architecture: ClassVar[str] = "llama"
    roles: ClassVar[Roles] = ROLES

    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 128256
    qk_norm: Annotated[bool, "normalise each head of queries and keys by RMSNorm (Qwen3)"] = False
    attention_bias: Annotated[
        Biases,
        "biases of attention: of queries, keys and values (Qwen2.5), or its output's, too",
    ] = "none"

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def window_of(self, index: int) -> int | None:
        """Return the window of block `index`; None: it has none, or one that hides nothing at these positions."""
        window = super().window_of(index)
        return window if window is not None and window < self.seq_length else None

    def make_block(self, index: int) -> "Block":
        return Block(self, self.window_of(index))

    def make_head(self) -> "Head":
        return Head(self)


LLAMA2_7B = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    ffn_hidden_size=11008,
    vocab_size=32000,
)
LLAMA3_8B = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    seq_length=8192,
    rope_theta=500000.0,
)
LLAMA32_1B = LlamaConfig(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=8192,
    tied=True,
    rope_theta=500000.0,
    rope_factor=32.0,
)
LLAMA31_405B = LlamaConfig(
    num_layers=126,
    hidden_size=16384,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=53248,
    seq_length=8192,
    rope_theta=500000.0,
    rope_factor=8.0,
)
MISTRAL_7B = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    vocab_size=32768,
    rope_theta=1000000.0,
)
QWEN3_0_6B = LlamaConfig(
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=3072,
    tied=True,
    vocab_size=151936,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1000000.0,
)


class Embedding(BoundModule):
    """tokens `[B, T]` -> activations `[B, T, H]`."""

    def __init__(self, config: RotaryConfig, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.tokens = Table(config.padded_vocab_size, config.hidden_size)
        self.drop = Dropout(config.dropout)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.drop(self.tokens(tokens).to(self.dtype), context.dropout_keys)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then the same with the MLP."""

    def __init__(self, config: LlamaConfig, window: int | None):
        attention = Attention(config, window, config.attention_bias, config.qk_norm)
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, attention, MLP(config))


class HeadNorm(nn.Module):
    """The weight `[D]` of an RMSNorm of each head, which `rotary_qkv` applies."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`. The fused QKV projection is stored by heads of keys and values,
    `[G, R + 2, D]` along its output dimension, so that a cut between these keeps queries with their keys."""

    def __init__(self, config: RotaryConfig, window: int | None, biases: Biases = "none", qk_norm: bool = False):
        super().__init__()
        self.head_dim, self.parts = config.head_dim, config.num_heads // config.num_kv_heads + 2
        self.rotation, self.num_positions, self.eps = config.rotation, config.seq_length, config.norm_eps
        self.qkv = Linear(config.hidden_size, config.num_kv_heads * self.parts * config.head_dim, bias=biases != "none")
        self.q_norm = HeadNorm(config.head_dim) if qk_norm else None
        self.k_norm = HeadNorm(config.head_dim) if qk_norm else None
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(window=window, heads=(config.num_kv_heads, config.head_dim))
        self.proj = DeferredBiasLinear(config.num_heads * config.head_dim, config.hidden_size, bias=biases == "all")

    def forward(self, x: Tensor, context: Context) -> Branch:
        qkv = rearrange(self.qkv(x), "b t (g parts d) -> b t g parts d", parts=self.parts, d=self.head_dim)
        norms = () if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight, self.eps)
        q, k, v = rotary_qkv(qkv, context.positions, self.rotation, self.num_positions, *norms)
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return Branch(self.proj(heads.flatten(-2)), self.proj.bias)


class MLP(nn.Module):
    """SwiGLU, or another function of the gate, `[B, T, H]` -> `[B, T, F]` -> `[B, T, H]`. Rows of the first matrix:
    gate 0, up 0, gate 1, up 1, ..."""

    def __init__(self, config: RotaryConfig):
        super().__init__()
        self.activation = activation(config.activation, gated=True)
        self.gate_up = Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.down = DeferredBiasLinear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Branch:
        return Branch(mlp(x, self.gate_up, self.down, self.activation), None)


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`."""

    def __init__(self, config: RotaryConfig):
        super().__init__()
        self.norm = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.output = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)
