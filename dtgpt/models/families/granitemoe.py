"""Granite-MoE (Granite Team, IBM 2024): experts weighed by the softmax over those that a token chooses; factors of
embeddings, of what branches add, of scores of attention and of logits.

Shapes: B samples, T positions, H hidden size, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import LARGEST_SIZE, SIZE
from dtgpt.models.families.qwen3_moe import ROLES
from dtgpt.models.layers import (
    AttentionCore,
    Branch,
    Context,
    FinalRMSNorm,
    LossWeights,
    Output,
    PreNormBlock,
)
from dtgpt.models.llama import Attention as LlamaAttention
from dtgpt.models.llama import Embedding as LlamaEmbedding
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.moe.mixture import Mixture
from dtgpt.models.roles import Roles
from dtgpt.ops.experts.routing import Routing
from dtgpt.ops.norms import norm
from dtgpt.util.field_types import Bounds

FACTOR = Bounds(above=0, at_most=LARGEST_SIZE)


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(ExpertsConfig):
    """The shape of a Granite-MoE. The named sizes stand below."""

    architecture: ClassVar[str] = "granitemoe"
    roles: ClassVar[Roles] = ROLES

    ffn_hidden_size: Annotated[int, "width of an expert", SIZE]
    head_dim: Annotated[int, "size of a head, an even number", SIZE] = 64  # type: ignore[assignment]
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 49155
    tied: Annotated[bool, "use the token embedding as output projection"] = True  # type: ignore[assignment]
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-6
    attention_bias: Annotated[bool, "biases of attention: of queries, keys, values and the output"] = False
    embedding_factor: Annotated[float, "factor of embeddings", FACTOR] = 12.0
    residual_factor: Annotated[float, "factor of what each branch adds", FACTOR] = 0.22
    attention_scale: Annotated[float, "factor of the attention scores", FACTOR] = 0.015625
    logit_divisor: Annotated[float, "logits are divided by this", FACTOR] = 6.0

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, "softmax_of_chosen")

    def make_embedding(self, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        return Block(self, self.window_of(index))

    def make_head(self) -> "Head":
        return Head(self)


GRANITE_1B_A400M = GraniteMoeConfig(
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    ffn_hidden_size=512,
    num_experts=32,
    experts_per_token=8,
)
GRANITE_3B_A800M = GraniteMoeConfig(
    num_layers=32,
    hidden_size=1536,
    num_heads=24,
    num_kv_heads=8,
    ffn_hidden_size=512,
    num_experts=40,
    experts_per_token=8,
)


class Embedding(LlamaEmbedding):
    """tokens `[B, T]` -> activations `[B, T, H]`, times a factor."""

    def __init__(self, config: GraniteMoeConfig, dtype: torch.dtype):
        super().__init__(config, dtype)
        self.factor = config.embedding_factor

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.drop(self.tokens(tokens).to(self.dtype) * self.factor, context.dropout_keys)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(f attention(norm(x))), then the same with the experts."""

    computes_rows_apart: ClassVar[bool] = True  # a row has the same bits beside any others: see `inference.kernels`

    def __init__(self, config: GraniteMoeConfig, window: int | None):
        attention = Attention(config, window)
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, attention, Experts(config))


def scaled(branch: Branch, factor: float) -> Branch:
    """Return a branch that adds `factor` times as much."""
    return Branch(branch.product * factor, None if branch.bias is None else branch.bias * factor)


class Attention(LlamaAttention):
    """LLaMA's attention with another scale, times a factor."""

    def __init__(self, config: GraniteMoeConfig, window: int | None):
        super().__init__(config, window, biases="all" if config.attention_bias else "none")
        heads = config.num_kv_heads, config.head_dim
        self.core = AttentionCore(window=window, scale=config.attention_scale, heads=heads)
        self.factor = config.residual_factor

    def forward(self, x: Tensor, context: Context) -> Branch:
        return scaled(super().forward(x, context), self.factor)


class Experts(Mixture):
    """Experts, times a factor."""

    def __init__(self, config: GraniteMoeConfig):
        super().__init__(config)
        self.factor = config.residual_factor

    def forward(self, x: Tensor) -> Branch:
        return scaled(super().forward(x), self.factor)


class DividedRMSNorm(FinalRMSNorm):
    """A `FinalRMSNorm` whose result is divided by a number, rounded once."""

    def __init__(self, width: int, eps: float, divisor: float):
        super().__init__(width, eps=eps)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return norm(x, weight / self.divisor, None, self.eps)


class Head(BoundModule):
    """[B, T, H] -> logits `[B, T, V]`, or the mean loss of targets `[B, T]`. The norm divides the logits."""

    def __init__(self, config: GraniteMoeConfig):
        super().__init__()
        self.norm = DividedRMSNorm(config.hidden_size, config.norm_eps, config.logit_divisor)
        self.output = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)
