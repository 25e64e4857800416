"""The fixed model of modded-nanogpt's track 3 (https://github.com/KellerJordan/modded-nanogpt,
`records/track_3_optimization/train_gpt_simple.py`), on which optimizers are compared.

RMSNorm with gains, also after the embedding; biases everywhere; heads of queries and keys normalised without weights;
rotary positions on half of the columns; ReLU squared; an output projection of its own, whose logits are bounded softly.
Initial outputs of branches and of the model are zero. Dropout, where wanted, at GPT-2's three sites.

Shapes: B samples, T positions, H hidden size, N heads, D = H / N, V padded vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import LARGEST_SIZE, ModelConfig
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
from dtgpt.models.roles import Role, Roles, role_of
from dtgpt.ops.more_activations import bias_relu2
from dtgpt.ops.rotary_positions import Rotation, rotary_qkv
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Given, Rule, Rules

ROLES: Roles = {
    "embedding.tokens": Role.VOCABULARY,
    "embedding.norm": Role.NORM,
    "embedding.drop": Role.STREAM_DROPOUT,
    "blocks.*.norm_1": Role.NORM,
    "blocks.*.attn.qkv": Role.QKV,
    "blocks.*.attn.dropout": Role.HEAD_DROPOUT,
    "blocks.*.attn.proj": Role.ROW,
    "blocks.*.drop_1": Role.STREAM_DROPOUT,
    "blocks.*.norm_2": Role.NORM,
    "blocks.*.mlp.fc": Role.COLUMN,
    "blocks.*.mlp.proj": Role.ROW,
    "blocks.*.drop_2": Role.STREAM_DROPOUT,
    "head.norm": Role.NORM,
    "head.output": Role.OUTPUT,
}


@dataclass(frozen=True, kw_only=True)
class Track3Config(ModelConfig):
    """The shape of the model; `TRACK3` below is that of the records."""

    architecture: ClassVar[str] = "track3"
    roles: ClassVar[Roles] = ROLES
    tied = False
    rules: ClassVar[Rules] = (
        *ModelConfig.rules,
        Rule(
            "model.hidden_size={hidden_size} and model.num_heads={num_heads} make heads of {head_dim}, of which half "
            "of the columns rotate in pairs; use heads of a multiple of 4 from 8 on",
            Given("rotates_no_half"),
        ),
    )

    init_std: Annotated[
        float,
        "standard deviation of a block's initial input matrices, times sqrt(hidden_size); embedding: 1, outputs: 0",
        Bounds(0, LARGEST_SIZE),
    ] = math.sqrt(0.33)
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 2.0**-23
    rope_theta: Annotated[float, "base: the lowest of the frequencies above 0 is 1 / rope_theta", Bounds(1)] = 1024.0
    attention_scale: Annotated[float, "factor of the attention scores", Bounds(above=0)] = 0.12
    logit_cap: Annotated[float, "logits z become C z / sqrt(z^2 + C^2), C being this; 0: they stay", Bounds(0)] = 15.0

    @property
    def rotates_no_half(self) -> bool:
        """Whether heads are not of a multiple of 4 from 8 on."""
        return self.head_dim % 4 > 0 or self.head_dim < 8

    @property
    def rotation(self) -> Rotation:
        """What the angles of rotary positions follow from. The exponents of `rope_theta` are 0, 1 / (n - 1), ..., 1 for
        n rotating pairs, those of a `Rotation` 0, 1 / n, ..., (n - 1) / n."""
        pairs = self.head_dim // 4
        return Rotation(theta=self.rope_theta ** (pairs / (pairs - 1)), rotated=0.5)

    def initial_weight(self, name: str) -> tuple[float, float]:
        """Return (mean, standard deviation): unit norms, zero biases and outputs, N(0, 1) for the embedding, and
        N(0, init_std / sqrt(H)) for queries, keys, values and the first matrix of the MLP."""
        module, _, kind = name.rpartition(".")
        role = role_of(module, self.roles)
        if role is Role.NORM:
            return 1.0, 0.0
        if kind == "bias" or role in (Role.ROW, Role.OUTPUT):
            return 0.0, 0.0
        return 0.0, 1.0 if role is Role.VOCABULARY else self.init_std / math.sqrt(self.hidden_size)

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        return Block(self)

    def make_head(self) -> "Head":
        return Head(self)


TRACK3 = Track3Config(num_layers=12, hidden_size=768, num_heads=6, vocab_size=50304)


class Embedding(BoundModule):
    """tokens `[B, T]` -> activations `[B, T, H]`."""

    def __init__(self, config: Track3Config, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.tokens = Table(config.padded_vocab_size, config.hidden_size)
        self.norm = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.drop = Dropout(config.dropout)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.drop(self.norm(self.tokens(tokens).to(self.dtype)), context.dropout_keys)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then the same with the MLP."""

    def __init__(self, config: Track3Config):
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, Attention(config), MLP(config))


@cache  # without bound: CUDA graphs read the memory of what they were captured with
def constant(value: float, size: int, device: torch.device) -> Tensor:
    """Return fp32 `[size]` of one value, made once for each device."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((size,), value, device=device)


class Attention(nn.Module):
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`. The fused QKV projection is stored per head, `[N, 3, D]` along
    its output dimension, so that a cut between heads keeps each head's q, k and v together."""

    def __init__(self, config: Track3Config):
        super().__init__()
        self.head_dim, self.rotation, self.num_positions = config.head_dim, config.rotation, config.seq_length
        self.eps, self.scale = config.norm_eps, config.attention_scale * math.sqrt(config.head_dim)
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(heads=(config.num_heads, config.head_dim))
        self.proj = DeferredBiasLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Branch:
        qkv = rearrange(self.qkv(x), "b t (n three d) -> b t n three d", three=3, d=self.head_dim)
        # Weights of the norms that are no parameters; that of q brings the scores, / sqrt(D) in the core, to scale.
        q_weight, k_weight = (constant(value, self.head_dim, x.device) for value in (self.scale, 1.0))
        q, k, v = rotary_qkv(qkv, context.positions, self.rotation, self.num_positions, q_weight, k_weight, self.eps)
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return Branch(self.proj(heads.flatten(-2)), self.proj.bias)


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them, `[B, T, H]` -> `[B, T, 4 H]` -> `[B, T, H]`."""

    def __init__(self, config: Track3Config):
        super().__init__()
        self.fc = DeferredBiasLinear(config.hidden_size, 4 * config.hidden_size)
        self.proj = DeferredBiasLinear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Branch:
        return Branch(mlp(x, self.fc, self.proj, bias_relu2), self.proj.bias)


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`."""

    def __init__(self, config: Track3Config):
        super().__init__()
        self.norm = FinalRMSNorm(config.hidden_size, eps=config.norm_eps)
        sizes = config.hidden_size, config.padded_vocab_size, config.vocab_size
        self.output = Output(*sizes, bias=True, cap=config.logit_cap)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)
