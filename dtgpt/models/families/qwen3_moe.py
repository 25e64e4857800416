"""Qwen3-MoE (Yang et al. 2025): a Qwen3 whose blocks have experts, or some of them, chosen by a softmax over all and
weighed by that over the chosen ones.

Shapes: B samples, T positions, H hidden size, F width of the MLP of a block without experts, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from dtgpt.models.config import SIZE
from dtgpt.models.layers import PreNormBlock
from dtgpt.models.llama import MLP, Attention, Biases, Embedding, Head
from dtgpt.models.llama import ROLES as LLAMA
from dtgpt.models.moe.config import EXPERT_ROLES, ExpertsConfig
from dtgpt.models.moe.mixture import Mixture
from dtgpt.models.roles import Roles
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.ops.experts.routing import Routing
from dtgpt.util.field_types import Bounds, Pattern

WITH, WITHOUT = "E", "D"  # of `expert_pattern`
ROLES: Roles = {**LLAMA, **EXPERT_ROLES}
ExpertPattern = Annotated[
    str,
    "successive blocks with experts (E) and with one MLP (D), repeated",
    Pattern(f"[{WITH}{WITHOUT}]{{1,{MOST_KINDS}}}", "is not a pattern; use a text of E and D, such as DE"),
]


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """The shape of a Qwen3-MoE. The named size stands below."""

    architecture: ClassVar[str] = "qwen3_moe"
    roles: ClassVar[Roles] = ROLES

    ffn_hidden_size: Annotated[int, "width of the MLP of a block without experts", SIZE]
    expert_size: Annotated[int, "width of an expert", SIZE] = 768  # type: ignore[assignment]
    expert_pattern: ExpertPattern = WITH
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 151936
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-6
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 1000000.0
    normalise_weights: Annotated[bool, "divide the weights of a token's experts by their sum"] = True
    attention_bias: Annotated[Biases, "biases of attention: of queries, keys and values, or its output's, too"] = "none"

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, normalised=self.normalise_weights)

    def has_experts(self, index: int) -> bool:
        return self.expert_pattern[index % len(self.expert_pattern)] == WITH

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        attention = Attention(self, self.window_of(index), self.attention_bias, qk_norm=True)
        return Block(self, attention, self.has_experts(index))

    def make_head(self) -> Head:
        return Head(self)


QWEN3_30B_A3B = Qwen3MoeConfig(
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    ffn_hidden_size=6144,
    num_experts=128,
    experts_per_token=8,
)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then the same with experts or with an MLP."""

    computes_rows_apart: ClassVar[bool] = True  # a row has the same bits beside any others: see `inference.kernels`

    def __init__(self, config: ExpertsConfig, attention: nn.Module, has_experts: bool):
        mlp = Mixture(config) if has_experts else MLP(config)
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, attention, mlp)
