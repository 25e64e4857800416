"""How many sequences a rank has memory for."""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from dtgpt.config.execution import MOST_SLOTS
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.parallel.cache_sizes import slot_bytes
from dtgpt.util.errors import UserError

SHARE = 0.9  # of free memory: the rest is for activations and for the allocator's own use


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


def free_memory(device: torch.device, local_world: int) -> int:
    """Return the bytes that a rank may still allocate: of its CUDA device, or its part of the machine's free memory,
    which the `local_world` processes of a node share."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return _free_main_memory() // local_world


def _free_main_memory() -> int:
    """Return the bytes that a machine can give to a program, with what it keeps of files."""
    with suppress(OSError):  # of Linux
        found = re.search(r"^MemAvailable: *([0-9]+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
