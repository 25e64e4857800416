"""What a rank holds, and what is alive at a moment of a step."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from dtgpt.config.execution import Settings
from dtgpt.models.inventory import inventory
from dtgpt.models.roles import Role
from dtgpt.parallel.gradients import Sums, choose_sums
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.planning.parameters import LocalParameter, blocks_again


@dataclass(frozen=True)
class Held:
    """What a rank holds, in one precision."""

    settings: Settings
    place: RankCoordinates
    parameters: list[LocalParameter]
    trained: list[LocalParameter]
    blocks: list[int]
    passes: float  # forward passes in flight of each stage, at most
    gathered: int  # bytes of weights that matmuls read

    @cached_property
    def kinds(self) -> Counter[int]:
        """How many blocks there are of each kind, by an index."""
        examples = inventory(self.settings.model).examples
        return Counter(examples[block] for block in self.blocks)

    def blocks_of(self, again: bool) -> Counter[int]:
        """Return how many blocks of each kind have something computed again, or have not."""
        examples, repeated = inventory(self.settings.model).examples, blocks_again(self.settings)
        return Counter(examples[block] for block in self.blocks if (block in repeated) == again)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.sums.bytes_of(self.trained)

    @cached_property
    def sums(self) -> Sums:
        """What sums the gradients."""
        return choose_sums(self.settings)

    @cached_property
    def around(self) -> int:
        """Elements of what lies around the blocks, as the rank computes with it."""
        return sum(p.by_tp for p in self.trained if p.block is None)

    @cached_property
    def table(self) -> LocalParameter | None:
        """The output projection; None on a rank that does not hold or does not train it."""
        roles = (Role.OUTPUT, Role.VOCABULARY)
        if not self.place.holds_last or self.settings.freezes_weights:
            return None
        return next(p for p in reversed(self.trained) if p.role in roles)

    @cached_property
    def head(self) -> int:
        """Bytes of the gradient of the output projection, as the head makes it."""
        return 0 if self.table is None else self.settings.dtype.itemsize * self.table.by_tp


@dataclass(frozen=True)
class Moment:
    """Bytes that are alive at a moment."""

    gradients: float
    gathered: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return self.gradients + self.gathered + self.activations + self.working


def rows_of_logits(settings: Settings) -> int:
    """Return the tokens of a micro-batch on a rank."""
    return settings.rows.number * settings.rows.length


def columns_of_logits(settings: Settings) -> int:
    """Return the most columns of logits on a tp rank."""
    return len(chunk(range(settings.model.padded_vocab_size), settings.plan.tp, 0))
