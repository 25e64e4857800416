"""How much memory a plan needs on each rank, from shapes alone. Figures are bytes of what PyTorch's allocator holds.

The account of activations lists what autograd keeps for backward. It was checked on H200s against the allocator, block
by block, eager and compiled; `tests/test_dryrun.py` holds the eager part against autograd itself.
"""

from dataclasses import dataclass

import torch

from dtgpt.model import TABLE, GPTConfig
from dtgpt.ops.cross_entropy import CHUNK
from dtgpt.parallel.cost import Held, gradient_bytes, parameters_of
from dtgpt.parallel.mesh import Place, chunk
from dtgpt.parallel.pipeline import block_ranges
from dtgpt.parallel.plan import Plan
from dtgpt.recipe import Recipe


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the fullest moment of a step."""

    weights: int  # fp32 masters
    optimizer: int  # two fp32 moments
    gradients: int
    gathered: int  # whole weights that ZeRO gathered, or casts of weights: what the matrices multiply with
    activations: int
    edges: int  # buffers of the pipeline
    working: int  # of the operation that runs at that moment

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors that a micro-batch makes on one rank."""

    residual: float  # [B, T, H] between tensor parallel layers
    whole: float  # [B, T, H], the input of a matrix
    split: float  # [B, T, H / tp]
    scores: float  # elements of [B, N / tp, T, T]
    logits: float  # [B, T, V / tp]
    width: int  # bytes of an activation's element

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, width: int) -> "Sizes":
        config = recipe.model
        tokens = recipe.micro_batch_size * config.seq_length
        whole = width * tokens * config.hidden_size
        columns = len(chunk(range(config.padded_vocab_size), plan.tp, 0))
        return cls(
            residual=whole / (plan.tp if plan.sequence_parallel else 1),
            whole=whole,
            split=whole / plan.tp,
            scores=tokens * config.num_heads / plan.tp * config.seq_length,
            logits=width * tokens * columns,
            width=width,
        )


def block_activations(config: GPTConfig, sizes: Sizes, compiled: bool) -> float:
    """Bytes that one block keeps for backward under the default table of tensor parallelism, weights apart."""
    streams = 2 * sizes.residual  # the inputs of both LayerNorms
    inputs = 2 * sizes.whole  # their outputs, gathered: the inputs of qkv and fc
    inner = (3 + 1 + 4 + 4) * sizes.split  # qkv, attention's output, fc's output and its GELU
    if config.dropout == 0:
        attention = 4 * sizes.scores / config.seq_length  # the logarithm of each row's sum, fp32
    elif compiled:
        attention = sizes.width * sizes.scores  # probabilities; backward drops them again
    else:
        attention = (4 + sizes.width) * sizes.scores  # probabilities in fp32, and dropped
    return streams + inputs + inner + attention


def memory_of(recipe: Recipe, plan: Plan, rank: int, dtype: torch.dtype, compiled: bool) -> Memory:
    """The fullest moment of a training step on `rank`: the backward pass of the head, or of the last block on a rank
    that does not hold it, or the end of the step where activations are small."""
    config, place = recipe.model, Place(plan, rank)
    width = dtype.itemsize
    sizes = Sizes.of(recipe, plan, width)
    held = parameters_of(config, plan, rank)
    local = sum(p.local for p in held)
    ranges = block_ranges(config, plan)
    blocks = sum(len(ranges[stage]) for stage in place.stages)

    in_flight = stages_in_flight(plan, recipe.micro_batches(plan.dp), place.pp)
    kept = in_flight / len(place.stages) * blocks * block_activations(config, sizes, compiled)
    head = sizes.residual + sizes.whole + sizes.logits if place.holds_last else 0
    full = gradient_bytes(held, plan, recipe.micro_batches(plan.dp))
    gathered = _gathered(held, blocks, plan, width)
    common = {"weights": 4 * local, "optimizer": 8 * local, "gathered": gathered}
    common["edges"] = _edges(plan, place, sizes, recipe.micro_batches(plan.dp), in_flight)

    start = 0 if recipe.micro_batches(plan.dp) == 1 else full  # the first micro-batch finds no gradient yet
    working = _head_work(held, sizes, compiled) if place.holds_last else _block_work(config, sizes, compiled)
    early = Memory(**common, gradients=start, activations=round(kept + head), working=round(working))
    around = sum(4 * p.by_tp for p in held if not p.in_block)
    late = Memory(**common, gradients=full, activations=0, working=around * (2 if plan.world > 1 else 1))
    return max(early, late, key=lambda memory: memory.total)


def memory_by_rank(recipe: Recipe, plan: Plan, dtype: torch.dtype, compiled: bool) -> dict[int, Memory]:
    """Of the first rank of each pipeline rank, which holds as much as any that shares its stages."""
    return {r: memory_of(recipe, plan, r, dtype, compiled) for r in range(0, plan.world, plan.dp * plan.tp)}


def fullest(memories: dict[int, Memory]) -> Memory:
    return max(memories.values(), key=lambda memory: memory.total)


def stages_in_flight(plan: Plan, micro_batches: int, pp: int) -> int:
    """Forward passes of a stage whose activations pipeline rank `pp` keeps at its fullest moment."""
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


def _gathered(held: list[Held], blocks: int, plan: Plan, width: int) -> int:
    """What multiplies: `fully_shard` holds blocks in the activations' dtype and the rest in fp32; in one process
    autograd keeps the casts. Either way the table is cast for the head. ZeRO-3 holds one block and fetches the next."""
    in_blocks = sum(p.by_tp for p in held if p.in_block)
    around = sum(p.by_tp for p in held if not p.in_block)
    tables = [p for p in held if p.name == TABLE]
    cast = width * tables[-1].by_tp if width < 4 and tables else 0
    if plan.world == 1:
        return cast + (width * in_blocks if width < 4 else 0)
    if plan.zero == 3 and plan.pp == 1:
        in_blocks = min(in_blocks, 2 * in_blocks // max(blocks, 1))
    return cast + width * in_blocks + 4 * around


def _edges(plan: Plan, place: Place, sizes: Sizes, micro_batches: int, in_flight: int) -> int:
    """`torch.distributed.pipelining` keeps a buffer for every micro-batch on each edge where a rank receives. What a
    rank sent is kept until its backward pass."""
    if plan.pp == 1:
        return 0
    receives = sum((place.comes_from(s) is not None) + (place.goes_to(s) is not None) for s in place.stages)
    return round((receives * micro_batches + in_flight) * sizes.residual)


def _head_work(held: list[Held], sizes: Sizes, compiled: bool) -> float:
    """Backward of the head: the gradient of the logits, then that of the table as the matrix product leaves it and in
    fp32; a compiled head lets go of the cast table before."""
    table = next(p.by_tp for p in reversed(held) if p.name == TABLE)
    narrow = sizes.width * table if sizes.width < 4 else 0
    chunks = 0 if compiled else 3 * 4 * min(CHUNK, sizes.logits / sizes.width)
    return sizes.logits + max(4 * table + narrow * (0 if compiled else 1), chunks)


def _block_work(config: GPTConfig, sizes: Sizes, compiled: bool) -> float:
    """Backward of a block: gradients of its widest tensors, and of the scores where they are explicit."""
    scores = 0 if config.dropout == 0 else sizes.scores * (2 * sizes.width if compiled else 4 + 2 * sizes.width)
    return 8 * sizes.split + 2 * sizes.whole + scores
