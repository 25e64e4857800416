"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

This file is to be read beside the paper, and copied for a model of one's own: it names no plan and no kernel. It
differs from the textbook in two places. Queries, keys and values lie by heads, `[N, 3, D]`, and not one after the
other, so that a cut between heads is one range of rows. And each residual sum is made by the norm behind it, since an
activation is then read and written once between two matrices. `ROLES` is what parallel code reads in place of the names
of modules.

Learned positions, pre-LayerNorm, tanh-GELU, biases, tied embeddings, dropout at GPT-2's three sites (embeddings,
attention probabilities, the end of each residual branch). GPT-3 (Brown et al. 2020) with dense attention has the same
modules.

Shapes: B samples, T positions, H hidden size, N heads, D = H / N, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import ModelConfig
from dtgpt.models.layers import (
    AttentionCore,
    Branch,
    Context,
    DeferredBiasLinear,
    Dropout,
    FinalNorm,
    LayerNorm,
    Linear,
    LossWeights,
    Output,
    Table,
    add,
    mlp,
)
from dtgpt.models.roles import Role, Roles
from dtgpt.ops.activations import PlainName, activation
from dtgpt.ops.attention.core import split_qkv
from dtgpt.util.field_types import Bounds

TABLE = "embedding.wte.weight"  # the token embedding, tied to the output projection

ROLES: Roles = {
    "embedding.wte": Role.VOCABULARY,
    "embedding.wpe": Role.POSITIONS,
    "embedding.drop": Role.STREAM_DROPOUT,
    "blocks.*.ln_1": Role.NORM,
    "blocks.*.attn.qkv": Role.QKV,
    "blocks.*.attn.dropout": Role.HEAD_DROPOUT,
    "blocks.*.attn.proj": Role.ROW,
    "blocks.*.drop_1": Role.STREAM_DROPOUT,
    "blocks.*.ln_2": Role.NORM,
    "blocks.*.mlp.fc": Role.COLUMN,
    "blocks.*.mlp.proj": Role.ROW,
    "blocks.*.drop_2": Role.STREAM_DROPOUT,
    "head.ln_f": Role.NORM,
    "head.lm_head": Role.OUTPUT,
}


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """The shape of a GPT-2. The named sizes are `GPT2_124M` ... `GPT3_175B` below."""

    architecture: ClassVar[str] = "gpt2"
    roles: ClassVar[Roles] = ROLES
    tied = True

    layer_norm_eps: Annotated[float, "added to the variance in LayerNorm", Bounds(above=0, below=1)] = 1e-5
    activation: Annotated[PlainName, "function between the two matrices of the MLP"] = "gelu_tanh"

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def make_block(self, index: int) -> BoundModule:
        return Block(self)

    def make_head(self) -> "Head":
        return Head(self)


GPT2_124M = GPT2Config(num_layers=12, hidden_size=768, num_heads=12)
GPT2_345M = GPT2Config(num_layers=24, hidden_size=1024, num_heads=16)
GPT2_774M = GPT2Config(num_layers=36, hidden_size=1280, num_heads=20)
GPT2_1558M = GPT2Config(num_layers=48, hidden_size=1600, num_heads=25)
GPT3_175B = GPT2Config(num_layers=96, hidden_size=12288, num_heads=96, seq_length=2048)


class Embedding(BoundModule):
    """tokens `[B, T]` -> activations `[B, T, H]`: token plus learned position, which are 0, 1, ... by default."""

    def __init__(self, config: GPT2Config, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.wte = Table(config.padded_vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.seq_length, config.hidden_size)
        self.drop = Dropout(config.dropout)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        positions = context.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.drop((self.wte(tokens) + self.wpe(positions)).to(self.dtype), context.dropout_keys)


class Block(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x))).

    Each sum is fused with the norm behind it and with the bias and the dropout of its branch, so that an activation is
    read and written once between two matrices.
    """

    def __init__(self, config: GPT2Config, attention: "Attention | None" = None):
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config) if attention is None else attention
        self.drop_1 = Dropout(config.dropout, index=1)
        self.ln_2 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.drop_2 = Dropout(config.dropout, index=2)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x, h = self.ln_1(x)
        x, h = self.ln_2(x, self.attn(h, context), self.drop_1.site(keys))
        return add(x, self.mlp(h), self.drop_2.site(keys))


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`. The fused QKV projection is stored per head, `[N, 3, D]` along
    its output dimension, so that a cut between heads keeps each head's q, k and v together."""

    def __init__(self, config: GPT2Config, qkv_bias: bool = True):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=qkv_bias)
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(heads=(config.num_heads, config.head_dim))
        self.proj = DeferredBiasLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Branch:
        q, k, v = split_qkv(rearrange(self.qkv(x), "b t (n three d) -> b t n three d", three=3, d=self.head_dim))
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return Branch(self.proj(heads.flatten(-2)), self.proj.bias)


class MLP(nn.Module):
    """Two matrices with a tanh-GELU, or another function, between them, `[B, T, H]` -> `[B, T, 4 H]` -> `[B, T, H]`."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.activation = activation(config.activation, gated=False)
        self.fc = DeferredBiasLinear(config.hidden_size, 4 * config.hidden_size)
        self.proj = DeferredBiasLinear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Branch:
        return Branch(mlp(x, self.fc, self.proj, self.activation), self.proj.bias)


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.ln_f = FinalNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.lm_head(self.ln_f(x), targets, loss_weights)
