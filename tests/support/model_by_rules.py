"""A model whose logits are given by rules: after a token at a position, those of the first rule that names both.

It runs as the stages of any model, also under a pipeline: the embedding hands on token and position, the blocks change
nothing, and the head looks up the rules.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import Context
from dtgpt.models.roles import Role, Roles

PADDING = 99.0  # logits behind the vocabulary, which nothing may read


class Rule(NamedTuple):
    """Logits by id, and the position and the input token that they follow; None: each of them."""

    logits: tuple[tuple[int, float], ...]
    position: int | None = None
    token: int | None = None

    @classmethod
    def from_json(cls, rule: dict[str, Any]) -> "Rule":
        logits = tuple((int(token), float(logit)) for token, logit in rule["logits"].items())
        return cls(logits, rule.get("position"), rule.get("token"))


@dataclass(frozen=True, kw_only=True)
class RulesConfig(ModelConfig):
    """A model by rules, of which the first that matches counts. Every other logit is 0."""

    architecture: ClassVar[str] = "rules"
    tied: ClassVar[bool] = False
    roles: ClassVar[Roles] = {"embedding": Role.VOCABULARY, "head": Role.OUTPUT}

    num_layers: int = 2
    hidden_size: int = 2
    num_heads: int = 1
    rules: tuple[Rule, ...] = ()

    def make_embedding(self, dtype: torch.dtype) -> BoundModule:
        return Inputs()

    def make_block(self, index: int) -> BoundModule:
        return Nothing()

    def make_head(self) -> BoundModule:
        return Rules(self)


class Inputs(BoundModule):
    """tokens `[B, T]` -> fp32 `[B, T, 2]`: token and position."""

    def compute(self, tokens: Tensor, context: Context) -> Tensor:
        positions = context.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return torch.stack([tokens, positions], dim=-1).float()


class Nothing(BoundModule):
    def compute(self, x: Tensor, context: Context) -> Tensor:
        return x


class Rules(BoundModule):
    """fp32 `[B, T, 2]` -> logits `[B, T, V]`."""

    def __init__(self, config: RulesConfig):
        super().__init__()
        self.config = config

    def compute(self, x: Tensor, targets: Tensor | None = None, loss_weights: Tensor | None = None) -> Tensor:
        token, position = x.long().unbind(-1)
        logits = torch.zeros(*token.shape, self.config.padded_vocab_size)
        logits[..., self.config.vocab_size :] = PADDING
        free = torch.ones_like(token, dtype=torch.bool)
        for rule in self.config.rules:
            matches = free.clone()
            if rule.position is not None:
                matches &= position == rule.position
            if rule.token is not None:
                matches &= token == rule.token
            for i, logit in rule.logits:
                logits[..., i] = torch.where(matches, logit, logits[..., i])
            free &= ~matches
        return logits


def model_by_rules(rules: list[dict[str, Any]], **shape: int) -> Decoder:
    """The model of a fixture's rules: 50257 tokens and 1024 positions, unless `shape` says otherwise."""
    return Decoder(RulesConfig(rules=tuple(map(Rule.from_json, rules)), **shape))
