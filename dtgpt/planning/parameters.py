"""The parameters, gradients and optimizer state of each rank, from shapes alone: no process group, no tensor."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, Shape, inventory
from dtgpt.models.roles import Role
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.layout import Layout, ParameterLayout
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.allocator import padding
from dtgpt.posttrain.lora.adapters import layouts_of, names_of
from dtgpt.posttrain.lora.config import LoraConfig


class LocalParameter(NamedTuple):
    """A parameter on a rank; numbers of elements but for `shape`."""

    name: str  # of the whole parameter
    role: Role | None  # of its module
    block: int | None  # its index; None: of the embedding or the head
    layout: ParameterLayout
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
    layout, ranges, held = Layout(config, plan), block_ranges(config, plan), []
    for stage in RankCoordinates(plan, rank).stages:
        for whole in _parameters_of_stage(config, ranges, stage):
            name = config.table_name if config.tied and whole.name == config.output_name else whole.name
            held.append(_local(whole._replace(name=name), layout.of(whole), rank))
    return held


def _local(whole: Parameter, layout: ParameterLayout, rank: int) -> LocalParameter:
    return LocalParameter(
        name=whole.name,
        role=whole.role,
        block=whole.block,
        layout=layout,
        shape=whole.shape,
        by_tp=math.prod(layout.local_shape(rank, without="shard")),
        local=math.prod(layout.local_shape(rank)),
    )


def trained_on(settings: Settings, rank: int) -> list[LocalParameter]:
    """Return what `rank` trains: its parameters, or in a run with adapters those of the adapters."""
    lora, config, plan = settings.section(LoraConfig), settings.model, settings.plan
    held = parameters_of(config, plan, rank)
    if not lora.rank:
        return held
    weights = [(p, Parameter(p.name, p.shape, p.role, p.block)) for p in held]
    return [
        _local(weight._replace(name=name, shape=layout.shape), layout, rank)
        for p, weight in weights
        if lora.adapts(weight)
        for name, layout in zip(names_of(p.name), layouts_of(p.layout, weight, config, lora.rank), strict=True)
    ]


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
