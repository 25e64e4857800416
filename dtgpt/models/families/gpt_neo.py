"""GPT-Neo (Black et al. 2021): GPT-2 whose odd blocks attend to the last 256 tokens alone, without biases of queries,
keys and values, and without a division of the attention scores.

Shapes: B samples, T positions, H hidden size, N heads, D = H / N, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.models.config import SIZE
from dtgpt.models.gpt2 import Attention as GPT2Attention
from dtgpt.models.gpt2 import Block as GPT2Block
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.layers import AttentionCore
from dtgpt.models.rotary import Window, WindowConfig, WindowPattern


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(GPT2Config, WindowConfig):
    """The shape of a GPT-Neo. The named sizes stand below."""

    architecture: ClassVar[str] = "gpt_neo"

    seq_length: Annotated[int, "positions; also tokens of a training sample, unless --seq_length is less", SIZE] = 2048
    window: Window = 256
    window_pattern: WindowPattern = "GL"

    def make_block(self, index: int) -> "Block":
        return Block(self, self.window_of(index))


GPT_NEO_125M = GPTNeoConfig(num_layers=12, hidden_size=768, num_heads=12)
GPT_NEO_1_3B = GPTNeoConfig(num_layers=24, hidden_size=2048, num_heads=16)
GPT_NEO_2_7B = GPTNeoConfig(num_layers=32, hidden_size=2560, num_heads=20)


class Block(GPT2Block):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)))."""

    def __init__(self, config: GPTNeoConfig, window: int | None):
        super().__init__(config, Attention(config, window))


class Attention(GPT2Attention):
    """GPT-2's attention without biases of q, k and v, whose scores are not scaled."""

    def __init__(self, config: GPTNeoConfig, window: int | None):
        super().__init__(config, qkv_bias=False)
        self.core = AttentionCore(window=window, scale=1.0, heads=(config.num_heads, config.head_dim))
