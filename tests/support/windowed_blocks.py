"""A model whose blocks differ in their attention: GPT-2's with a window, with all tokens, with a window and sinks, and
with softly bounded scores of a scale of their own. It stands in this one file."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dtgpt.models import gpt2
from dtgpt.models.binding import BoundModule
from dtgpt.models.layers import AttentionCore
from dtgpt.models.roles import Role, Roles

WINDOW = 5


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(gpt2.GPT2Config):
    architecture: ClassVar[str] = "windowed"
    roles: ClassVar[Roles] = gpt2.ROLES | {"blocks.*.attn.core": Role.SINKS}

    def block_kind(self, index: int) -> int:
        return index % 4

    def rule(self, index: int) -> dict[str, Any]:
        """Return the arguments of the attention core of a block."""
        kinds: list[dict[str, Any]] = [
            {"window": WINDOW},
            {},
            {"window": WINDOW + 2, "sinks": self.num_heads},
            {"softcap": 0.5, "scale": 0.7},
        ]
        return kinds[self.block_kind(index)]

    def make_block(self, index: int) -> BoundModule:
        block = gpt2.Block(self)
        block.attn.core = AttentionCore(**self.rule(index))
        return block

    def initial_weight(self, name: str) -> tuple[float, float]:
        return (0.5, 1.0) if name.endswith("sinks") else super().initial_weight(name)
