"""The activations that a block keeps for backward, measured: a block runs on the meta device with the sizes of one
rank, and what autograd saves is counted. On a GPU, `dtgpt compare` prints the planned memory beside the memory used."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtgpt.config.execution import Settings
from dtgpt.config.lora import LoraConfig
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Core, inventory
from dtgpt.models.layers import AttentionCore, Context, DeferredBiasLinear, JointNorm, Linear
from dtgpt.models.roles import COLUMNS, Role, role_of
from dtgpt.ops.attention.core import AttentionRule, reads_groups
from dtgpt.ops.attention.flash_launch import mask_words
from dtgpt.ops.fast import split_backward
from dtgpt.ops.fp8.sites import Calibration, Site, Sites
from dtgpt.parallel.coordinates import chunk
from dtgpt.parallel.exchange import chunks_of
from dtgpt.parallel.lora import local_adapter


@dataclass(frozen=True)
class BlockSizes:
    """One block on one rank, for a micro-batch."""

    saved: int  # bytes that autograd keeps, without weights and the inside of the attention core
    widest: int  # bytes of the largest activation
    repeated: int  # bytes that keys and values would take more with heads of their own for each head of queries
    output: int  # bytes of the outputs of attention cores


class Fp8(NamedTuple):
    """What the memory of a block in fp8 depends on."""

    splits_backward: bool
    keeps_weights: bool  # as of `Calibration`


def block_activations(settings: Settings, block: int) -> float:
    """Return the bytes that block `block` keeps for backward under the default table of tensor parallelism, without
    weights."""
    if settings.recompute == "full":
        return residual_bytes(settings)  # the input of the block
    sizes = block_sizes(settings, block)
    if settings.recompute == "selective":  # under cp other ranks' output is not kept, either
        return sizes.saved - (sizes.output if settings.plan.cp > 1 else 0)
    return sizes.saved + core_bytes(settings, block)


def block_sizes(settings: Settings, block: int) -> BlockSizes:
    """Return the sizes of block `block` under the plan, measured once for each kind; in fp8 those of a step by known
    scales."""
    plan, config = settings.plan, replace(settings.model, dropout=0.0)
    fp8 = Fp8(plan.splits_backward, not plan.zero) if settings.fp8 else None
    example, shape = inventory(config).examples[block], (settings.micro_batch_size, settings.local_length)
    return _measure(
        config, example, shape, plan.tp, plan.sequence_parallel, _copies(settings), settings.dtype, fp8, settings.lora
    )


def whole_bytes(settings: Settings) -> int:
    """Return the bytes of `[B, T / cp, H]`, the input of a matrix."""
    tokens = settings.micro_batch_size * settings.local_length
    return settings.dtype.itemsize * tokens * settings.model.hidden_size


def residual_bytes(settings: Settings) -> float:
    """Return the bytes of the residual stream between matrices, that of `whole_bytes`, or 1 / tp of it by sequence."""
    return whole_bytes(settings) / (settings.plan.tp if settings.plan.sequence_parallel else 1)


def _copies(settings: Settings) -> int:
    """Return how many ranks keep the same keys and values, made by context parallel ranks; 0: the core takes what the
    block computed."""
    return settings.plan.ranks_of_queries(settings.model) if settings.plan.cp > 1 else 0


def attended(settings: Settings) -> list[tuple[int, int]]:
    """Return the queries and the columns of what an attention core computes at a time: samples, or of each the two
    chunks of queries in its middle, for which most is kept."""
    length, parts = settings.seq_length, max(_copies(settings), 1)
    size = length // (2 * parts)
    return [(size, (index + 1) * size) for index in chunks_of(parts - 1, parts)] if parts > 1 else [(length, length)]


def _heads(settings: Settings) -> float:
    """Return for how many heads of samples an attention core computes."""
    plan = settings.plan
    return settings.micro_batch_size * settings.model.num_heads / (plan.tp * plan.ranks_of_heads(settings.model))


def score_elements(settings: Settings) -> float:
    """Return the elements of the scores of an attention core."""
    return _heads(settings) * sum(queries * columns for queries, columns in attended(settings))


def explicit_scores(settings: Settings, block: int) -> float:
    """Return the elements of the scores that the attention cores of a block compute as tensors."""
    backends = [settings.backend_of(core) for core in inventory(settings.model).cores(block)]
    return score_elements(settings) * sum(backend in ("explicit", "fused_softmax") for backend in backends)


def explicit_work(settings: Settings, block: int) -> float:
    """Return the bytes of gradients of explicit scores, or of the words of masks, unpacked as int64 twice."""
    narrow = 4 + 2 * settings.dtype.itemsize
    return (max(narrow, 16) if settings.model.dropout else narrow) * explicit_scores(settings, block)


def core_bytes(settings: Settings, block: int) -> float:
    """Return the bytes that the attention cores of a block keep beside their inputs and their outputs."""
    cores = inventory(settings.model).cores(block)
    repeated = block_sizes(settings, block).repeated / max(1, len(cores))
    return sum(_bytes_of_core(settings, core, repeated) for core in cores)


def _bytes_of_core(settings: Settings, core: Core, repeated: float) -> float:
    """Return what `core_bytes` does for one core. repeated: as of `BlockSizes`."""
    scores, width, backend = score_elements(settings), settings.dtype.itemsize, settings.backend_of(core)
    heads, pieces = _heads(settings), attended(settings)
    if backend == "explicit":  # probabilities in fp32, and after dropout; of bounded scores their tangent, too
        return (4 + width + 4 * core.softcap) * scores + repeated
    if backend == "fused_softmax":
        tensors = 1 if settings.model.dropout == 0 else 2  # probabilities; under dropout the scores too
        return tensors * width * scores + repeated
    windowed = core.window is not None and core.window < settings.seq_length
    masked = settings.masks_documents or windowed or len(pieces) > 1
    kept = 4 * heads * sum(queries for queries, _ in pieces)  # the logarithm of each row's sum, fp32
    if backend == "flash" and settings.model.dropout > 0:
        kept += 8 * heads * sum(mask_words(*piece) for piece in pieces)  # keep decisions
    if backend == "sdpa" and not reads_groups(settings.device, settings.dtype, masked):
        kept += repeated
    if backend == "sdpa" and masked and scores:
        samples = settings.micro_batch_size if settings.masks_documents else 1
        kept += width * samples * sum(queries * columns for queries, columns in pieces)  # masks, in the scores' dtype
    if backend == "flash" and windowed:
        kept += 8 * settings.micro_batch_size * sum(columns for _, columns in pieces)  # their bounds
    return kept


@lru_cache(maxsize=32)
def _measure(
    config: ModelConfig, index: int, shape: tuple[int, int], tp: int, sequence_parallel: bool, copies: int,
    dtype: torch.dtype, fp8: Fp8 | None, lora: LoraConfig,
) -> BlockSizes:  # fmt: skip
    (batch, length), saved, recorder = shape, {}, _Recorder(copies)
    apart = fp8 is not None and fp8.splits_backward
    with torch.device("meta"):
        block = config.make_block(index).to(dtype)
        x = torch.empty(batch, length // tp if sequence_parallel else length, config.hidden_size, dtype=dtype)
    at = f"blocks.{index}"
    widest = max(_cut(config, f"{at}.{name}", module, tp, sequence_parallel) for name, module in block.named_modules())

    if lora.rank:
        block.requires_grad_(False)
        for parameter in filter(lora.adapts, inventory(config).of_block(index)):
            module = block.get_submodule(parameter.name.removeprefix(f"{at}.").removesuffix(".weight"))
            assert isinstance(module, nn.Linear)
            module.lora = local_adapter(module, parameter, config, lora)
            bind(module, product=module.lora.product)
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    for module in block.modules():
        if isinstance(module, AttentionCore):
            bind(module, cache=recorder)
        elif isinstance(module, Linear | DeferredBiasLinear) and fp8:
            bind(module, sites=_known_sites(fp8.keeps_weights))

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage  # kept, so that no other storage takes its address
        return tensor

    with split_backward() if apart else nullcontext(), saved_tensors_hooks(save, lambda tensor: tensor):
        block(x.requires_grad_(), Context())
    kept = sum(s.nbytes() for s in saved.values())
    if apart:  # rounded weights count as weights that matmuls read, as casts do without fp8
        kept -= sum(module.weight.nbytes for module in block.modules() if isinstance(module, nn.Linear))
    return BlockSizes(kept, batch * length * widest * dtype.itemsize, recorder.repeated, recorder.output)


def _cut(config: ModelConfig, name: str, module: nn.Module, tp: int, sequence_parallel: bool) -> int:
    """Give a module of a block the shapes of tp rank 0. Returns the features of its output."""
    role = role_of(name, config.roles)
    if isinstance(module, JointNorm):
        module.weight = nn.Parameter(module.weight[: len(chunk(range(len(module.weight)), tp, 0))])
    if not isinstance(module, nn.Linear):
        return 0
    if role in COLUMNS:
        rows = len(chunk(range(module.out_features), tp, 0))
        module.weight = nn.Parameter(module.weight[:rows])
        module.bias = None if module.bias is None else nn.Parameter(module.bias[:rows])
        if sequence_parallel:  # its input is all-gathered
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].repeat(1, tp, 1), *inputs[1:]))
        return rows
    if role is Role.ROW:
        module.weight = nn.Parameter(module.weight[:, : len(chunk(range(module.in_features), tp, 0))])
        if sequence_parallel:  # its output is reduce-scattered
            module.register_forward_hook(lambda module, inputs, output: output.chunk(tp, dim=1)[0].clone())
    return module.out_features


def _known_sites(keeps_weights: bool) -> Sites:
    """Return sites whose scales are known, without memory."""
    site = Site(*(torch.empty((), device="meta") for _ in Site._fields))
    return Sites(site, site, site, Calibration(known=True, keeps_weights=keeps_weights))


class _Recorder:
    """A cache that keeps nothing, and counts the bytes that keys and values would take more with heads of their own."""

    def __init__(self, copies: int):
        """copies: as of `_copies`."""
        self.copies, self.repeated, self.output = copies, 0, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        self.output += q.nbytes
        if q.nbytes > k.nbytes:
            # Keys up to the middle of a sample, and half a chunk more, for each of two chunks.
            columns = self.copies + 0.5 if self.copies > 1 else 1
            self.repeated += round(2 * (columns * q.nbytes - max(self.copies, 1) * k.nbytes))
        if not self.copies:
            return _Core.apply(q, k, v)
        keys, values = (x.repeat(1, self.copies, 1, 1) for x in (k, v))
        return _Core.apply(q.clone(), keys, values).clone()


class _Core(torch.autograd.Function):
    """An attention core that keeps its inputs and its output."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out)
        return out
