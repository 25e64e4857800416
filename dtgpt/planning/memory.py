"""The memory that a plan needs on each rank, in bytes of PyTorch's allocator, without a GPU."""

from dataclasses import dataclass, replace
from functools import lru_cache

from dtgpt.config.execution import Settings
from dtgpt.optim.fp8.observed_blocks import observes_again
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.cache_sizes import slot_bytes
from dtgpt.parallel.collectives import transport
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads
from dtgpt.parallel.context_parallel.slices import token_bytes
from dtgpt.parallel.recompute.rules import repeats_blocks
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.parallel.shared_memory.edges import most_edges
from dtgpt.parallel.stages import places_of_edge
from dtgpt.planning import split_backward
from dtgpt.planning.activations import residual_bytes, whole_bytes
from dtgpt.planning.fullest_moment import after_passes, whole_passes
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.parameters import Rank
from dtgpt.posttrain.demands import slots_of

MIB = 1 << 20
# cuBLAS's, of the thread that runs forward passes and of autograd's, on Hopper; older GPUs take a quarter.
WORKSPACES = 2 * 32 * MIB
SMALL, LARGE, SEGMENT, STEP = 1 * MIB, 10 * MIB, 20 * MIB, 2 * MIB  # of torch's CUDACachingAllocator


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the fullest moment of a step."""

    weights: int  # fp32 masters
    optimizer: int  # its state
    gradients: int
    gathered: int  # weights that matmuls read: all-gathered by ZeRO, or casts
    activations: int
    edges: int  # places of messages between pipeline stages, and between the ranks of tp and cp
    working: int  # of the operation that runs at that moment, of libraries, and what the allocator cannot use
    cache: int = 0  # keys and values of answers that are drawn between steps

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def memory_of(settings: Settings, rank: int) -> Memory:
    """Return the fullest moment of a training step on `rank`. In fp8 that may be in the first step, which observes."""
    memories = [_fullest_moment(settings, rank)]
    if settings.products == FP8:
        again = observes_again(settings)
        recompute = "full" if again and not repeats_blocks(settings) else settings.recompute
        blocks = None if again else settings.recompute_blocks
        changed = replace(settings, products=None, recompute=recompute, recompute_blocks=blocks)
        memories.append(_fullest_moment(changed, rank))
    return max(memories, key=lambda memory: memory.total)


def _fullest_moment(settings: Settings, rank: int) -> Memory:
    """Return the fullest moment of a step in one precision."""
    here = Rank(settings, rank)
    passes = split_backward.passes(here) if settings.plan.splits_backward else whole_passes(here)
    fullest = max([*passes, *after_passes(here)], key=lambda moment: moment.total)
    beside = WORKSPACES + _padding_bytes(here) if settings.device.type == "cuda" else 0
    return Memory(
        weights=here.weight_bytes,
        optimizer=here.optimizer_bytes,
        gradients=round(fullest.gradients),
        gathered=round(fullest.gathered),
        activations=round(fullest.activations),
        edges=round(_edges(here)),
        working=round(fullest.working + beside),
        cache=_cache(settings, rank),
    )


def _edges(here: Rank) -> float:
    """Return the bytes of messages: of a pipeline the places of each edge where a rank receives, and what it sent,
    until its backward pass; what it received counts as a block's input. Of the ranks of one host, places
    of activations of tp and of tokens of cp."""
    settings, place, plan, found = here.settings, here.place, here.settings.plan, 0.0
    if plan.pp > 1:
        ends = [(place.rank_of(stage + 1), place.rank_of(stage - 1)) for stage in place.stages]
        sends, receives = (sum(rank is not None for rank in ranks) for ranks in zip(*ends, strict=True))
        places = most_edges(place) * places_of_edge(plan, settings.micro_batches)
        found += (places + here.passes * (sends - receives)) * residual_bytes(settings)
    if plan.tp == plan.cp == 1:
        return found
    if transport().reaches(plan.tp, 1):
        found += 2 * whole_bytes(settings)
    if transport().reaches(plan.cp, plan.tp) and ranks_of_heads(plan, settings.model) == plan.cp:
        found += TokenExchange.bytes(token_bytes(settings), settings.local_length, plan.cp)
    return found


def _cache(settings: Settings, rank: int) -> int:
    """Return the bytes of the answers that are drawn at the same time, and of the scratch slot."""
    if not slots_of(settings):
        return 0
    config = replace(settings.model, seq_length=settings.seq_length)
    return (slots_of(settings) + 1) * slot_bytes(config, settings.plan, settings.dtype, rank)


def memory_by_rank(settings: Settings) -> dict[int, Memory]:
    """Return the memory of the first rank of each pipeline rank, which holds as much as any that shares its stages."""
    plan = settings.plan
    return {rank: memory_of(settings, rank) for rank in range(0, plan.world, plan.ranks_of_stage)}


def fullest(memories: dict[int, Memory]) -> Memory:
    return max(memories.values(), key=lambda memory: memory.total)


def _padding_bytes(here: Rank) -> float:
    """Return the bytes by which the allocator's blocks for weights and the optimizer's state are larger than these."""
    settings, optimizer, total = here.settings, here.settings.optimizer, 0.0
    narrow = settings.dtype.itemsize if settings.low_precision else 0
    for p in here.trained:
        states = 0 if optimizer is None else OptimizerCosts(optimizer).state_bytes(p.shape, p.role) / 4
        total += (1 + states) * padding(4 * p.local) + padding(narrow * p.by_tp)
    return total


@lru_cache(maxsize=4096)
def padding(size: int) -> float:
    """Return the bytes by which the block of a tensor of `size` bytes is larger. A segment is a multiple of STEP, or
    SEGMENT for tensors below LARGE, and is not split where SMALL or less would be left."""
    if size <= SMALL:
        return -size % 512
    if size >= LARGE:
        left = -size % STEP
        return left if left <= SMALL else 0
    count, left = divmod(SEGMENT, size)
    return left / count if left <= SMALL else 0
