"""A block on the meta device with the sizes of one rank, and what its passes take there."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import BoundModule, bind, exchanges
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.layers import AttentionCore, Context, Linear
from dtgpt.models.roles import INNER, Role, role_of
from dtgpt.ops.attention.core import AttentionRule
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.fp8.sites import Calibration, Site, Sites
from dtgpt.ops.operation import split_backward
from dtgpt.parallel.expert_parallel.gathered import cut_experts
from dtgpt.parallel.layout import INPUTS, OUTPUTS, slices
from dtgpt.planning.layout import Layout
from dtgpt.planning.meta_shapes import result_of
from dtgpt.planning.torch_private import EagerDispatchMode, input_gradient
from dtgpt.posttrain.lora.adapters import add_local, cut_from_the_end
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.util import seams

BRANCH_ENDS: dict[Role | None, int] = {Role.ENTRY: OUTPUTS, Role.EXIT: INPUTS}  # what matrices do there that are so cut


class LiveBytes(EagerDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as they live."""

    def __init__(self, without: set[int]):
        """without: storages that do not count."""
        super().__init__()
        self.now = self.peak = 0
        self._seen = set(without)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = result_of(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class BlockKind(NamedTuple):
    """What the sizes of a block depend on, for a row of `length` tokens on each rank."""

    config: ModelConfig
    example: int  # index of a block of this kind
    length: int
    tp: int
    sequence_parallel: bool
    copies: int  # ranks that keep the same keys and values; 0: the core takes what the block computed
    dtype: torch.dtype
    apart: bool  # whether gradients of weights are computed apart, by PyTorch's own operations
    fp8: bool
    keeps_weights: bool  # whether rounded weights stay from one micro-batch to the next
    lora: LoraConfig
    group: int = 0  # samples, of `sample_length` tokens, that have a row in common; 0: a row is a sample
    sample_length: int = 0
    ep: int = 1  # ranks whose tokens are gathered for the experts of each
    tokens_apart: bool = False  # of each of these ranks, for gradients of their own


@dataclass(frozen=True)
class BlockSizes:
    """One block on one rank, for a micro-batch."""

    saved: int  # bytes that autograd keeps, without weights and the inside of the attention core
    beside: int  # of these, bytes beside the block's input
    working: int  # bytes that its backward pass takes more at most, without the gradient of the output and those of
    # weights, but for those that an operation in fp8 makes with its input's
    repeated: int  # bytes that keys and values would take more with heads of their own for each head of queries
    output: int  # bytes of the outputs of attention cores


@lru_cache(maxsize=32)
def sizes_of(kind: BlockKind, batch: int) -> BlockSizes:
    recorder, saved = _Recorder(kind.copies), set()
    block = make_block(kind, recorder)
    x, gradient = make_input(kind, batch).requires_grad_(), make_input(kind, batch)
    own = x.untyped_storage()._cdata
    context, tables = _context(kind, batch)
    given = {tensor.untyped_storage()._cdata for tensor in (x, gradient, *block.parameters(), *tables)}

    def save(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage()._cdata)
        return tensor

    with split_backward() if kind.apart else nullcontext(), LiveBytes(given) as alive:
        with saved_tensors_hooks(save, lambda tensor: tensor):
            end = [block(x, context).grad_fn]  # emptied below: nothing but the pass then holds what it frees
        beside = alive.peak = alive.now
        input_gradient(end, gradient, x)
    working = alive.peak - beside
    if kind.apart and kind.fp8:  # rounded weights count as weights that matmuls read, as casts do without fp8
        beside -= sum(module.weight.nbytes for module in block.modules() if isinstance(module, nn.Linear))
    kept = beside + (x.nbytes if own in saved else 0)
    return BlockSizes(kept, beside, working, recorder.repeated, recorder.output)


def _context(kind: BlockKind, rows: int) -> tuple[Context, list[Tensor]]:
    """Return what a block knows of a micro-batch, and its tensors, which all blocks use."""
    if not kind.group:
        return Context(), []
    with torch.device("meta"):
        copies = torch.empty(rows, kind.group, kind.sample_length, dtype=torch.int64)
        positions = torch.empty(rows, kind.length, dtype=torch.int64)
        seen = seams.listed("sharings")[0](copies, kind.length)
    return Context(positions=positions, seen=seen), [positions, *seen[:-1]]


def make_input(kind: BlockKind, batch: int) -> Tensor:
    length = kind.length // kind.tp if kind.sequence_parallel else kind.length
    return torch.empty(batch, length, kind.config.hidden_size, dtype=kind.dtype, device="meta")


def make_block(kind: BlockKind, recorder: "_Recorder | None" = None) -> BoundModule:
    config, recorder = kind.config, recorder or _Recorder(kind.copies)
    with torch.device("meta"):
        block = config.make_block(kind.example).to(kind.dtype)
    at = f"blocks.{kind.example}"
    layout = Layout(config, ResolvedPlan(tp=kind.tp))
    for p in inventory(config).of_block(kind.example):
        path, _, key = p.name.removeprefix(f"{at}.").rpartition(".")
        module = block.get_submodule(path)
        of_rank = layout.of(p)
        module.register_parameter(key, nn.Parameter(module.get_parameter(key)[slices(of_rank.region(0))]))
        if kind.sequence_parallel and key == "weight" and p.role not in INNER:
            _exchange(cut_from_the_end(of_rank, "tp"), module, _SequenceParts(kind.tp))
    for name, module in block.named_modules():
        if kind.sequence_parallel and (dim := BRANCH_ENDS.get(role_of(f"{at}.{name}", config.roles))):
            _exchange(dim, module, _SequenceParts(kind.tp))
    if kind.ep > 1:
        cut_experts(block, kind.ep, kind.tokens_apart)
    if kind.lora.rank:
        block.requires_grad_(False)
        for parameter in inventory(config).of_block(kind.example):
            if kind.lora.adapts(parameter) or kind.lora.quantises(parameter):
                module = block.get_submodule(parameter.name.removeprefix(f"{at}.").removesuffix(".weight"))
                add_local(module, parameter, config, kind.lora)
    for module in block.modules():
        if isinstance(module, AttentionCore):
            bind(module, cache=recorder)
        elif isinstance(module, Linear) and kind.fp8:
            bind(module, quantised=_known_product(kind.keeps_weights))
    return block


def _exchange(dim: int | None, module: nn.Module, parts: "_SequenceParts") -> None:
    """Let a module whose weight is cut along this dimension make its input whole, or sum its output, under sequence
    parallelism."""
    if dim == OUTPUTS:
        bind(module, into=parts)
        module.register_forward_pre_hook(
            lambda module, inputs: inputs if exchanges(module.bound) else (parts.gather(inputs[0]), *inputs[1:])
        )
    elif dim == INPUTS:
        bind(module, out=parts)
        module.register_forward_hook(lambda module, inputs, y: y if exchanges(module.bound) else parts.sum(y))


class _SequenceParts(NamedTuple):
    """Stand-ins for an all-gather and a reduce-scatter over the sequence."""

    ranks: int
    cut: bool = True

    def gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.ranks, 1)

    def sum(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks, dim=1)[0].clone()


def _known_product(keeps_weights: bool) -> Fp8Product:
    """Return a product whose scales are known, without memory."""
    site = Site(*(torch.empty((), device="meta") for _ in Site._fields))
    return Fp8Product(Sites(site, site, site, Calibration(known=True, keeps_weights=keeps_weights)))


class _Recorder:
    """A cache that keeps nothing, and counts the bytes that keys and values would take more with heads of their own."""

    def __init__(self, copies: int):
        """copies: ranks that keep the same keys and values."""
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

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, _ = ctx.saved_tensors
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
