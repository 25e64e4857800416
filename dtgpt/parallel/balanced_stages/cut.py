"""The blocks of each stage, by what they cost, and not by their number: the slowest stage sets the pace of all."""

import math
from functools import cache
from itertools import accumulate

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Inventory, inventory
from dtgpt.models.shared.flops import attention_flops

EMBEDDING_COST = 0.05  # of the first block's: a lookup, a sum and a dropout, all bound by memory


@cache
def balanced_cut(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the blocks per stage, at least one each. Cost is in FLOPs of a token at the full length, in
    units of the first block's; the head counts on the last stage, the embedding on the first. Among cuts with the
    same costliest stage, the one with the most even rest."""
    if stages == 1:
        return (config.num_layers,)
    parts = inventory(config)
    costs = [max(1, block_flops(parts, index, config.seq_length)) for index in range(config.num_layers)]
    unit = costs[0]
    up_to = list(accumulate((cost / unit for cost in costs), initial=0.0))
    head = 6 * config.hidden_size * config.padded_vocab_size / unit

    def cost(stage: int, first: int, blocks: int) -> float:
        between = up_to[first + blocks] - up_to[first]
        return between + EMBEDDING_COST * (stage == 0) + head * (stage == stages - 1)

    @cache
    def best(stage: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Return (largest cost, sum of squares, cut) of the stages from `stage` on with `left` blocks."""
        first = config.num_layers - left
        if stage == stages - 1:
            last = cost(stage, first, left)
            return last, last**2, (left,)
        found: tuple[float, float, tuple[int, ...]] = (math.inf, math.inf, ())
        for blocks in range(1, left - (stages - stage - 1) + 1):
            here = cost(stage, first, blocks)
            if here > found[0]:  # as all that have more blocks
                break
            largest, squares, cut = best(stage + 1, left - blocks)
            found = min(found, (max(here, largest), here**2 + squares, (blocks, *cut)))
        return found

    return best(0, config.num_layers)[2]


def block_flops(parts: Inventory, block: int, seq_length: int) -> int:
    """Return the FLOPs of a token in a block, forward and backward: matrices and attention scores."""
    matrices = sum(parts.config.used_elements(p.shape, p.role) for p in parts.of_block(block) if len(p.shape) > 1)
    return 6 * matrices + attention_flops(parts, block, seq_length)
