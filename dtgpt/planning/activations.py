"""The activations that a block keeps for backward, measured: a block runs on the meta device with the sizes of one
rank, and what autograd saves is counted. On a GPU, `dtgpt compare` prints the planned memory beside the memory used."""

from dataclasses import replace

from dtgpt.config.execution import Settings
from dtgpt.models.inventory import Core, inventory
from dtgpt.models.shared.attention_backend import backend_of
from dtgpt.ops.attention.core import reads_groups
from dtgpt.ops.kernels.attention.flash_launch import mask_words
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads, ranks_of_queries
from dtgpt.parallel.context_parallel.exchange import chunks_of
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.recompute.rules import repeats_blocks
from dtgpt.planning.meta_block import BlockKind, BlockSizes, sizes_of
from dtgpt.posttrain.demands import rows_of
from dtgpt.posttrain.lora.config import LoraConfig


def block_activations(settings: Settings, block: int) -> float:
    """Return the bytes that block `block` keeps for backward under the default table of tensor parallelism, without
    weights."""
    if settings.recompute == "full":
        return residual_bytes(settings)  # the input of the block
    sizes = block_sizes(settings, block)
    if settings.recompute == "around_attention":
        backends = (backend_of(settings, core) for core in inventory(settings.model).cores(block))
        return residual_bytes(settings) + sizes.output + sum(_beside_output(settings, each) for each in backends)
    if settings.recompute == "selective":  # under cp other ranks' output is not kept, either
        return sizes.saved - (sizes.output if settings.plan.cp > 1 else 0)
    return sizes.saved + core_bytes(settings, block)


def block_sizes(settings: Settings, block: int) -> BlockSizes:
    """Return the sizes of block `block` under the plan, measured once for each kind; in fp8 those of a step by known
    scales."""
    return sizes_of(kind_of_block(settings, block), rows_of(settings).number)


def kind_of_block(settings: Settings, block: int) -> BlockKind:
    plan, config = settings.plan, replace(settings.model, dropout=0.0)
    return BlockKind(
        config=config,
        example=inventory(config).examples[block],
        length=rows_of(settings).length,
        group=rows_of(settings).group,
        sample_length=settings.seq_length,
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        copies=_copies(settings),
        dtype=settings.dtype,
        apart=plan.splits_backward,
        fp8=settings.products == FP8,
        keeps_weights=not plan.zero,
        lora=settings.section(LoraConfig),
        ep=1 if plan.asks_host else plan.ep,  # rows that are counted on the host are planned as evenly spread
        tokens_apart=plan.ep > 1 and choose_sums(settings).orderless,
    )


def whole_bytes(settings: Settings) -> int:
    """Return the bytes of `[B, T / cp, H]`, the input of a matrix."""
    tokens = rows_of(settings).number * rows_of(settings).length
    return settings.dtype.itemsize * tokens * settings.model.hidden_size


def residual_bytes(settings: Settings) -> float:
    """Return the bytes of the residual stream between matrices, that of `whole_bytes`, or 1 / tp of it by sequence."""
    return whole_bytes(settings) / (settings.plan.tp if settings.plan.sequence_parallel else 1)


def _copies(settings: Settings) -> int:
    """Return how many ranks keep the same keys and values, made by context parallel ranks; 0: the core takes what the
    block computed."""
    return ranks_of_queries(settings.plan, settings.model) if settings.plan.cp > 1 else 0


def attended(settings: Settings) -> list[tuple[int, int]]:
    """Return the queries and the columns of what an attention core computes at a time: samples, or of each the two
    chunks of queries in its middle, for which most is kept."""
    length, parts = settings.seq_length, max(_copies(settings), 1)
    size = length // (2 * parts)
    return [(size, (index + 1) * size) for index in chunks_of(parts - 1, parts)] if parts > 1 else [(length, length)]


def _heads(settings: Settings) -> float:
    """Return for how many heads of samples an attention core computes."""
    plan = settings.plan
    return settings.micro_batch_size * settings.model.num_heads / (plan.tp * ranks_of_heads(plan, settings.model))


def score_elements(settings: Settings) -> float:
    """Return the elements of the scores of an attention core."""
    return _heads(settings) * sum(queries * columns for queries, columns in attended(settings))


def explicit_work(settings: Settings, block: int) -> float:
    """Return the bytes that the attention cores of a block work with where scores are tensors: the gradients of the
    scores, or, if that is more, the words of an explicit dropout mask, unpacked to int64 twice."""
    width, found = 4 + 2 * settings.dtype.itemsize, 0
    for core in inventory(settings.model).cores(block):
        backend = backend_of(settings, core)
        if backend == "explicit":
            found += max(width, 16) if settings.model.dropout else width
        elif backend == "fused_softmax":
            found += width
    return found * score_elements(settings)


def core_bytes(settings: Settings, block: int) -> float:
    """Return the bytes that the attention cores of a block keep beside their inputs and their outputs."""
    cores = inventory(settings.model).cores(block)
    repeated = block_sizes(settings, block).repeated / max(1, len(cores))
    return sum(_bytes_of_core(settings, core, repeated) for core in cores)


def _bytes_of_core(settings: Settings, core: Core, repeated: float) -> float:
    """Return the bytes that a core keeps beside its inputs and its output. repeated: what keys and values would take
    more with heads of their own for each head of queries."""
    scores, width, backend = score_elements(settings), settings.dtype.itemsize, backend_of(settings, core)
    pieces = attended(settings)
    if backend == "explicit":  # probabilities in fp32, and after dropout; of bounded scores their tangent, too
        return (4 + width + 4 * core.softcap) * scores + repeated
    if backend == "fused_softmax":
        tensors = 1 if settings.model.dropout == 0 else 2  # probabilities; under dropout the scores too
        return tensors * width * scores + repeated
    windowed = core.window is not None and core.window < settings.seq_length
    # Where the capability is missing that keeps documents apart, data have no such field.
    documents = getattr(settings.data, "reset_attention_mask", False)
    masked = documents or windowed or len(pieces) > 1
    kept = _beside_output(settings, backend)
    if backend == "sdpa" and not reads_groups(settings.device, settings.dtype, masked):
        kept += repeated
    if backend == "sdpa" and masked and scores:
        samples = settings.micro_batch_size if documents else 1
        kept += width * samples * sum(queries * columns for queries, columns in pieces)  # masks, in the scores' dtype
    if backend == "flash" and windowed:
        kept += 8 * settings.micro_batch_size * sum(columns for _, columns in pieces)  # their bounds
    return kept


def _beside_output(settings: Settings, backend: str) -> float:
    """Return the bytes that the operation of a core gives beside its output: logarithms of sums, and keep decisions."""
    pieces = attended(settings)
    kept = 4 * sum(queries for queries, _ in pieces)  # of each row, fp32
    if backend == "flash" and settings.model.dropout > 0:
        kept += 8 * sum(mask_words(*piece) for piece in pieces)
    return _heads(settings) * kept


def block_work(settings: Settings, block: int) -> float:
    """Return the bytes that the backward pass of a block works with beside the gradient of its output: those of the
    block on the meta device, or the gradients of explicit scores; and what is computed again."""
    sizes, again = block_sizes(settings, block), 0.0
    if repeats_blocks(settings):  # the input is there
        kept = block_activations(settings, block) - residual_bytes(settings)
        again = sizes.beside + core_bytes(settings, block) - kept
    elif settings.recompute == "selective":
        again = core_bytes(settings, block)
    return max(sizes.working, explicit_work(settings, block)) + again
