"""The parameters, gradients and optimizer state of each rank, from shapes alone: no process group, no tensor."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, Shape, inventory
from dtgpt.models.roles import Role
from dtgpt.parallel.coordinates import RankCoordinates, chunk
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.stages import block_ranges
from dtgpt.parallel.tensor import Partition, Table, VocabularyShard, make_table, style_of
from dtgpt.planning.allocator import padding
from dtgpt.posttrain.lora.adapters import names_of, shapes_of
from dtgpt.posttrain.lora.config import LoraConfig


class LocalParameter(NamedTuple):
    """A parameter on a rank; numbers of elements but for `shape`."""

    name: str  # of the whole parameter
    role: Role | None  # of its module
    block: int | None  # its index; None: of the embedding or the head
    style: ParallelStyle | None  # of tensor parallelism
    shape: Shape  # of the whole
    by_tp: int  # after tensor parallelism: what the rank computes with
    local: int  # after ZeRO: what the rank keeps


def parameters_of(config: ModelConfig, plan: ResolvedPlan, rank: int) -> list[LocalParameter]:
    """Return what `rank` holds, by the same rules as `dtgpt.parallel.shards` finds in the finished model. The list is
    shared by all callers."""
    if plan.table:  # whose styles cannot be compared
        return _parameters_of(config, plan, rank)
    return _known(config, tuple((name, value) for name, value in vars(plan).items() if name != "table"), rank)


@lru_cache(maxsize=64)
def _known(config: ModelConfig, fields: tuple[tuple[str, Any], ...], rank: int) -> list[LocalParameter]:
    """Return what `parameters_of` does. fields: of a plan without a table of its own."""
    return _parameters_of(config, ResolvedPlan(**dict(fields)), rank)


def _parameters_of(config: ModelConfig, plan: ResolvedPlan, rank: int) -> list[LocalParameter]:
    place = RankCoordinates(plan, rank)
    table: Table = make_table(config, plan) if plan.tp > 1 else {}
    examples, ranges, held = inventory(config).examples, block_ranges(config, plan), []
    alike: dict[tuple[int, str], LocalParameter] = {}  # by a block of the same kind, and the name within it
    for stage in place.stages:
        for whole in _parameters_of_stage(config, ranges, stage):
            if whole.block is None or plan.table:  # which may name one block
                held.append(_local(config, plan, place, table, whole))
                continue
            key = examples[whole.block], whole.name.removeprefix(f"blocks.{whole.block}.")
            if key not in alike:
                alike[key] = _local(config, plan, place, table, whole)
            held.append(alike[key]._replace(name=whole.name, block=whole.block))
    return held


def _local(
    config: ModelConfig, plan: ResolvedPlan, place: RankCoordinates, table: Table, whole: Parameter
) -> LocalParameter:
    module, _, kind = whole.name.rpartition(".")
    style = style_of(module, table, config.roles)
    by_tp, local = _elements(whole.shape, tp_dimension(kind, whole.role, style), plan, place)
    return LocalParameter(
        name=config.table_name if config.tied and whole.name == config.output_name else whole.name,
        role=whole.role,
        block=whole.block,
        style=style,
        shape=whole.shape,
        by_tp=by_tp,
        local=local,
    )


def _elements(shape: Shape, dim: int | None, plan: ResolvedPlan, place: RankCoordinates) -> tuple[int, int]:
    """Return the elements of a parameter of which tensor parallelism cuts `dim`, None: no dimension, after that cut and
    after that of ZeRO."""
    cut = list(shape)
    if dim is not None and dim < len(cut):
        cut[dim] = len(chunk(range(cut[dim]), plan.tp, place.tp))
    by_tp = math.prod(cut)
    cut[0] = len(chunk(range(cut[0]), plan.shard, place.shard))
    return by_tp, math.prod(cut)


def trained_on(settings: Settings, rank: int) -> list[LocalParameter]:
    """Return what `rank` trains: its parameters, or in a run with adapters those of the adapters."""
    lora, config, plan = settings.section(LoraConfig), settings.model, settings.plan
    held = parameters_of(config, plan, rank)
    if not lora.rank:
        return held
    place, made = RankCoordinates(plan, rank), []
    for p in held:
        weight = Parameter(p.name, p.shape, p.role, p.block)
        if not lora.adapts(weight):
            continue
        cut = tp_dimension("weight", p.role, p.style)
        for name, shape, dim in zip(names_of(p.name), shapes_of(weight, config, lora.rank), (1, 0), strict=True):
            by_tp, local = _elements(shape, dim if cut == dim else None, plan, place)
            made.append(p._replace(name=name, shape=shape, by_tp=by_tp, local=local))
    return made


def _parameters_of_stage(config: ModelConfig, ranges: list[range], stage: int) -> Iterator[Parameter]:
    """Yield each parameter that the stage holds."""
    parts, first, last = inventory(config), stage == 0, stage == len(ranges) - 1
    if first:
        yield from parts.of_embedding()
    for index in ranges[stage]:
        yield from parts.of_block(index)
    for p in parts.of_head() if last else ():
        if not (config.tied and p.name == config.output_name and first):  # the embedding of the same stage
            yield p


def blocks_of_rank(config: ModelConfig, plan: ResolvedPlan, rank: int) -> list[int]:
    """Return the indices of the blocks that `rank` holds, by stage."""
    ranges = block_ranges(config, plan)
    return [index for stage in RankCoordinates(plan, rank).stages for index in ranges[stage]]


def blocks_again(settings: Settings) -> set[int]:
    """Return the blocks in which something is computed again in backward."""
    ranges = block_ranges(settings.model, settings.plan)
    return {block for blocks in ranges for index, block in enumerate(blocks) if settings.repeats(index)}


def tp_dimension(kind: str, role: Role | None, style: ParallelStyle | None) -> int | None:
    """Return the dimension that tensor parallelism cuts of a module's parameter `kind`, weight or bias, or None."""
    if isinstance(style, Partition):
        return style.dims.get(kind)
    if isinstance(style, ColwiseParallel | VocabularyShard):
        return 0
    if isinstance(style, RowwiseParallel):
        return 0 if role is Role.VOCABULARY else (1 if kind == "weight" else None)
    return None


