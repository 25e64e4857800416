"""Qwen2-MoE (Yang et al. 2024): a Qwen2 whose blocks have experts, weighed by a softmax over all, and an MLP that all
tokens share, times a gate."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.models.config import SIZE
from dtgpt.models.families.qwen3_moe import Block, Qwen3MoeConfig
from dtgpt.models.llama import Attention, Biases


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """The shape of a Qwen2-MoE. The named size stands below."""

    architecture: ClassVar[str] = "qwen2_moe"

    expert_size: Annotated[int, "width of an expert", SIZE] = 1408
    shared_size: Annotated[int, "width of the MLP that all tokens share", SIZE] = 5632  # type: ignore[assignment]
    normalise_weights: Annotated[bool, "divide the weights of a token's experts by their sum"] = False
    attention_bias: Annotated[Biases, "biases of attention: of queries, keys and values, or its output's, too"] = "qkv"

    @property
    def gates_shared(self) -> bool:
        return True

    def make_block(self, index: int) -> Block:
        attention = Attention(self, self.window_of(index), self.attention_bias)
        return Block(self, attention, self.has_experts(index))


QWEN15_MOE_A2_7B = Qwen2MoeConfig(
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    ffn_hidden_size=5632,
    num_experts=60,
    experts_per_token=4,
    seq_length=8192,
)
