"""GLM-4.5 (GLM-4.5 Team 2025): experts chosen by sigmoids with a correction, the router of DeepSeek-V3 (DeepSeek-AI
2024); an MLP that all tokens share, first blocks without experts, rotary positions on half of the columns."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from dtgpt.models.config import LARGEST_SIZE, SIZE
from dtgpt.models.families.qwen3_moe import ROLES, Block
from dtgpt.models.llama import Attention, Biases, Embedding, Head
from dtgpt.models.moe.config import MOST_EXPERTS, ExpertsConfig
from dtgpt.models.roles import Roles
from dtgpt.ops.experts.routing import Routing
from dtgpt.ops.rotary_positions import Rotation
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Is, Other, Rule, Rules

GROUPS = Bounds(1, MOST_EXPERTS)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(ExpertsConfig):
    """The shape of a GLM-4.5. The named size stands below."""

    architecture: ClassVar[str] = "glm4_moe"
    roles: ClassVar[Roles] = ROLES
    rules: ClassVar[Rules] = (
        *ExpertsConfig.rules,
        Rule(
            "model.expert_groups={expert_groups} does not divide model.num_experts={num_experts}; use 1, or a divisor",
            Is("num_experts", "is no multiple of", Other("expert_groups")),
        ),
        Rule(
            "model.open_groups={open_groups} is more than model.expert_groups={expert_groups}; use {expert_groups} or "
            "fewer",
            Is("open_groups", ">", Other("expert_groups")),
        ),
        Rule(
            "model.open_groups={open_groups} have {open_experts} experts, fewer than model.experts_per_token="
            "{experts_per_token}; use more groups",
            Is("open_experts", "<", Other("experts_per_token")),
        ),
        Rule(
            "model.rotated={rotated} of heads of {head_dim} columns is no even number of columns; use 0.5 or 1",
            Is("rotated_columns", "is no multiple of", 2),
        ),
        Rule(
            "model.rotated={rotated} leaves heads of {head_dim} columns none that rotate; use 0.5 or 1",
            Is("rotated_columns", "==", 0),
        ),
    )

    ffn_hidden_size: Annotated[int, "width of the MLP of a block without experts", SIZE]
    expert_size: Annotated[int, "width of an expert", SIZE] = 1408  # type: ignore[assignment]
    shared_size: Annotated[int, "width of the MLP that all tokens share; 0: none", Bounds(0, LARGEST_SIZE)] = 1408  # type: ignore[assignment]
    dense_blocks: Annotated[int, "number of first blocks without experts", Bounds(0, LARGEST_SIZE)] = 1
    expert_groups: Annotated[int, "number of groups of experts, of which some are open to a token", GROUPS] = 1
    open_groups: Annotated[int, "number of groups that are open to a token: those with the best experts", GROUPS] = 1
    normalise_weights: Annotated[bool, "divide the weights of a token's experts by their sum"] = True
    routed_factor: Annotated[float, "factor of the weights of experts", Bounds(above=0, at_most=LARGEST_SIZE)] = 1.0
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 151552
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 1000000.0
    rotated: Annotated[float, "fraction of a head's columns that rotate, the first ones", Bounds(0, at_most=1)] = 0.5
    qk_norm: Annotated[bool, "normalise each head of queries and keys by RMSNorm"] = False
    attention_bias: Annotated[Biases, "biases of attention: of queries, keys and values, or its output's, too"] = "qkv"

    @property
    def routing(self) -> Routing:
        groups = {"groups": self.expert_groups, "open_groups": self.open_groups}
        return Routing(self.experts_per_token, "sigmoid", self.normalise_weights, self.routed_factor, **groups)

    @property
    def corrects_choice(self) -> bool:
        return True

    @property
    def open_experts(self) -> int:
        """The number of experts that are open to a token."""
        return self.num_experts // self.expert_groups * self.open_groups

    @property
    def shared_experts(self) -> int | None:
        """The number of experts that have the size of the shared MLP together; None: it is no multiple of theirs."""
        return None if self.shared_size % self.expert_size else self.shared_size // self.expert_size

    @property
    def rotated_columns(self) -> int:
        """The number of columns of a head that rotate."""
        return int(self.head_dim * self.rotated)

    @property
    def rotation(self) -> Rotation:
        return super().rotation._replace(rotated=self.rotated)

    def has_experts(self, index: int) -> bool:
        return index >= self.dense_blocks

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> Block:
        attention = Attention(self, self.window_of(index), self.attention_bias, self.qk_norm)
        return Block(self, attention, self.has_experts(index))

    def make_head(self) -> Head:
        return Head(self)


GLM_45_AIR = Glm4MoeConfig(
    num_layers=46,
    hidden_size=4096,
    num_heads=96,
    num_kv_heads=8,
    ffn_hidden_size=10944,
    num_experts=128,
    experts_per_token=8,
)
