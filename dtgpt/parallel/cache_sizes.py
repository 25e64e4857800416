"""What a rank keeps of each sequence that is generated: keys and values of its attention cores, and state."""

from typing import NamedTuple

import torch

from dtgpt.config.plan import Plan, ResolvedPlan, divisors
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.ops.sampling.sequences import PARAMETERS
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.stages import block_ranges
from dtgpt.util.console import listed
from dtgpt.util.errors import UserError


class CoreSize(NamedTuple):
    """The sizes of what a rank keeps of an attention core for each sequence."""

    heads: int  # N_kv
    dim: int  # D
    positions: int  # P: those of the model, or of the core's window

    @property
    def elements(self) -> int:
        """The number of elements of keys and values."""
        return 2 * self.heads * self.dim * self.positions


def block_core_sizes(config: ModelConfig, plan: Plan) -> list[list[CoreSize]]:
    """Return the size of each attention core of each block on a rank under `plan`, whose table may leave the heads of
    some whole. Raise UserError where tp does not divide the heads of keys and values."""
    parts, degrees = inventory(config), [plan.tp] * config.num_layers
    if plan.table:
        from dtgpt.parallel.tensor import degrees_of_heads  # half a second to import: DTensor

        degrees = degrees_of_heads(config, plan)
    sizes: dict[tuple[int, int], list[CoreSize]] = {}  # by kind of block and degree
    for key in dict.fromkeys(zip(parts.examples, degrees, strict=True)):
        sizes[key] = core_sizes(config, *key)
    return [sizes[key] for key in zip(parts.examples, degrees, strict=True)]


def core_sizes(config: ModelConfig, block: int, tp: int) -> list[CoreSize]:
    """Return the size of each attention core of a block, on one of `tp` ranks. Raise UserError where tp does not
    divide the heads of keys and values."""
    cores = inventory(config).cores(block)
    for heads in (core.kv_heads for core in cores):
        if heads % tp:
            raise UserError(
                f"the cache has {heads} heads of keys and values, which cannot be split over tp={tp}; use "
                f"tp={listed(divisors(heads))}"
            )
    length = config.seq_length
    return [CoreSize(core.kv_heads // tp, core.head_dim, min(core.window or length, length)) for core in cores]


def slot_bytes(config: ModelConfig, plan: ResolvedPlan, dtype: torch.dtype, rank: int) -> int:
    """Return the bytes of one sequence on a rank: keys and values of its blocks, and state."""
    ranges = block_ranges(config, plan)
    sizes = block_core_sizes(config, plan)
    held = [size for stage in RankCoordinates(plan, rank).stages for block in ranges[stage] for size in sizes[block]]
    state = 8 * (PARAMETERS + 2 + config.seq_length)
    return dtype.itemsize * sum(size.elements for size in held) + state
