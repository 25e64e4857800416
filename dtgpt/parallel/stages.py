"""The cut of a model into pipeline stages, and a forward pass through them.

A stage is a range of blocks, with the embedding before the first and the head behind the last, so that it is a decoder
with parts left out. The slowest one sets the pace of all: what balances them is a capability. Training runs stages in a
schedule (`dtgpt.parallel.pipeline`); validation and generation run them in turn, as here.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams


def block_ranges(config: ModelConfig, plan: Plan) -> list[range]:
    """Return the blocks of each stage: as the plan says, or as a capability balances them, or about equally many."""
    sizes = plan.blocks_per_stage or _sizes(config, plan.num_stages)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


@cache
def _sizes(config: ModelConfig, number: int) -> tuple[int, ...]:
    balanced = None if number == 1 else seams.ask("stage_cuts", lambda cut: cut(config, number))
    layers = config.num_layers
    return balanced or tuple((at + 1) * layers // number - at * layers // number for at in range(number))


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
