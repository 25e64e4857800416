"""What a plan costs each rank, from shapes alone: no process group, no tensor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtgpt.model import GPT, TABLE, GPTConfig
from dtgpt.parallel.mesh import Place, chunk
from dtgpt.parallel.pipeline import block_ranges
from dtgpt.parallel.plan import Plan
from dtgpt.parallel.tensor import Table, VocabularyShard, make_table, style_of
from dtgpt.recipe import Recipe

OUTPUT = "head.lm_head.weight"  # the tied table's name on a stage that has the head without the embedding
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A parameter on a rank, in elements."""

    name: str
    stage: int
    whole: int  # of the tensor
    by_tp: int  # after tensor parallelism: what the rank computes with
    local: int  # after ZeRO: what it keeps

    @property
    def in_block(self) -> bool:
        return self.name.startswith("blocks.")


def parameters_of(config: GPTConfig, plan: Plan, rank: int) -> list[Held]:
    """What `rank` holds, by the same rules as `dtgpt.parallel.shards` finds in the finished model."""
    place, held = Place(plan, rank), []
    table = make_table(config, plan) if plan.tp > 1 else {}
    ranges = block_ranges(config, plan)
    for stage in place.stages:
        for name, module, shape in _parameters_of_stage(config, ranges, stage):
            local = list(shape)
            dim = tp_dimension(module, name, table)
            if dim is not None and dim < len(shape):
                local[dim] = len(chunk(range(shape[dim]), plan.tp, place.tp))
            by_tp = math.prod(local)
            local[0] = len(chunk(range(local[0]), plan.shard, place.shard))
            held.append(Held(name, stage, math.prod(shape), by_tp, math.prod(local)))
    return held


def _parameters_of_stage(config: GPTConfig, ranges: list[range], stage: int) -> Iterator[tuple[str, str, Shape]]:
    """(name, module that holds it, whole shape) of each parameter."""
    embedding, block, head = _shapes(replace(config, num_layers=1))
    parts = [(f"blocks.{i}.{name}", shape) for i in ranges[stage] for name, shape in block]
    if stage == 0:
        parts = [*embedding, *parts]
    if stage == len(ranges) - 1:
        parts += head
    for name, shape in parts:
        if name == OUTPUT and stage == 0:
            continue  # tied to the embedding of the same stage
        yield (TABLE if name == OUTPUT else name), name.rpartition(".")[0], shape


@lru_cache(maxsize=8)
def _shapes(config: GPTConfig) -> tuple[list[tuple[str, Shape]], ...]:
    """Names and shapes in the embedding, in a block (named from there on) and in the head."""
    with torch.device("meta"):
        model = GPT(config)
    every = [(name, tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)]
    block = [(name.removeprefix("blocks.0."), shape) for name, shape in every if name.startswith("blocks.0.")]
    return ([e for e in every if e[0].startswith("embedding.")], block, [e for e in every if e[0].startswith("head.")])


def tp_dimension(module: str, name: str, table: Table) -> int | None:
    """The dimension of parameter `name` of `module` that tensor parallelism cuts, or None."""
    style = style_of(module, table)
    if isinstance(style, ColwiseParallel | VocabularyShard):
        return 0
    if isinstance(style, RowwiseParallel):
        return 0 if module == "embedding.wte" else (1 if name.endswith("weight") else None)
    return None


def narrow(plan: Plan, width: int) -> bool:
    """Whether weights have 16 bits, where activations have `width` bytes."""
    return width < 4 and plan.narrows_weights


def keeps_totals(plan: Plan, micro_batches: int, width: int) -> bool:
    """Whether gradients of all micro-batches and replicas are summed in tensors of their own, without ZeRO."""
    return plan.zero == 0 and (plan.dp > 1 or (micro_batches > 1 and narrow(plan, width)))


def gradient_width(plan: Plan, micro_batches: int, width: int) -> int:
    """Bytes of a number of the gradient that the optimizer gets: it is as narrow as the weights where replicas sent it
    so, and where a single micro-batch made it."""
    return width if narrow(plan, width) and (plan.dp > 1 or micro_batches == 1) else 4


def gradient_bytes(held: list[Held], plan: Plan, micro_batches: int, width: int) -> int:
    """ZeRO-2 cuts gradients as they come, ZeRO-1 after the last micro-batch; a pipeline sums all micro-batches before
    it cuts."""
    if plan.dp > 1 and narrow(plan, width):  # on the wire, from there, and the sums of several micro-batches
        return sum((2 * width + (4 if micro_batches > 1 else 0)) * p.by_tp for p in held)
    each = gradient_width(plan, micro_batches, width)
    cut = plan.pp == 1 and (plan.zero >= 2 or (plan.zero == 1 and micro_batches == 1))
    return sum(each * (p.local if cut else p.by_tp) for p in held)


def state_bytes(recipe: Recipe, plan: Plan, rank: int, width: int) -> int:
    """Weights, gradients and AdamW's two moments on `rank`, where activations have `width` bytes."""
    held = parameters_of(recipe.model, plan, rank)
    copies = width if narrow(plan, width) else 0
    own = sum(12 * p.local + copies * p.by_tp for p in held)
    return own + gradient_bytes(held, plan, recipe.micro_batches(plan.dp), width)
