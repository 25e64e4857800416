"""What each rank holds of a model, from shapes alone: parameters, what is trained of them, gradients, optimizer state.

There is no process group and no tensor. Which part of a parameter a rank holds says `dtgpt.parallel.layout`, what sums
its gradients `dtgpt.parallel.gradients`: nothing of a plan's cuts is known here a second time.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, Shape, inventory
from dtgpt.models.roles import Role
from dtgpt.parallel.layout import ParameterLayout
from dtgpt.parallel.mesh import DIMENSIONS, RankCoordinates
from dtgpt.parallel.recompute.rules import repeats
from dtgpt.parallel.shared_memory.gather import PLACES
from dtgpt.parallel.shared_memory.scatter import CopyScatter
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.layout import Layout
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.sums import Costs, costs_of, is_pushed
from dtgpt.posttrain.add_tokens.config import AddTokensConfig
from dtgpt.posttrain.add_tokens.rows import rows_of
from dtgpt.posttrain.lora.adapters import layouts_of, names_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.posttrain.lora.four_bits import held_bytes


class LocalParameter(NamedTuple):
    """A parameter on a rank; numbers of elements but for `shape`."""

    name: str  # of the whole parameter
    role: Role | None  # of its module
    block: int | None  # its index; None: of the embedding or the head
    layout: ParameterLayout
    shape: Shape  # of the whole
    by_tp: int  # after tensor parallelism: what the rank computes with
    local: int  # after ZeRO: what the rank keeps

    @property
    def apart(self) -> int:
        """The number of neighbouring ranks of data that hold different parts along axes of the parameter's own."""
        return math.prod(ranks for axis, ranks in self.layout.axes.items() if axis not in DIMENSIONS)


def parameters_of(config: ModelConfig, plan: ResolvedPlan, rank: int) -> list[LocalParameter]:
    """Return what `rank` holds, by the same rules as `dtgpt.parallel.shards` finds in the finished model. The list is
    shared by all callers."""
    if plan.table:  # whose styles cannot be compared
        return _parameters_of(config, plan, rank)
    return _known(config, tuple((name, value) for name, value in vars(plan).items() if name != "table"), rank)


@lru_cache(maxsize=64)
def _known(config: ModelConfig, fields: tuple[tuple[str, Any], ...], rank: int) -> list[LocalParameter]:
    """Return what `rank` holds under the plan of these fields, which has no table of its own."""
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
        by_tp=math.prod(map(len, layout.region(rank, without="shard"))),
        local=math.prod(map(len, layout.region(rank))),
    )


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


def blocks_again(settings: Settings) -> set[int]:
    """Return the blocks in which something is computed again in backward."""
    ranges = block_ranges(settings.model, settings.plan)
    return {block for blocks in ranges for index, block in enumerate(blocks) if repeats(settings, index)}


