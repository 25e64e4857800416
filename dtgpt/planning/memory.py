"""The memory that a plan needs on each rank, in bytes of PyTorch's allocator, without a GPU."""

from dataclasses import dataclass, replace

from dtgpt.comm.gather import PLACES
from dtgpt.comm.scatter import ROOM
from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.models.roles import Role
from dtgpt.ops.loss.head import chunk_rows
from dtgpt.parallel.cache_sizes import slot_bytes
from dtgpt.parallel.coordinates import RankCoordinates, chunk
from dtgpt.planning.activations import (
    block_activations,
    block_sizes,
    core_bytes,
    explicit_scores,
    residual_bytes,
    whole_bytes,
)  # fmt: skip
from dtgpt.planning.parameters import (
    WIDTH_OF_SUMS,
    LocalParameter,
    blocks_of_rank,
    frozen_bytes,
    gradient_bytes,
    optimizer_bytes,
    parameters_of,
    shards_are_pushed,
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
    edges: int  # buffers of the pipeline
    working: int  # of the operation that runs at that moment
    cache: int = 0  # keys and values of answers that are drawn between steps

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def memory_of(settings: Settings, rank: int) -> Memory:
    """Return the fullest moment of a training step on `rank`. In fp8 that may be in the first step, which observes."""
    moments = [_fullest_moment(settings, rank)]
    if settings.fp8:
        recompute = "full" if settings.observes_again else settings.recompute
        moments.append(_fullest_moment(replace(settings, fp8=False, recompute=recompute), rank))
    return max(moments, key=lambda memory: memory.total)


def _fullest_moment(settings: Settings, rank: int) -> Memory:
    """Return the fullest moment of a step in one precision: the head's forward pass, which makes its gradients, or
    the backward pass of the last block on a rank that does not hold the head, or the end of the step where activations
    are small."""
    plan, config, micro_batches = settings.plan, settings.model, settings.micro_batches
    place, held = RankCoordinates(plan, rank), parameters_of(config, plan, rank)
    blocks, trained = blocks_of_rank(config, plan, rank), trained_on(settings, rank)
    local = sum(p.local for p in trained)

    in_flight = stages_in_flight(plan, micro_batches, place.pp)
    activations = sum(block_activations(settings, block) for block in blocks)
    kept = in_flight / len(place.stages) * activations
    head = 2 * residual_bytes(settings) + 2 * whole_bytes(settings)  # the norm, and the gradient of its output
    computed = [*held, *trained] if settings.lora.rank and plan.zero else trained
    gathered = _gathered(computed, settings)
    if plan.splits_backward:  # logits whole, with their gradient, and casts of weights for each pass in flight
        head += 2 * _logits(settings)
        gathered = round(gathered * in_flight / len(place.stages))
    common = {
        "cache": _cache(settings, rank),
        "weights": 4 * local + frozen_bytes(settings, rank),
        "optimizer": optimizer_bytes(trained, settings),
        "gathered": gathered,
    }
    # torch.distributed.pipelining keeps a buffer for every micro-batch on each edge where a rank receives; what a rank
    # sent is kept until its backward pass.
    buffers = len(place.edges) * micro_batches + in_flight if plan.pp > 1 else 0
    common["edges"] = round(buffers * residual_bytes(settings))

    full = gradient_bytes(trained, settings)
    start = full if settings.sums_gradients or settings.reduce == "exact" else 0
    start = start if micro_batches == 1 or plan.zero == 0 else full  # the first micro-batch finds no gradient yet
    sent = _sent_at_once(trained, settings)
    working = max((_block_work(settings, block) for block in blocks), default=0.0)
    if place.holds_last:
        working = max(working, _head_work(held, settings))
    early = Memory(
        **common,
        gradients=start,
        activations=round(kept + (head if place.holds_last else 0)),
        working=round(working) + sent,
    )
    end = _end_of_step(trained, settings, gathered)
    late = Memory(**(common | end | {"working": end["working"] + sent}), gradients=full, activations=0)
    return max(early, late, key=lambda memory: memory.total)


def _cache(settings: Settings, rank: int) -> int:
    """Return the bytes of the answers that are drawn at the same time, and of the scratch slot."""
    if not settings.slots:
        return 0
    config = replace(settings.model, seq_length=settings.seq_length)
    return (settings.slots + 1) * slot_bytes(config, settings.plan, settings.dtype, rank)


def _end_of_step(held: list[LocalParameter], settings: Settings, gathered: int) -> dict[str, int]:
    """Return the bytes gathered and of work where the gradients of what lies around the blocks are summed over the
    replicas, in fp32. `fully_shard` has freed the weights that it gathered into memory of its own by then, and still
    holds the last gradient as backward made it."""
    around = [p.by_tp for p in held if p.block is None]
    if not around:  # adapters
        return {"gathered": gathered, "working": 0}
    if settings.plan.zero and settings.plan.pp == 1:
        gathered = gathered if shards_are_pushed(settings) else 0  # memory that ranks share is kept
        return {"gathered": gathered, "working": 4 * sum(around) + settings.dtype.itemsize * around[-1]}
    return {"gathered": gathered, "working": 4 * sum(around)}


def _sent_at_once(held: list[LocalParameter], settings: Settings) -> int:
    """Return the bytes of what ZeRO's ranks send for exact sums, and receive: of a block or the rest of a stage."""
    if settings.reduce == "fast" or settings.plan.shard == 1:
        return 0
    largest = max([*_by_block(held), sum(p.by_tp for p in held if p.block is None)])
    return largest * (2 * settings.dtype.itemsize if settings.cuts_each_gradient else WIDTH_OF_SUMS)


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


def _logits(settings: Settings) -> float:
    """Return the bytes of this rank's logits `[B, T / cp, V / tp]`."""
    columns = len(chunk(range(settings.model.padded_vocab_size), settings.plan.tp, 0))
    return settings.dtype.itemsize * settings.micro_batch_size * settings.local_length * columns


def _gathered(held: list[LocalParameter], settings: Settings) -> int:
    """Return the bytes of the weights that matmuls read: 16-bit weights, autograd's casts of fp32 weights, or FSDP's
    all-gathered buffers, with all that ranks share for them. By NCCL, ZeRO-3 holds one block and prefetches the next,
    in CUDA graphs too."""
    plan, width = settings.plan, settings.dtype.itemsize
    blocks, around = _by_block(held), sum(p.by_tp for p in held if p.block is None)
    if plan.zero == 0:
        return width * (sum(blocks) + around) if width < 4 else 0
    if shards_are_pushed(settings):
        return _shared(blocks, around, settings)
    in_blocks = sum(blocks)
    if plan.reshards:
        in_blocks = max((sum(blocks[i : i + 2]) for i in range(len(blocks))), default=0)
    return width * (in_blocks + around)


def _by_block(held: list[LocalParameter]) -> list[int]:
    """Return the elements of each block of a rank, as it computes with them."""
    sizes: dict[int, int] = {}
    for p in held:
        if p.block is not None:
            sizes[p.block] = sizes.get(p.block, 0) + p.by_tp
    return list(sizes.values())


def _shared(blocks: list[int], around: int, settings: Settings) -> int:
    """Return the bytes that ZeRO's ranks share for copy engines: places of weights, and of gradients that arrive.
    blocks: elements of each; around: of what lies around them."""
    plan, width = settings.plan, settings.dtype.itemsize
    places = min(PLACES, len(blocks)) if plan.reshards else len(blocks)  # which blocks use in turn
    in_blocks = sum(max(blocks[place::places]) for place in range(places))
    room = min(ROOM, max([*blocks, around]) // plan.shard * settings.scattered_dtype.itemsize) * (plan.shard - 1)
    return width * (in_blocks + around) + room


def _head_work(held: list[LocalParameter], settings: Settings) -> float:
    """Return the bytes of the head's forward pass: a chunk of logits, the gradient of its weight, in fp32 too where
    there are several chunks, and in backward a copy of it."""
    weight = next(p.by_tp for p in reversed(held) if p.role in (Role.OUTPUT, Role.VOCABULARY))
    width, rows = settings.dtype.itemsize, settings.micro_batch_size * settings.local_length
    columns = len(chunk(range(settings.model.padded_vocab_size), settings.plan.tp, 0))
    at_once = chunk_rows(rows, columns, width)
    if settings.lora.rank:  # logits alone
        return width * at_once * columns
    sums = 4 * weight if at_once < rows and width < 4 else 0
    return max(width * at_once * columns + width * weight + sums, 2 * width * weight)


def _block_work(settings: Settings, block: int) -> float:
    """Return the bytes of a block's backward pass: gradients of its widest tensors, of the scores where they are
    explicit, and what is computed again."""
    again, width = 0.0, settings.dtype.itemsize
    if settings.recompute == "full":
        again = block_activations(replace(settings, recompute="none"), block)
    elif settings.recompute == "selective":
        again = core_bytes(settings, block)
    scores = (4 + 2 * width) * explicit_scores(settings, block)
    return 2 * block_sizes(settings, block).widest + 2 * whole_bytes(settings) + scores + again