def by_block(held: list[LocalParameter]) -> list[int]:
    """Return the elements of each block of a rank, as it computes with them."""
    sizes: dict[int, int] = {}
    for p in held:
        if p.block is not None:
            sizes[p.block] = sizes.get(p.block, 0) + p.by_tp
    return list(sizes.values())


def padding_bytes(held: list[LocalParameter], settings: Settings) -> float:
    """Return the bytes by which the allocator's blocks for weights and the optimizer's state are larger than these."""
    optimizer, narrow = settings.optimizer, settings.dtype.itemsize if settings.low_precision else 0
    total = 0.0
    for p in held:
        states = 0 if optimizer is None else optimizer.state_bytes(p.shape, p.role) / 4
        total += (1 + states) * padding(4 * p.local) + padding(narrow * p.by_tp)
    return total


def optimizer_bytes(held: list[LocalParameter], settings: Settings) -> int:
    """Return the bytes of the optimizer's state on a rank."""
    optimizer = settings.optimizer
    return 0 if optimizer is None else sum(optimizer.state_bytes(p.shape, p.role) * p.local for p in held)


def frozen_bytes(settings: Settings, rank: int) -> int:
    """Return the bytes that `rank` keeps of weights which are not trained."""
    if not settings.freezes_weights:
        return 0
    return settings.dtype.itemsize * sum(p.local for p in parameters_of(settings.model, settings.plan, rank))


def state_bytes(settings: Settings, rank: int) -> int:
    """Return the bytes of weights, gradients and the optimizer's state on `rank`."""
    held = trained_on(settings, rank)
    copies = settings.dtype.itemsize if settings.low_precision else 0
    weights = frozen_bytes(settings, rank) + sum(4 * p.local + copies * p.by_tp for p in held)
    return weights + optimizer_bytes(held, settings) + choose_sums(settings).bytes_of(held)
