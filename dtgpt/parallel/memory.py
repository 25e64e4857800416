"""How much memory a plan needs on each rank, from shapes alone. Figures are bytes of what PyTorch's allocator holds.

The account of activations lists what autograd keeps for backward. It was checked on H200s against the allocator, block
by block, eager and compiled; `tests/test_dryrun.py` holds the eager part against autograd itself.
"""

from dataclasses import dataclass, replace

import torch

from dtgpt.model import TABLE
from dtgpt.ops.attention import choose
from dtgpt.ops.head import LOGITS_BYTES
from dtgpt.parallel.cost import Held, gradient_bytes, keeps_totals, parameters_of
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


def block_activations(recipe: Recipe, sizes: Sizes, backend: str) -> float:
    """Bytes that one block keeps for backward under the default table of tensor parallelism, weights apart. `backend`:
    that of attention, as `attention_backend` tells it."""
    if recipe.recompute == "full":
        return sizes.residual  # what goes into the block
    streams = 2 * sizes.residual  # the inputs of both LayerNorms
    inputs = 2 * sizes.whole  # their outputs, gathered: the inputs of qkv and fc
    inner = (3 + 1 + 4 + 4) * sizes.split  # qkv, attention's output, fc's output and its GELU
    return streams + inputs + inner + (0 if recipe.recompute == "selective" else _core(recipe, sizes, backend))


def _core(recipe: Recipe, sizes: Sizes, backend: str) -> float:
    """Bytes that the attention core keeps beside its input and its output."""
    if backend == "explicit":
        return (4 + sizes.width) * sizes.scores  # probabilities in fp32, and dropped
    if backend == "fused_softmax":
        kept = 1 if recipe.model.dropout == 0 else 2  # probabilities; under dropout the scores too
        return kept * sizes.width * sizes.scores
    return 4 * sizes.scores / recipe.model.seq_length  # the logarithm of each row's sum, fp32


def attention_backend(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> str:
    """The back end of a training step on this kind of device."""
    if recipe.attention != "auto":
        return recipe.attention
    config = recipe.model
    kernels = device.type == "cuda" and dtype != torch.float32
    masking = recipe.data.reset_attention_mask
    return choose(config.dropout > 0, masking, kernels, config.hidden_size // config.num_heads)


def memory_of(recipe: Recipe, plan: Plan, rank: int, dtype: torch.dtype, backend: str, graphed: bool = False) -> Memory:
    """The fullest moment of a training step on `rank`: the head's forward pass, which makes its gradients, or the
    backward pass of the last block on a rank that does not hold the head, or the end of the step where activations are
    small. graphed: the step is a CUDA graph."""
    config, place = recipe.model, Place(plan, rank)
    width, micro_batches = dtype.itemsize, recipe.micro_batches(plan.dp)
    sizes = Sizes.of(recipe, plan, width)
    held = parameters_of(config, plan, rank)
    local = sum(p.local for p in held)
    ranges = block_ranges(config, plan)
    blocks = sum(len(ranges[stage]) for stage in place.stages)

    in_flight = stages_in_flight(plan, micro_batches, place.pp)
    kept = in_flight / len(place.stages) * blocks * block_activations(recipe, sizes, backend)
    head = 2 * sizes.residual + 2 * sizes.whole  # the LayerNorm, and the gradient of its output
    gathered = _gathered(held, blocks, plan, width, graphed)
    if plan.splits_backward:  # logits whole, with their gradient, and casts of weights for each pass in flight
        head += 2 * sizes.logits
        gathered = round(gathered * in_flight / len(place.stages))
    head = head if place.holds_last else 0
    common = {"weights": 4 * local, "optimizer": 8 * local, "gathered": gathered}
    common["edges"] = _edges(plan, place, sizes, micro_batches, in_flight)

    full = gradient_bytes(held, plan, micro_batches, width)
    start = full if plan.zero == 0 and keeps_totals(plan, micro_batches, width) else 0
    start = start if micro_batches == 1 or plan.zero == 0 else full  # the first micro-batch finds no gradient yet
    working = _block_work(recipe, sizes, backend)
    if place.holds_last:
        working = max(working, _head_work(held, sizes))
    early = Memory(**common, gradients=start, activations=round(kept + head), working=round(working))
    around = sum(4 * p.by_tp for p in held if not p.in_block)
    late = Memory(**common, gradients=full, activations=0, working=around)
    return max(early, late, key=lambda memory: memory.total)


def memory_by_rank(recipe: Recipe, plan: Plan, dtype: torch.dtype, device: torch.device) -> dict[int, Memory]:
    """Of the first rank of each pipeline rank, which holds as much as any that shares its stages."""
    backend, graphed = attention_backend(recipe, device, dtype), recipe.captures(device.type)
    return {r: memory_of(recipe, plan, r, dtype, backend, graphed) for r in range(0, plan.world, plan.dp * plan.tp)}


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


def _gathered(held: list[Held], blocks: int, plan: Plan, width: int, graphed: bool) -> int:
    """What multiplies: the modules' own narrow weights, the casts of fp32 ones that autograd keeps, or what
    `fully_shard` gathered. ZeRO-3 holds one block and fetches the next; in a graph memory that several streams used is
    not used again, so that all weights, and all gradients on their way to be cut, have a place of their own."""
    in_blocks = sum(p.by_tp for p in held if p.in_block)
    around = sum(p.by_tp for p in held if not p.in_block)
    if plan.zero == 0:
        return width * (in_blocks + around) if width < 4 else 0
    if graphed:
        return (width + 4) * (in_blocks + around)
    if plan.zero == 3 and plan.pp == 1:
        in_blocks = min(in_blocks, 2 * in_blocks // max(blocks, 1))
    return width * (in_blocks + around)


def _edges(plan: Plan, place: Place, sizes: Sizes, micro_batches: int, in_flight: int) -> int:
    """`torch.distributed.pipelining` keeps a buffer for every micro-batch on each edge where a rank receives. What a
    rank sent is kept until its backward pass."""
    if plan.pp == 1:
        return 0
    receives = sum((place.comes_from(s) is not None) + (place.goes_to(s) is not None) for s in place.stages)
    return round((receives * micro_batches + in_flight) * sizes.residual)


def _head_work(held: list[Held], sizes: Sizes) -> float:
    """The head's forward pass: a chunk of logits, the table's gradient, in fp32 too where there are several chunks, and
    in backward a copy of it."""
    table = next(p.by_tp for p in reversed(held) if p.name == TABLE)
    chunk = min(sizes.logits, LOGITS_BYTES)
    sums = 4 * table if sizes.logits > LOGITS_BYTES and sizes.width < 4 else 0
    return max(chunk + sizes.width * table + sums, 2 * sizes.width * table)


def _block_work(recipe: Recipe, sizes: Sizes, backend: str) -> float:
    """Backward of a block: gradients of its widest tensors, of the scores where they are explicit, and what is computed
    again."""
    again = 0.0
    if recipe.recompute == "full":
        again = block_activations(replace(recipe, recompute="none"), sizes, backend)
    elif recipe.recompute == "selective":
        again = _core(recipe, sizes, backend)
    scores = (4 + 2 * sizes.width) * sizes.scores if backend in ("explicit", "fused_softmax") else 0
    return 8 * sizes.split + 2 * sizes.whole + scores + again
