"""GPT-OSS (Agarwal et al. 2025): experts weighed by the softmax over those that a token chooses, sinks in the softmax
of each head, a window of 128 tokens in each second block, positions scaled by YaRN, biases of all matrices and of the
router, a clamped SwiGLU. With one expert it is a dense model without a router.

Shapes: B samples, T positions, H hidden size, N heads of size D, G heads of keys and values, R = N / G, F width of the
MLP, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from dtgpt.models.config import SIZE
from dtgpt.models.layers import AttentionCore, Branch, DeferredBiasLinear, Linear, PreNormBlock
from dtgpt.models.llama import ROLES as LLAMA
from dtgpt.models.llama import Attention as LlamaAttention
from dtgpt.models.llama import Embedding, Head
from dtgpt.models.moe.config import EXPERT_ROLES, MOST_EXPERTS, ExpertsConfig
from dtgpt.models.moe.mixture import Mixture
from dtgpt.models.roles import Role, Roles
from dtgpt.models.rotary import Window, WindowPattern
from dtgpt.ops.activations import GatedName
from dtgpt.ops.experts.routing import Routing
from dtgpt.ops.more_activations import GATED
from dtgpt.ops.norms import row_sums
from dtgpt.ops.rotary_positions import Scaling
from dtgpt.util.field_types import Bounds

ROLES: Roles = {**LLAMA, "blocks.*.attn.core": Role.SINKS, **EXPERT_ROLES}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ExpertsConfig):
    """The shape of a GPT-OSS. The named sizes stand below."""

    architecture: ClassVar[str] = "gpt_oss"
    roles: ClassVar[Roles] = ROLES

    num_experts: Annotated[
        int, "number of experts in a block; 1: one MLP without a router", Bounds(1, MOST_EXPERTS)
    ] = 1
    experts_per_token: Annotated[int, "number of experts that each token goes through", Bounds(1, MOST_EXPERTS)] = 1
    ffn_hidden_size: Annotated[int, "width of an expert", SIZE]
    head_dim: Annotated[int, "size of a head, an even number", SIZE] = 64  # type: ignore[assignment]
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 201088
    activation: Annotated[GatedName, "function of the gate in the MLP; clamped_swiglu: gpt-oss's SwiGLU"] = (
        "clamped_swiglu"
    )
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 150000.0
    rope_scaling: Annotated[
        Scaling, "rule by which rope_factor divides frequencies: Llama 3.1's, that of all alike, YaRN's"
    ] = "yarn"
    rope_factor: Annotated[
        float, "scaling of rotary positions: low frequencies, or all, are divided by this; 1: none", Bounds(1)
    ] = 32.0
    rope_original_length: Annotated[int, "number of positions that the model had before rope_factor", SIZE] = 4096
    rope_truncate: Annotated[bool, "yarn: round the indices of the frequencies that are blended outwards"] = False
    window: Window = 128
    window_pattern: WindowPattern = "LG"

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, "softmax_of_chosen")

    @property
    def expert_biases(self) -> bool:
        return True

    def has_experts(self, index: int) -> bool:
        return self.num_experts > 1

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> "Block":
        return Block(self, self.window_of(index), self.has_experts(index))

    def make_head(self) -> Head:
        return Head(self)


GPT_OSS_20B = GptOssConfig(
    num_layers=24,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    ffn_hidden_size=2880,
    num_experts=32,
    experts_per_token=4,
)
GPT_OSS_120B = GptOssConfig(
    num_layers=36,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    ffn_hidden_size=2880,
    num_experts=128,
    experts_per_token=4,
)


class Block(PreNormBlock):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then the same with experts or with an MLP."""

    def __init__(self, config: GptOssConfig, window: int | None, has_experts: bool):
        mlp = Mixture(config) if has_experts else MLP(config)
        super().__init__(config.hidden_size, config.norm_eps, config.dropout, Attention(config, window), mlp)


class Attention(LlamaAttention):
    """LLaMA's attention with biases of all matrices, and a sink in the softmax of each head."""

    def __init__(self, config: GptOssConfig, window: int | None):
        super().__init__(config, window, biases="all")
        self.core = AttentionCore(window, config.num_heads, heads=(config.num_kv_heads, config.head_dim))


class MLP(nn.Module):
    """One expert: a clamped SwiGLU, or another function of the gate, `[B, T, H]` -> `[B, T, F]` -> `[B, T, H]`. Rows of
    the first matrix: gate 0, up 0, gate 1, up 1, ..."""

    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.activation = GATED[config.activation]
        self.gate_up = Linear(config.hidden_size, 2 * config.ffn_hidden_size)
        self.down = DeferredBiasLinear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Branch:
        made = row_sums().activated(self.activation, self.down.weight.shape[1], self.gate_up(x))
        return Branch(self.down(made), self.down.bias)
