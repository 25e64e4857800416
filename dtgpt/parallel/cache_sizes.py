"""What a rank keeps of each sequence that is generated, and for how many of them it has memory.

Keys and values of its attention cores, and state. All follows from the model's shapes and the plan, so that `dtgpt
plan` has it without a GPU, and a model knows its slots before it allocates any.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dtgpt.config.execution import MOST_SLOTS
from dtgpt.config.plan import Plan, ResolvedPlan, divisors
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.ops.sampling.sequences import PARAMETERS
from dtgpt.parallel.layout import degrees_of_heads
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.stages import block_ranges
from dtgpt.util.console import listed
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process

SHARE = 0.9  # of free memory: the rest is for activations and for the allocator's own use


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
    kinds = list(zip(inventory(config).examples, degrees_of_heads(config, plan), strict=True))
    sizes = {kind: core_sizes(config, *kind) for kind in dict.fromkeys(kinds)}
    return [sizes[kind] for kind in kinds]


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


def bytes_per_slot(config: ModelConfig, plan: ResolvedPlan, dtype: torch.dtype) -> int:
    """Return the bytes of one sequence on the rank that holds most of it."""
    return max(slot_bytes(config, plan, dtype, rank) for rank in range(0, plan.world, plan.ranks_of_stage))


def slots_that_fit(free: int, config: ModelConfig, plan: ResolvedPlan, dtype: torch.dtype) -> int:
    """Return the number of slots for which `free` bytes of a rank suffice, beside the scratch slot: `MOST_SLOTS` at
    most. Raise UserError where not even one fits."""
    one = bytes_per_slot(config, plan, dtype)
    slots = min(MOST_SLOTS, int(SHARE * free) // one - 1)
    if slots < 1:
        raise UserError(
            f"a sequence of {config.seq_length} positions takes {2 * one / 2**20:,.0f} MiB with the scratch slot, but "
            f"{free / 2**20:,.0f} MiB are free; use a plan that cuts the model over more processes, bf16, or a "
            "smaller max_length"
        )
    return slots


def slots_on_every_rank(mesh: Mesh, config: ModelConfig, plan: ResolvedPlan, dtype: torch.dtype) -> int:
    """Return the number of slots under `plan` for which all ranks of the mesh have memory now. Raise UserError on each
    of them where one has none for a single slot."""
    return min(mesh.turns(lambda: slots_that_fit(free_memory(mesh.device), config, plan, dtype), lambda rank: True))


def free_memory(device: torch.device) -> int:
    """Return the bytes that a rank may still allocate: of its CUDA device, or its part of the machine's free memory,
    which the processes of a node share."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return _free_main_memory() // Process.from_environment().local_world


def _free_main_memory() -> int:
    """Return the bytes that a machine can give to a program, with what it keeps of files."""
    with suppress(OSError):  # of Linux
        found = re.search(r"^MemAvailable: *([0-9]+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
