"""GPT-Neo (Black et al. 2021): GPT-2 whose odd blocks attend to the last 256 tokens alone, without biases of queries,
keys and values, and without a division of the attention scores.

Shapes: B samples, T positions, H hidden size, N heads, D = H / N, V padded vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import SIZE
from dtgpt.models.gpt2 import MLP, GPT2Config
from dtgpt.models.layers import (
    AttentionCore,
    Branch,
    Context,
    DeferredBiasLinear,
    Dropout,
    LayerNorm,
    Linear,
    add,
)
from dtgpt.models.rotary import Window, WindowConfig, WindowPattern
from dtgpt.ops.attention.core import split_qkv


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(GPT2Config, WindowConfig):
    """The shape of a GPT-Neo. The named sizes stand below."""

    architecture: ClassVar[str] = "gpt_neo"

    seq_length: Annotated[int, "number of positions, and tokens of a training sample unless it has fewer", SIZE] = 2048
    window: Window = 256
    window_pattern: WindowPattern = "GL"

    def make_block(self, index: int) -> BoundModule:
        return Block(self, self.window_of(index))


GPT_NEO_125M = GPTNeoConfig(num_layers=12, hidden_size=768, num_heads=12)
GPT_NEO_1_3B = GPTNeoConfig(num_layers=24, hidden_size=2048, num_heads=16)
GPT_NEO_2_7B = GPTNeoConfig(num_layers=32, hidden_size=2560, num_heads=20)


class Block(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)))."""

    def __init__(self, config: GPTNeoConfig, window: int | None):
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config, window)
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
    """Causal self-attention `[B, T, H]` -> `[B, T, H]`; QKV as in GPT-2."""

    def __init__(self, config: GPTNeoConfig, window: int | None):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.dropout = Dropout(config.dropout, index=0)
        self.core = AttentionCore(window=window, scale=1.0)
        self.proj = DeferredBiasLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Branch:
        q, k, v = split_qkv(rearrange(self.qkv(x), "b t (n three d) -> b t n three d", three=3, d=self.head_dim))
        heads = self.core(q, k, v, self.dropout.site(context.dropout_keys), context.seen)
        return Branch(self.proj(heads.flatten(-2)), self.proj.bias)
