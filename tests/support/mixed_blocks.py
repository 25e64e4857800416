"""A model whose blocks differ: those of GPT-2, some with a wide MLP alone, some whose heads share keys and values.
Their parameters, dropout sites, matrices in fp8 and caches differ. It stands in this one file."""

from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor

from dtgpt.models import gpt2
from dtgpt.models.binding import BoundModule
from dtgpt.models.layers import (
    AttentionCore,
    Branch,
    Context,
    DeferredBiasLinear,
    Dropout,
    LayerNorm,
    Linear,
    add,
    mlp,
)
from dtgpt.models.roles import Role, Roles
from dtgpt.ops.activations import bias_gelu

KINDS = ("whole", "no attention", "shared heads")


@dataclass(frozen=True, kw_only=True)
class MixedConfig(gpt2.GPT2Config):
    architecture: ClassVar[str] = "mixed"
    roles: ClassVar[Roles] = gpt2.ROLES | {
        "blocks.*.wide.norm": Role.NORM,
        "blocks.*.wide.up": Role.COLUMN,
        "blocks.*.wide.down": Role.ROW,
        "blocks.*.wide.drop": Role.STREAM_DROPOUT,
        "blocks.*.norm": Role.NORM,
        "blocks.*.heads": Role.QKV,
        "blocks.*.out": Role.ROW,
    }

    def block_kind(self, index: int) -> str:
        return KINDS[index % 3]

    def make_block(self, index: int) -> BoundModule:
        makers = {"whole": gpt2.Block, "no attention": WideBlock, "shared heads": SharedBlock}
        return makers[self.block_kind(index)](self)


class Wide(BoundModule):
    """x + dropout(two matrices with six times the width between them)."""

    def __init__(self, config: MixedConfig, site: int):
        super().__init__()
        self.norm = LayerNorm(config.hidden_size)
        self.up = DeferredBiasLinear(config.hidden_size, 6 * config.hidden_size)
        self.down = DeferredBiasLinear(6 * config.hidden_size, config.hidden_size)
        self.drop = Dropout(config.dropout, index=site)

    def compute(self, x: Tensor, keys: Tensor | None) -> Tensor:
        x, h = self.norm(x)
        branch = Branch(mlp(h, self.up, self.down, bias_gelu), self.down.bias)
        return add(x, branch, self.drop.site(keys))


class WideBlock(BoundModule):
    """One dropout site, no attention."""

    def __init__(self, config: MixedConfig):
        super().__init__()
        self.wide = Wide(config, site=0)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        return self.wide(x, context.dropout_keys)


class SharedBlock(BoundModule):
    """All heads of queries share one of keys and values on each half; no dropout in attention."""

    def __init__(self, config: MixedConfig):
        super().__init__()
        self.head_dim, self.queries = config.head_dim, config.num_heads // 2
        self.norm = LayerNorm(config.hidden_size)
        self.heads = Linear(config.hidden_size, 2 * (self.queries + 2) * config.head_dim)
        self.core = AttentionCore()
        self.out = DeferredBiasLinear(config.hidden_size, config.hidden_size)
        self.wide = Wide(config, site=0)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        x, h = self.norm(x)
        parts = rearrange(self.heads(h), "b t (g parts d) -> b t g parts d", parts=self.queries + 2, d=self.head_dim)
        q, k, v = parts[..., : self.queries, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        attended = self.core(q, k, v, (None, 0.0), context.seen)
        x = add(x, Branch(self.out(attended.flatten(-2)), self.out.bias), (None, 0.0))
        return self.wide(x, context.dropout_keys)
