"""Whether the weights of a model say how many positions it has. Where they do not, another number may be asked of the
same weights: who opens, converts or continues models of others decides by it."""

from dtgpt.models.config import ModelConfig
from dtgpt.models.roles import Role, patterns_of


def learns_positions(config: ModelConfig) -> bool:
    """Return whether `seq_length` is a dimension of the weights."""
    return bool(patterns_of(Role.POSITIONS, config.roles))
