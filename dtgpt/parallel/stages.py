"""The cut of a model into pipeline stages, by cost, and a forward pass through them.

The slowest stage sets the pace of all, so blocks are divided by what they cost, and not by their number. Training runs
stages in a schedule (`dtgpt.parallel.pipeline`); validation and generation run them in turn, as here.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import inventory
from dtgpt.parallel.mesh import Mesh

EMBEDDING_COST = 0.05  # of the first block's: a lookup, a sum and a dropout, all bound by memory


def block_ranges(config: ModelConfig, plan: Plan) -> list[range]:
    """Return the blocks of each stage: as the plan says, or so that the costliest stage is as cheap as can be."""
    sizes = plan.blocks_per_stage or balanced_cut(config, plan.num_stages)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


@cache
def balanced_cut(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the blocks per stage, at least one each. Cost is in FLOPs of a token at the full length, in
    units of the first block's; the head counts on the last stage, the embedding on the first. Among cuts with the
    same costliest stage, the one with the most even rest."""
    if stages == 1:
        return (config.num_layers,)
    parts = inventory(config)
    costs = [max(1, parts.block_flops(index, config.seq_length)) for index in range(config.num_layers)]
    unit = costs[0]
    up_to = list(accumulate((cost / unit for cost in costs), initial=0.0))
    head = 6 * config.hidden_size * config.padded_vocab_size / unit

    def cost(stage: int, first: int, blocks: int) -> float:
        between = up_to[first + blocks] - up_to[first]
        return between + EMBEDDING_COST * (stage == 0) + head * (stage == stages - 1)

    @cache
    def best(stage: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Return (largest cost, sum of squares, cut) of the stages from `stage` on with `left` blocks."""
        first = config.num_layers - left
        if stage == stages - 1:
            last = cost(stage, first, left)
            return last, last**2, (left,)
        found: tuple[float, float, tuple[int, ...]] = (math.inf, math.inf, ())
        for blocks in range(1, left - (stages - stage - 1) + 1):
            here = cost(stage, first, blocks)
            if here > found[0]:  # as all that have more blocks
                break
            largest, squares, cut = best(stage + 1, left - blocks)
            found = min(found, (max(here, largest), here**2 + squares, (blocks, *cut)))
        return found

    return best(0, config.num_layers)[2]


def keep_stage(model: Decoder, stage: int, plan: Plan) -> Decoder:
    """Remove from a whole model (on the meta device) all but one stage."""
    blocks = block_ranges(model.config, plan)[stage]
    model.keep(blocks, embedding=stage == 0, head=stage == plan.num_stages - 1)
    return model


def places_of_edge(plan: Plan, micro_batches: int) -> int:
    """Return the places of an edge between stages with which no message arrives before the last use of the one that has
    its place. The order of passes keeps that: a stage sends a micro-batch on after it ran earlier ones backward, whose
    gradients came from the next stage when that had used what it received of them."""
    if plan.schedule == "1F1B":
        return min(plan.pp, micro_batches)
    if plan.schedule == "ZBVZeroBubble":
        return min(2 * plan.pp, micro_batches)
    if plan.schedule == "Interleaved1F1B":
        return min(2 * (micro_batches // max(1, micro_batches // plan.pp)), micro_batches)
    return micro_batches


def run_in_turn(stages: Sequence[Any], mesh: Mesh, inputs: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """Return what the last stage makes of `inputs`, such as a `Batch`: tokens `[B, T]` of any length, which later
    stages get as activations, and more that every stage gets. Return None on a rank that does not hold the last stage.

    Between stages activations are of `dtype`; under sequence parallelism tp divides T. Each rank sends and receives in
    the order of the stages, so that ranks never wait for each other in a cycle.
    """
    place, plan = mesh.place, mesh.plan
    x, *more = inputs
    samples, length = x.shape
    edge = samples, length // (plan.tp if plan.sequence_parallel else 1), stages[0].config.hidden_size
    for index, stage in zip(place.stages, stages, strict=True):
        source, target = place.rank_of(index - 1), place.rank_of(index + 1)
        if source is not None:
            x = torch.empty(edge, dtype=dtype, device=mesh.device)
            dist.recv(x, place.neighbour(source), group=mesh.pp_group)
        x = stage(x, *more)
        if target is not None:
            dist.send(x.contiguous(), place.neighbour(target), group=mesh.pp_group)
    return x if place.holds_last else None