@dataclass(frozen=True)
class Rank:
    """A rank of the plan, and what it holds."""

    settings: Settings
    rank: int

    @cached_property
    def place(self) -> RankCoordinates:
        return RankCoordinates(self.settings.plan, self.rank)

    @cached_property
    def parameters(self) -> list[LocalParameter]:
        """The parameters of the model."""
        return parameters_of(self.settings.model, self.settings.plan, self.rank)

    @cached_property
    def trained(self) -> list[LocalParameter]:
        """What is trained: these parameters, or in a run with adapters those of the adapters."""
        lora, config = self.settings.section(LoraConfig), self.settings.model
        if not lora.rank:
            return self.parameters
        weights = [(p, Parameter(p.name, p.shape, p.role, p.block)) for p in self.parameters]
        rows = (rows_of(weight, p.layout, self.settings) for p, weight in weights)
        new = [_local(*found, self.rank) for found in rows if found is not None]
        return new + [
            _local(weight._replace(name=name, shape=layout.shape), layout, self.rank)
            for p, weight in weights
            if lora.adapts(weight)
            for name, layout in zip(names_of(p.name), layouts_of(p.layout, weight, config, lora.rank), strict=True)
        ]

    @cached_property
    def blocks(self) -> list[int]:
        """The indices of its blocks, by stage."""
        ranges = block_ranges(self.settings.model, self.settings.plan)
        return [index for stage in self.place.stages for index in ranges[stage]]

    def blocks_by_kind(self, again: bool | None = None) -> Counter[int]:
        """Return how many blocks there are of each kind, by an index. again: of those that have something computed
        again, or have not."""
        examples, repeated = inventory(self.settings.model).examples, blocks_again(self.settings)
        return Counter(examples[block] for block in self.blocks if again in (None, block in repeated))

    @cached_property
    def sums(self) -> Costs:
        """What the sums of the gradients take."""
        return costs_of(self.settings)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.sums.bytes_of(self.trained)

    @cached_property
    def around(self) -> int:
        """Elements of what is trained around the blocks, as the rank computes with it."""
        return sum(p.by_tp for p in self.trained if p.block is None)

    @cached_property
    def table(self) -> LocalParameter | None:
        """The output projection; None on a rank that does not hold or does not train it."""
        roles = (Role.OUTPUT, Role.VOCABULARY)
        trains = not self.settings.freezes_weights or self.settings.section(AddTokensConfig).count
        if not self.place.holds_last or not trains:
            return None
        return next(p for p in reversed(self.parameters) if p.role in roles)

    @cached_property
    def head(self) -> int:
        """Bytes of the gradient of the output projection, as the head makes it."""
        return 0 if self.table is None else self.settings.dtype.itemsize * self.table.by_tp

    @cached_property
    def passes(self) -> float:
        """The forward passes in flight of each stage, at most."""
        settings, place = self.settings, self.place
        return stages_in_flight(settings.plan, settings.micro_batches, place.pp) / len(place.stages)

    @cached_property
    def gathered(self) -> int:
        """Bytes of the weights that matmuls read: 16-bit weights, autograd's casts of fp32 weights, or FSDP's
        all-gathered buffers, with all that ranks share for them. By NCCL, ZeRO-3 holds one block and prefetches the
        next, in CUDA graphs too."""
        settings, plan, width = self.settings, self.settings.plan, self.settings.dtype.itemsize
        if plan.splits_backward:  # casts belong to each pass
            return 0
        computed = [*self.parameters, *self.trained] if settings.freezes_weights and plan.zero else self.trained
        lora, sizes = settings.section(LoraConfig), Counter[int]()
        for p in computed:
            if p.block is not None:
                sizes[p.block] += round(held_bytes(p, lora, p.by_tp, width) / width)
        blocks, around = list(sizes.values()), sum(p.by_tp for p in computed if p.block is None)
        if plan.zero == 0:
            return width * (sum(blocks) + around) if width < 4 else 0
        if is_pushed(settings):
            return self._shared(blocks, around)
        in_blocks = sum(blocks)
        if plan.reshards:
            in_blocks = max((sum(blocks[i : i + 2]) for i in range(len(blocks))), default=0)
        return width * (in_blocks + around)

    def _shared(self, blocks: list[int], around: int) -> int:
        """Return the bytes that ZeRO's ranks share for copy engines: places of weights, and of gradients that arrive.
        blocks: elements of each; around: of what lies around them."""
        plan, width = self.settings.plan, self.settings.dtype.itemsize
        places = min(PLACES, len(blocks)) if plan.reshards else len(blocks)  # which blocks use in turn
        in_blocks = sum(max(blocks[place::places]) for place in range(places))
        largest = max([*blocks, around]) // plan.shard * self.sums.sums.pushed_dtype.itemsize
        return width * (in_blocks + around) + CopyScatter.bytes(largest, plan.shard)

    @property
    def weight_bytes(self) -> int:
        """Bytes of fp32 masters, and of weights that are not trained."""
        trained, width = 4 * sum(p.local for p in self.trained), self.settings.dtype.itemsize
        if not self.settings.freezes_weights:
            return trained
        lora = self.settings.section(LoraConfig)
        return trained + round(sum(held_bytes(p, lora, p.local, width) for p in self.parameters))

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        if (optimizer := self.settings.optimizer) is None:
            return 0
        return sum(OptimizerCosts(optimizer).state_bytes(p.shape, p.role) * p.local for p in self.trained)


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


def state_bytes(settings: Settings, rank: int) -> int:
    """Return the bytes of weights, gradients and the optimizer's state on `rank`."""
    here, copies = Rank(settings, rank), settings.dtype.itemsize if settings.low_precision else 0
    narrow = copies * sum(p.by_tp for p in here.trained)
    return here.weight_bytes + narrow + here.optimizer_bytes + here.gradients
