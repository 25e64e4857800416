"""OLMoE (Muennighoff et al. 2024): experts chosen by a softmax over all, whose weights are left as they are, and an
RMSNorm of queries and of keys over all heads together.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from dtgpt.models.config import LARGEST_SIZE, SIZE
from dtgpt.models.families import olmo3
from dtgpt.models.layers import PreNormBlock
from dtgpt.models.llama import Embedding, Head
from dtgpt.models.moe.config import EXPERT_ROLES, ExpertsConfig
from dtgpt.models.moe.mixture import Mixture
from dtgpt.models.roles import Roles
from dtgpt.ops.experts.routing import Routing
from dtgpt.util.field_types import Bounds

ROLES: Roles = {**{p: role for p, role in olmo3.ROLES.items() if ".mlp." not in p}, **EXPERT_ROLES}


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """The shape of an OLMoE. The named size stands below."""

    architecture: ClassVar[str] = "olmoe"
    roles: ClassVar[Roles] = ROLES

    ffn_hidden_size: Annotated[int, "width of an expert", SIZE]
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 50304
    normalise_weights: Annotated[bool, "divide the weights of a token's experts by their sum"] = False
    corrects_choice: Annotated[
        bool, "routers add a correction to scores for the choice alone, which balance.bias_step moves"
    ] = False  # type: ignore[assignment]
    clip_qkv: Annotated[
        float, "queries, keys and values are clamped to this; 0: they are not", Bounds(0, LARGEST_SIZE)
    ] = 0.0

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, normalised=self.normalise_weights)

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        return Block(self, self.window_of(index))

    def make_head(self) -> Head:
        return Head(self)


OLMOE_1B_7B = OlmoeConfig(
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    ffn_hidden_size=1024,
    num_experts=64,
    experts_per_token=8,
)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then the same with the experts."""

    computes_rows_apart: ClassVar[bool] = True  # a row has the same bits beside any others: see `inference.kernels`

    def __init__(self, config: OlmoeConfig, window: int | None):
        attention = Attention(config, window)
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, attention, Mixture(config))


class Attention(olmo3.Attention):
    """OLMo 3's attention, in which queries, keys and values may be clamped."""

    def __init__(self, config: OlmoeConfig, window: int | None):
        super().__init__(config, window, config.rotation)
        self.limit = config.clip_qkv
