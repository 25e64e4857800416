"""A family with all that mixtures of experts can have: a sigmoid router with groups and a correction, biases, an MLP
that all tokens share behind a gate, and a first block without experts. It stands in this one file."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtgpt.models.layers import PreNormBlock
from dtgpt.models.llama import MLP, ROLES, Attention, Embedding, Head
from dtgpt.models.moe.config import EXPERT_ROLES, ExpertsConfig
from dtgpt.models.moe.mixture import Mixture
from dtgpt.models.roles import Roles
from dtgpt.ops.experts.routing import Routing


@dataclass(frozen=True, kw_only=True)
class ManyConfig(ExpertsConfig):
    architecture: ClassVar[str] = "many"
    roles: ClassVar[Roles] = {**ROLES, **EXPERT_ROLES}
    shared_size, gates_shared, expert_biases, corrects_choice = 12, True, True, True

    @property
    def routing(self) -> Routing:
        return Routing(self.experts_per_token, "sigmoid", normalised=True, factor=1.5, groups=2, open_groups=1)

    @property
    def expert_size(self) -> int:
        return self.ffn_hidden_size // 2

    def has_experts(self, index: int) -> bool:
        return index > 0

    def initial_weight(self, name: str) -> tuple[float, float]:
        """Return biases of experts that are not zero: it shows how often they are added."""
        is_bias = ".experts." in name and name.endswith(".bias")
        return (0.0, self.init_std) if is_bias else super().initial_weight(name)

    def make_embedding(self, dtype: torch.dtype) -> Embedding:
        return Embedding(self, dtype)

    def make_block(self, index: int) -> PreNormBlock:
        mlp = Mixture(self) if self.has_experts(index) else MLP(self)
        attention = Attention(self, self.window_of(index))
        return PreNormBlock(self.hidden_size, self.norm_eps, self.dropout, attention, mlp)

    def make_head(self) -> Head:
        return Head(self)
