"""What the ranks of a plan send each other in one optimizer step, and how long a pipeline idles."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtgpt.model import TABLE
from dtgpt.parallel.cost import gradient_width, narrow, parameters_of
from dtgpt.parallel.mesh import Place
from dtgpt.parallel.pipeline import block_ranges
from dtgpt.parallel.plan import Plan
from dtgpt.parallel.tensor import make_table, style_of
from dtgpt.recipe import Recipe

MATRICES = ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")


@dataclass(frozen=True)
class Collective:
    """One kind of message of one rank in a step."""

    kind: str  # all-gather, reduce-scatter, all-reduce, send
    over: str  # the ranks that take part: dp, tp, pp
    what: str
    count: int
    bytes: int  # of all `count` together: of the whole tensor that is gathered, reduced or sent


def collectives_of(recipe: Recipe, plan: Plan, rank: int, dtype: torch.dtype) -> list[Collective]:
    """Of `rank` in one step. Single numbers (the norm, a request to stop) stay out."""
    place, ranges = Place(plan, rank), block_ranges(recipe.model, plan)
    blocks = [index for stage in place.stages for index in ranges[stage]]
    found = _over_tp(recipe, plan, place, blocks, dtype) + _over_dp(recipe, plan, rank, len(blocks), dtype)
    return [c for c in found + _over_pp(recipe, plan, rank, dtype) if c.count]


def _over_tp(recipe: Recipe, plan: Plan, place: Place, blocks: list[int], dtype: torch.dtype) -> list[Collective]:
    if plan.tp == 1:
        return []
    config, passes = recipe.model, recipe.micro_batches(plan.dp)
    tokens = recipe.micro_batch_size * config.seq_length
    unit = dtype.itemsize * tokens * config.hidden_size
    first, last = place.holds_first, place.holds_last
    loss = "loss: maximum, sum and target of each row"
    found = [Collective("all-reduce", "tp", loss, 2 * passes * last, 12 * passes * tokens * last)]
    # A matrix cut by rows sums what it puts out, in forward; one cut by columns the gradient of what it takes in.
    table = make_table(config, plan)
    rows = sum(isinstance(style_of(f"blocks.{i}.{m}", table), RowwiseParallel) for i in blocks for m in MATRICES)
    columns = sum(isinstance(style_of(f"blocks.{i}.{m}", table), ColwiseParallel) for i in blocks for m in MATRICES)
    if plan.sequence_parallel:
        n = passes * (rows + columns + first + last)
        into, out = "activations into each matrix pair, and gradients", "activations out of each, and gradients"
        found.append(Collective("all-gather", "tp", into, n, n * unit))
        found.append(Collective("reduce-scatter", "tp", out, n, n * unit))
        found.append(_shared_gradients(recipe, plan, place, len(blocks)))
    else:
        n = passes * (rows + columns + last)
        found.append(Collective("all-reduce", "tp", "activations of each matrix pair, and gradients", n, n * unit))
        found.append(Collective("all-reduce", "tp", "token embeddings", passes * first, passes * first * unit))
    return found


def _shared_gradients(recipe: Recipe, plan: Plan, place: Place, blocks: int) -> Collective:
    """Under sequence parallelism a rank sees its part of the sequence, so that gradients of LayerNorms, of biases added
    there and of positions are summed over tp, together at the end of a step. ZeRO has cut them before."""
    config = recipe.model
    first, last = place.holds_first, place.holds_last
    vectors = 6 * blocks + 2 * last
    size = 4 * config.hidden_size * (vectors + config.seq_length * first) // plan.shard
    return Collective("all-reduce", "tp", "gradients of LayerNorms, biases and positions, fp32", 1, size)


def _over_dp(recipe: Recipe, plan: Plan, rank: int, blocks: int, dtype: torch.dtype) -> list[Collective]:
    if plan.dp == 1:
        return []
    held, passes = parameters_of(recipe.model, plan, rank), recipe.micro_batches(plan.dp)
    ends = sum(stage in (0, plan.num_stages - 1) for stage in Place(plan, rank).stages)
    groups = blocks + ends  # each block, and what is around the blocks of a stage
    whole = sum(p.by_tp for p in held)
    if plan.zero == 0 and not narrow(plan, dtype.itemsize):
        return [Collective("all-reduce", "dp", "gradients, fp32", groups, 4 * whole)]
    if plan.zero == 0:
        size = dtype.itemsize * whole
        return [
            Collective("all-to-all", "dp", "gradients, pieces to sum", groups, size),
            Collective("all-gather", "dp", "gradients, the sums", groups, size),
        ]
    weights = dtype.itemsize * whole
    fetches = 2 * passes if plan.zero == 3 and plan.pp == 1 else 1
    reductions = passes if plan.zero >= 2 and plan.pp == 1 else 1
    return [
        Collective("all-gather", "dp", "weights", groups * fetches, weights * fetches),
        Collective("reduce-scatter", "dp", "gradients, fp32", groups * reductions, 4 * whole * reductions),
    ]


def _over_pp(recipe: Recipe, plan: Plan, rank: int, dtype: torch.dtype) -> list[Collective]:
    if plan.pp == 1:
        return []
    config, passes, place = recipe.model, recipe.micro_batches(plan.dp), Place(plan, rank)
    edge = dtype.itemsize * recipe.micro_batch_size * config.seq_length * config.hidden_size
    edge //= plan.tp if plan.sequence_parallel else 1
    # Activations on, gradients back.
    sends = sum((place.goes_to(s) is not None) + (place.comes_from(s) is not None) for s in place.stages)
    found = [Collective("send", "pp", "activations and gradients", sends * passes, sends * passes * edge)]
    tables = [p for p in parameters_of(config, plan, rank) if p.name == TABLE]
    if plan.stage_rank(plan.num_stages - 1) != 0 and tables:
        size = gradient_width(plan, passes, dtype.itemsize) * tables[0].local
        found.append(Collective("all-reduce", "pp", "gradient of the tied table", 1, size))
    return found


def bubble(plan: Plan, micro_batches: int) -> float | None:
    """Share of a step in which a pipeline rank has nothing to do, with stages of equal time (Narayanan et al. 2021,
    section 2.2). ZBVZeroBubble has none with 2 pp - 1 micro-batches or more, where forward, backward for inputs and
    backward for weights take the same time (Qi et al. 2024, section 6); None with fewer, which nobody has told."""
    idle = plan.pp - 1
    if plan.schedule == "ZBVZeroBubble":
        return 0.0 if micro_batches >= 2 * plan.pp - 1 else None
    return idle / (plan.stages_of_rank * micro_batches + idle)
