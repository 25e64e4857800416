"""A GPT-2 whose MLPs are two each: their first matrices are one stack `[2, 4 H, H]`, their second ones another
`[2, H, 4 H]`, and every token goes through both. It stands in this one file."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtgpt.models import gpt2
from dtgpt.models.binding import PLAIN, Binding, BoundModule
from dtgpt.models.layers import Branch, Context, Dropout, LayerNorm, add
from dtgpt.models.roles import Role, Roles
from dtgpt.ops.local_tensors import local

COUNT = 2


@dataclass(frozen=True, kw_only=True)
class StackConfig(gpt2.GPT2Config):
    architecture: ClassVar[str] = "stack"
    roles: ClassVar[Roles] = {
        **{pattern: role for pattern, role in gpt2.ROLES.items() if ".mlp." not in pattern},
        "blocks.*.mlp.entry": Role.ENTRY,
        "blocks.*.mlp.first": Role.COLUMN_STACK,
        "blocks.*.mlp.second": Role.ROW_STACK,
        "blocks.*.mlp.exit": Role.EXIT,
    }

    def make_block(self, index: int) -> BoundModule:
        return Block(self)


class Stack(nn.Module):
    """`[E, n, in]` -> `[E, n, out]`, by a matrix for each of E."""

    bound: Binding = PLAIN

    def __init__(self, columns: int, rows: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(COUNT, rows, columns))

    def products(self, x: Tensor) -> Tensor:
        weight = local(self.weight).to(x.dtype)
        return self.bound.product(x, weight, None) if self.bound.product else torch.bmm(x, weight.mT)


class First(Stack):
    """x `[B, T, H]` -> `[E, B T, 4 H]`, or on a tp rank its part of these columns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.products(x.flatten(0, 1).expand(COUNT, -1, -1))


class Second(Stack):
    """`[E, B T, 4 H]` -> `[B, T, H]`, the sum over E; on a tp rank its addend."""

    def forward(self, x: Tensor, samples: int) -> Tensor:
        return self.products(x).sum(0).unflatten(0, (samples, -1))


class MLP(nn.Module):
    def __init__(self, config: StackConfig):
        super().__init__()
        self.entry, self.exit = nn.Identity(), nn.Identity()
        self.first = First(config.hidden_size, 4 * config.hidden_size)
        self.second = Second(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        return self.exit(self.second(F.silu(self.first(x)), x.shape[0]))


class Block(BoundModule):
    def __init__(self, config: StackConfig):
        super().__init__()
        self.ln_1, self.ln_2 = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        self.attn = gpt2.Attention(config)
        self.drop_1, self.drop_2 = Dropout(config.dropout, index=1), Dropout(config.dropout, index=2)
        self.mlp = MLP(config)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x, h = self.ln_1(x)
        x, h = self.ln_2(x, self.attn(h, context), self.drop_1.site(keys))
        return add(x, Branch(self.mlp(h), None), self.drop_2.site(keys))
