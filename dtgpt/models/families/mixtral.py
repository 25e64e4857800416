"""Mixtral (Jiang et al. 2024): a Mistral whose MLPs are experts, weighed by the softmax over those that a token
chooses."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from dtgpt.models.config import SIZE
from dtgpt.models.families.qwen3_moe import ROLES, Block
from dtgpt.models.llama import Attention, Embedding, Head
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.roles import Roles
from dtgpt.ops.experts.routing import Routing
from dtgpt.util.field_types import Bounds


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(ExpertsConfig):
    """The shape of a Mixtral. The named sizes stand below."""

    architecture: ClassVar[str] = "mixtral"
    roles: ClassVar[Roles] = ROLES

    ffn_hidden_size: Annotated[int, "width of an expert", SIZE]
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 32000
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 1000000.0

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, normalised=True)

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> Block:
        return Block(self, Attention(self, self.window_of(index)), has_experts=True)

    def make_head(self) -> Head:
        return Head(self)


MIXTRAL_8X7B = MixtralConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    num_experts=8,
    experts_per_token=2,
    seq_length=32768,
)
MIXTRAL_8X22B = MixtralConfig(
    num_layers=56,
    hidden_size=6144,
    num_heads=48,
    num_kv_heads=8,
    ffn_hidden_size=16384,
    num_experts=8,
    experts_per_token=2,
    seq_length=65536,
    vocab_size=32768,
)
