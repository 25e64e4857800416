"""An architecture that differs from GPT-2 wherever dtgpt could have taken GPT-2 for granted: RMSNorm, rotary positions,
a gated MLP, no biases, an output projection of its own, no dropout; heads that share keys and values in a variant. It
stands in this one file."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import ModelConfig
from dtgpt.models.layers import AttentionCore, Branch, Context, DeferredBiasLinear, Linear, Output, add
from dtgpt.models.roles import Role, Roles

NO_DROPOUT = (None, 0.0)


@dataclass(frozen=True, kw_only=True)
class OtherConfig(ModelConfig):
    architecture: ClassVar[str] = "other"
    tied = False
    group: ClassVar[int] = 1  # heads of q that share one of k and v
    roles: ClassVar[Roles] = {
        "embedding.tokens": Role.VOCABULARY,
        "blocks.*.norm_1": Role.NORM,
        "blocks.*.attention.heads": Role.QKV,
        "blocks.*.attention.out": Role.ROW,
        "blocks.*.norm_2": Role.NORM,
        "blocks.*.gate": Role.COLUMN,
        "blocks.*.up": Role.COLUMN,
        "blocks.*.down": Role.ROW,
        "head.norm": Role.NORM,
        "head.output": Role.OUTPUT,
    }

    def make_embedding(self, dtype: torch.dtype) -> BoundModule:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> BoundModule:
        return Block(self)

    def make_head(self) -> BoundModule:
        return Head(self)


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(OtherConfig):
    architecture: ClassVar[str] = "grouped"
    group: ClassVar[int] = 2


class Embedding(BoundModule):
    def __init__(self, config: OtherConfig, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        return self.tokens(tokens).to(self.dtype)


class Norm(nn.Module):
    def __init__(self, config: OtherConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-5)


class Attention(nn.Module):
    def __init__(self, config: OtherConfig):
        super().__init__()
        self.head_dim, self.group = config.head_dim, config.group
        rows = config.num_heads // config.group * (config.group + 2) * config.head_dim
        self.heads = Linear(config.hidden_size, rows, bias=False)
        self.core = AttentionCore()
        self.out = DeferredBiasLinear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Branch:
        parts = rearrange(self.heads(x), "b t (n parts d) -> b t n parts d", parts=self.group + 2, d=self.head_dim)
        q, k, v = parts[..., : self.group, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        positions = torch.arange(q.shape[1], device=x.device)[None] if context.positions is None else context.positions
        q, k = rotate(q, positions), rotate(k, positions)
        attended = self.core(q, k, v, NO_DROPOUT, context.seen)
        return Branch(self.out(attended.flatten(-2)), None)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return x `[B, T, N, D]` with rotary positions (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(BoundModule):
    def __init__(self, config: OtherConfig):
        super().__init__()
        self.norm_1, self.norm_2 = Norm(config), Norm(config)
        self.attention = Attention(config)
        self.gate = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.up = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.down = DeferredBiasLinear(3 * config.hidden_size, config.hidden_size, bias=False)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        x = add(x, self.attention(self.norm_1(x), context), NO_DROPOUT)
        h = self.norm_2(x)
        return add(x, Branch(self.down(F.silu(self.gate(h)) * self.up(h)), None), NO_DROPOUT)


class Head(BoundModule):
    def __init__(self, config: OtherConfig):
        super().__init__()
        self.norm = Norm(config)
        self.output = Output(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: Tensor | None = None) -> Tensor:
        return self.output(self.norm(x), targets, loss_weights)
