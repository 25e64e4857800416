"""The memory that a plan needs on each rank, in bytes of PyTorch's allocator, without a GPU."""

from dataclasses import dataclass, replace

from dtgpt.config.execution import Settings
from dtgpt.config.fp8 import FP8
from dtgpt.config.plan import Plan
from dtgpt.parallel.cache_sizes import slot_bytes
from dtgpt.parallel.collectives import transport
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads
from dtgpt.parallel.context_parallel.slices import token_bytes
from dtgpt.parallel.gradients import choose_sums, is_pushed
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.parallel.shared_memory.edges import most_edges
from dtgpt.parallel.shared_memory.gather import PLACES
from dtgpt.parallel.shared_memory.scatter import CopyScatter
from dtgpt.parallel.stages import places_of_edge
from dtgpt.planning.activations import residual_bytes, whole_bytes
from dtgpt.planning.allocator import WORKSPACES
from dtgpt.planning.held import Held
from dtgpt.planning.moments import moments
from dtgpt.planning.parameters import (
    LocalParameter,
    blocks_of_rank,
    by_block,
    frozen_bytes,
    optimizer_bytes,
    padding_bytes,
    parameters_of,
    trained_on,
)


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
        again = settings.observes_again
        recompute = "full" if again and not settings.repeats_blocks else settings.recompute
        blocks = None if again else settings.recompute_blocks
        changed = replace(settings, products=None, recompute=recompute, recompute_blocks=blocks)
        memories.append(_fullest_moment(changed, rank))
    return max(memories, key=lambda memory: memory.total)


def _fullest_moment(settings: Settings, rank: int) -> Memory:
    """Return the fullest moment of a step in one precision."""
    plan, config = settings.plan, settings.model
    place, held = RankCoordinates(plan, rank), parameters_of(config, plan, rank)
    blocks, trained = blocks_of_rank(config, plan, rank), trained_on(settings, rank)
    passes = stages_in_flight(plan, settings.micro_batches, place.pp) / len(place.stages)
    computed = [*held, *trained] if settings.freezes_weights and plan.zero else trained
    gathered = 0 if plan.splits_backward else _gathered(computed, settings)  # 0: casts belong to each pass
    fullest = max(
        moments(Held(settings, place, held, trained, blocks, passes, gathered)), key=lambda moment: moment.total
    )
    on_gpu = settings.device.type == "cuda"
    beside = WORKSPACES + padding_bytes(trained, settings) if on_gpu else 0
    return Memory(
        weights=4 * sum(p.local for p in trained) + frozen_bytes(settings, rank),
        optimizer=optimizer_bytes(trained, settings),
        gradients=round(fullest.gradients),
        gathered=round(fullest.gathered),
        activations=round(fullest.activations),
        edges=round(_edges(settings, place, passes)),
        working=round(fullest.working + beside),
        cache=_cache(settings, rank),
    )


def _edges(settings: Settings, place: RankCoordinates, passes: float) -> float:
    """Return the bytes of messages: of a pipeline the places of each edge where a rank receives, and what it sent,
    until its backward pass; what it received counts as a block's input. Of the ranks of one host, places
    of activations of tp and of tokens of cp. passes: in flight of a stage."""
    plan, found = settings.plan, 0.0
    if plan.pp > 1:
        ends = [(place.rank_of(stage + 1), place.rank_of(stage - 1)) for stage in place.stages]
        sends, receives = (sum(rank is not None for rank in ranks) for ranks in zip(*ends, strict=True))
        places = most_edges(place) * places_of_edge(plan, settings.micro_batches)
        found += (places + passes * (sends - receives)) * residual_bytes(settings)
    if transport().reaches(plan.tp, 1):
        found += 2 * whole_bytes(settings)
    if transport().reaches(plan.cp, plan.tp) and ranks_of_heads(plan, settings.model) == plan.cp:
        found += TokenExchange.bytes(token_bytes(settings), settings.local_length, plan.cp)
    return found


def _cache(settings: Settings, rank: int) -> int:
    """Return the bytes of the answers that are drawn at the same time, and of the scratch slot."""
    if not settings.slots:
        return 0
    config = replace(settings.model, seq_length=settings.seq_length)
    return (settings.slots + 1) * slot_bytes(config, settings.plan, settings.dtype, rank)


def memory_by_rank(settings: Settings) -> dict[int, Memory]:
    """Return the memory of the first rank of each pipeline rank, which holds as much as any that shares its stages."""
    plan = settings.plan
    return {rank: memory_of(settings, rank) for rank in range(0, plan.world, plan.ranks_of_stage)}


def fullest(memories: dict[int, Memory]) -> Memory:
    return max(memories.values(), key=lambda memory: memory.total)


def stages_in_flight(plan: Plan, micro_batches: int, pp: int) -> int:
    """Return the forward passes of a stage whose activations pipeline rank `pp` keeps at its fullest moment."""
    if plan.pp == 1:
        return 1
    if plan.schedule == "GPipe":
        return micro_batches
    if plan.schedule == "1F1B":
        return min(plan.pp - pp, micro_batches)
    per_rank = plan.stages_of_rank
    if plan.schedule == "ZBVZeroBubble":
        return min(2 * plan.pp, per_rank * micro_batches)
    round_size = micro_batches // max(1, micro_batches // plan.pp)
    warmup = (per_rank - 1) * round_size + 2 * (plan.pp - 1 - pp)
    return min(warmup + 1, per_rank * micro_batches)


def _gathered(held: list[LocalParameter], settings: Settings) -> int:
    """Return the bytes of the weights that matmuls read: 16-bit weights, autograd's casts of fp32 weights, or FSDP's
    all-gathered buffers, with all that ranks share for them. By NCCL, ZeRO-3 holds one block and prefetches the next,
    in CUDA graphs too."""
    plan, width = settings.plan, settings.dtype.itemsize
    blocks, around = by_block(held), sum(p.by_tp for p in held if p.block is None)
    if plan.zero == 0:
        return width * (sum(blocks) + around) if width < 4 else 0
    if is_pushed(settings):
        return _shared(blocks, around, settings)
    in_blocks = sum(blocks)
    if plan.reshards:
        in_blocks = max((sum(blocks[i : i + 2]) for i in range(len(blocks))), default=0)
    return width * (in_blocks + around)


def _shared(blocks: list[int], around: int, settings: Settings) -> int:
    """Return the bytes that ZeRO's ranks share for copy engines: places of weights, and of gradients that arrive.
    blocks: elements of each; around: of what lies around them."""
    plan, width = settings.plan, settings.dtype.itemsize
    places = min(PLACES, len(blocks)) if plan.reshards else len(blocks)  # which blocks use in turn
    in_blocks = sum(max(blocks[place::places]) for place in range(places))
    largest = max([*blocks, around]) // plan.shard * choose_sums(settings).pushed_dtype.itemsize
    return width * (in_blocks + around) + CopyScatter.bytes(largest, plan.shard)
