"""FLOPs of a model, counted from its modules (Chowdhery et al. 2022, PaLM, appendix B)."""

import math

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Core, Inventory, inventory
from dtgpt.models.roles import Role


def flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Return the FLOPs of a token in a sample of `seq_length`, forward and backward: 6 N + 12 L H T, where N leaves out
    weights that are looked up and not multiplied."""
    parts = inventory(config)
    looked_up = [Role.POSITIONS] if config.tied else [Role.POSITIONS, Role.VOCABULARY]
    weights = used_parameters(config) - sum(math.prod(p.shape) for p in parts.of_embedding() if p.role in looked_up)
    return 6 * weights + sum(count * attention_flops(parts, i, seq_length) for i, count in parts.counts.items())


def used_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that each token meets."""
    return inventory(config).counted(lambda parameter: config.used_elements(parameter.shape, parameter.role))


def attention_flops(parts: Inventory, block: int, seq_length: int) -> int:
    """Return the FLOPs of a token in the attention cores of a block, forward and backward: 12 N D T for each, where a
    window leaves fewer tokens than T."""
    heads = parts.config.num_heads
    return sum(12 * heads * core.head_dim * tokens_seen(core, seq_length) for core in parts.cores(block))


def tokens_seen(core: Core, length: int) -> int:
    """Return the number of tokens by which the FLOPs of attention are counted in a sample of `length` tokens. Without a
    window all of them, twice the mean that causality leaves. With a window W twice the mean, too: 2 W - W^2 / length.
    """
    if core.window is None or core.window >= length:
        return length
    return core.window * (2 * length - core.window) // length
