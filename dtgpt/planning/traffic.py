"""The messages between the ranks of a plan in one optimizer step, and the idle time of a pipeline."""

import math
from dataclasses import replace

from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.models.inventory import inventory
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.roles import INNER, Role
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.context_parallel.degrees import ranks_of_queries
from dtgpt.parallel.expert_parallel.gathered import most_rows
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.layout import INPUTS, OUTPUTS, degrees_of_heads
from dtgpt.parallel.recompute.rules import repeats_blocks
from dtgpt.parallel.shared_memory.edges import edges_of
from dtgpt.planning.activations import residual_bytes, whole_bytes
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.parameters import LocalParameter, Rank, blocks_again
from dtgpt.planning.sums import Collective
from dtgpt.posttrain.demands import rows_of
from dtgpt.posttrain.lora.adapters import cut_from_the_end
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.posttrain.lora.four_bits import held_bytes

MATRICES_TRAVEL = "matrices to the ranks that update them, and back"


def sent_bytes(settings: Settings, rank: int) -> dict[str, float]:
    """Return the bytes that `rank` sends in one step over cp, ep, tp, dp and pp, by ring algorithms (Patarasuk and Yuan
    2009): of k ranks, each sends (k - 1) / k of a tensor to gather, scatter or exchange it, and twice that to
    all-reduce it."""
    total = dict.fromkeys(("cp", "ep", "tp", "dp", "pp"), 0.0)
    for c in collectives_of(settings, rank):
        ranks = ranks_over(c, settings.plan)
        fraction = 1.0 if c.kind == "send" else (ranks - 1) / ranks * (2 if c.kind == "all-reduce" else 1)
        total[c.over] += fraction * c.bytes
    return total


def ranks_over(c: Collective, plan: Plan) -> int:
    """Return how many ranks take part in a message."""
    return {"cp": plan.cp, "ep": plan.ep, "tp": plan.tp, "dp": plan.data_ranks // c.apart, "pp": 2}[c.over]


def collectives_of(settings: Settings, rank: int) -> list[Collective]:
    """Return the messages of `rank` in one step. Single numbers (the norm, a request to stop) stay out."""
    here = Rank(settings, rank)
    found = _over_cp(here) + _over_ep(here) + _over_tp(here) + _over_dp(here) + _over_pp(here) + _of_optimizer(here)
    return [c for c in found if c.count]


def _over_cp(here: Rank) -> list[Collective]:
    """Return the exchange of tokens for heads before each attention core, of q, k and v, and back after it. Where ranks
    have the same heads, each gets their keys and values, by a message of its own."""
    settings, plan, config = here.settings, here.settings.plan, here.settings.model
    if plan.cp == 1:
        return []
    repeated = repeated_blocks(settings)
    degrees, copies = degrees_of_heads(config, plan), ranks_of_queries(plan, config)
    tokens = settings.micro_batch_size * settings.local_length
    count, size = 0, 0
    for block in here.blocks:
        passes = settings.micro_batches * (3 if block in repeated else 2)  # forward, again, backward
        for core in inventory(config).cores(block):
            columns = 2 * (config.num_heads + copies * core.kv_heads) * core.head_dim // degrees[block]
            count += passes * (2 if copies == 1 else 3)
            size += passes * settings.dtype.itemsize * tokens * columns
    return [Collective("all-to-all", "cp", "queries, keys, values and outputs of attention", count, size)]


def _over_ep(here: Rank) -> list[Collective]:
    """Return what ranks send each other that hold other experts, and its gradients. Within a host tokens and choices
    are gathered, and sums come back, or a row of each slot; between hosts rows go there and back."""
    settings, plan, config = here.settings, here.settings.plan, here.settings.model
    if plan.ep == 1 or not isinstance(config, ExpertsConfig):
        return []
    repeated, passes = repeated_blocks(settings), settings.micro_batches
    mixtures = [block for block in here.blocks if config.has_experts(block)]
    forward = sum(passes * (2 if block in repeated else 1) for block in mixtures)
    backward, slots, one = passes * len(mixtures), config.experts_per_token, whole_bytes(settings)
    if plan.asks_host:
        count = 2 * (forward + backward)
        what = f"rows of experts, at even loads; a rank gets up to {plan.ep} times as many"
        return [Collective("all-to-all", "ep", what, count, count * slots * one)]
    taken = rows_of(settings)
    chosen = taken.number * taken.length * slots
    wide, apart = max(4, settings.dtype.itemsize), choose_sums(settings).orderless
    weights = (backward if apart else forward) * chosen * wide
    tokens = plan.ep * ((forward + backward) * one + forward * 8 * chosen + weights)
    count = 2 * (forward + backward) if apart else 3 * forward + backward
    gathers = Collective("all-gather", "ep", "tokens, choices and gradients", count, tokens)
    if apart:
        returned = (forward + backward) * most_rows(slots, config.num_experts // plan.ep) * one
        size = plan.ep * (returned + weights)
        return [gathers, Collective("all-to-all", "ep", "rows of experts", forward + 2 * backward, size)]
    if not (config.dropout or config.shared_size):
        forward = backward  # recomputation of a block ends before the sums
    returned = (forward + backward) * one * wide // settings.dtype.itemsize
    size = plan.ep * (returned + backward * chosen * wide)
    return [gathers, Collective("reduce-scatter", "ep", "sums of rows of experts", forward + 2 * backward, size)]


def _over_tp(here: Rank) -> list[Collective]:
    settings, plan, passes = here.settings, here.settings.plan, here.settings.micro_batches
    if plan.tp == 1:
        return []
    from dtgpt.parallel.tensor import Columnwise, DeferredBiasRowwise  # half a second to import: DTensor

    tokens = rows_of(settings).number * rows_of(settings).length
    unit = whole_bytes(settings)
    first, last = here.place.holds_first, here.place.holds_last
    loss = "loss: maximum, sum and target of each row"
    found = [Collective("all-reduce", "tp", loss, 2 * passes * last, 12 * passes * tokens * last)]
    # A matrix cut by rows sums its output, in forward; one cut by columns the gradient of its input, in backward.
    weights = [p for p in here.parameters if p.block is not None and p.name.endswith(".weight")]
    columns, rows = (len(_cut(weights, dim)) for dim in (OUTPUTS, INPUTS))
    into_again, out_again = _recomputed(settings, weights)
    if plan.sequence_parallel:
        n = passes * (columns + rows + first + last)
        into, out = "activations into each matrix pair, and gradients", "activations out of each, and gradients"
        gathers, scatters = n + passes * into_again, n + passes * out_again
        # In fp8, matrices send their input, and the gradient of their output, in 8 bits.
        sends_8 = settings.products == FP8 and not plan.splits_backward
        own = [p for p in weights if sends_8 and isinstance(p.layout.style, Columnwise | DeferredBiasRowwise)]
        narrow = passes * (len(own) + _recomputed(settings, own)[0])
        spared = narrow * (unit - unit // settings.dtype.itemsize)
        found.append(Collective("all-gather", "tp", into, gathers, gathers * unit - spared))
        found.append(Collective("reduce-scatter", "tp", out, scatters, scatters * unit))
    else:
        n = passes * (columns + rows + last + out_again)
        found.append(Collective("all-reduce", "tp", "activations of each matrix pair, and gradients", n, n * unit))
        found.append(Collective("all-reduce", "tp", "token embeddings", passes * first, passes * first * unit))
    repeated = repeated_blocks(settings)
    joint = passes * sum(3 if p.block in repeated else 2 for p in here.parameters if p.role is Role.JOINT_NORM)
    found.append(Collective("all-reduce", "tp", "mean squares of all heads, fp32", joint, 4 * joint * tokens))
    found = here.sums.over_tp(found, here)
    # Of parameters that every rank holds and that see a part of the sequence or of the heads. ZeRO has cut them before.
    partial = here.sums.addends_over_tp(here.trained)  # of adapters those that are whole on every rank
    what, width, words = _kinds(partial), here.sums.total.itemsize, here.sums.words
    if settings.freezes_weights:
        what, width, words = "adapters", 4, "fp32"
    size = width * sum(p.local for p in partial)
    return [*found, Collective("all-reduce", "tp", f"gradients of {what}, {words}", bool(partial), size)]


def repeated_blocks(settings: Settings) -> set[int]:
    """Return the blocks whose messages are sent again in backward: attention alone is repeated within a rank."""
    return blocks_again(settings) if repeats_blocks(settings) else set()


def _recomputed(settings: Settings, weights: list[LocalParameter]) -> tuple[int, int]:
    """Return how many of the matrices cut by columns and by rows run forward again in a micro-batch. Recomputation of a
    block ends with the last tensor that backward needs: without dropout, and without a norm after its last matrix,
    before the output of that one."""
    repeated = repeated_blocks(settings)
    weights = [p for p in weights if p.block in repeated]
    last = {p.block: p for p in weights if p.role is not Role.ROUTER}  # in the order of modules, but for a shared gate
    ends = _cut(list(last.values()), INPUTS) if settings.model.dropout == 0 else []
    return len(_cut(weights, OUTPUTS)), len(_cut(weights, INPUTS)) - len(ends)


def _cut(weights: list[LocalParameter], dim: int) -> list[LocalParameter]:
    """Return the matrices that tensor parallelism cuts by their OUTPUTS or INPUTS; of those within a branch, which have
    one input and one sum, the last stands for all."""
    cut = (p for p in weights if cut_from_the_end(p.layout, "tp") == dim)
    return list({p.block if p.role in INNER else p.name: p for p in cut}.values())


def _kinds(partial: list[LocalParameter]) -> str:
    """Return what the parameters are, in words."""
    roles = {p.role for p in partial}
    words = ["norms"] * (Role.NORM in roles) or ["the norms of heads"] * (Role.HEAD_NORM in roles)
    words += ["biases"] * any(p.name.endswith(".bias") and p.role not in (Role.NORM, Role.ROUTER) for p in partial)
    words += ["positions"] * (Role.POSITIONS in roles) + ["routers"] * (Role.ROUTER in roles)
    *first, last = words or [""]
    return " and ".join(filter(None, [", ".join(first), last]))


def _over_dp(here: Rank) -> list[Collective]:
    """Return the messages between ranks that hold the same parameters, or ZeRO's parts of them."""
    by_distance = sorted({p.apart for p in here.parameters})
    return [
        replace(c, apart=apart, what=c.what if apart == 1 else f"{c.what}, of experts")
        for apart in by_distance
        if here.settings.plan.data_ranks > apart
        for c in _of_replicas(here, apart)
    ]


def _of_replicas(here: Rank, apart: int) -> list[Collective]:
    """Return the messages of the parameters that every `apart`-th rank of data holds."""
    settings, plan, passes = here.settings, here.settings.plan, here.settings.micro_batches
    parameters, trained = ([p for p in own if p.apart == apart] for own in (here.parameters, here.trained))
    ends = sum(stage in (0, plan.num_stages - 1) for stage in here.place.stages)
    ends = 0 if apart > 1 or (settings.freezes_weights and plan.zero == 0) else ends  # where nothing is trained
    blocks = len({p.block for p in parameters if p.block is not None})
    groups = blocks + ends  # each block, and the rest of a stage
    sums = here.sums.messages(trained, groups)
    if plan.zero == 0:
        return sums
    gathered = [*parameters, *trained] if settings.freezes_weights else parameters
    lora, width = settings.section(LoraConfig), settings.dtype.itemsize
    sizes = [(p.block, round(held_bytes(p, lora, p.by_tp, width))) for p in gathered]
    in_blocks = sum(size for block, size in sizes if block is not None)
    once, again = (passes, passes) if plan.reshards else (1, 0)  # again: blocks, in backward
    size = sum(size for _, size in sizes) * once + in_blocks * again
    return [Collective("all-gather", "dp", "weights", groups * once + blocks * again, size), *sums]


def _of_optimizer(here: Rank) -> list[Collective]:
    """Return what the ranks of a stage send on average where the optimizer needs whole matrices: each matrix to its
    owner, from one rank for each part, and back to all that hold it."""
    settings, plan, optimizer = here.settings, here.settings.plan, here.settings.optimizer
    ranks = plan.ranks_of_stage
    if optimizer is None or ranks == 1:
        return []
    costs = OptimizerCosts(optimizer)
    matrices = [p for p in here.trained if costs.needs_whole(p.shape, p.role)]
    size = 0.0
    for p in matrices:
        replicas = p.layout.axes["replicate"]
        size += settings.dtype.itemsize * math.prod(p.shape) * (1 + replicas - 2 * replicas / ranks) / ranks
    return [Collective("send", "dp" if plan.data_ranks > 1 else "tp", MATRICES_TRAVEL, len(matrices), round(size))]


def _over_pp(here: Rank) -> list[Collective]:
    settings, plan, config = here.settings, here.settings.plan, here.settings.model
    if plan.pp == 1:
        return []
    # Activations on, gradients back.
    sends = len(edges_of(here.place)) * settings.micro_batches
    found = [Collective("send", "pp", "activations and gradients", sends, round(sends * residual_bytes(settings)))]
    tables = [p for p in here.trained if config.tied and p.role in (Role.VOCABULARY, Role.OUTPUT)]
    if plan.stage_rank(plan.num_stages - 1) != 0 and tables:
        size = here.sums.total_width * tables[0].local
        found.append(Collective("all-reduce", "pp", "gradient of the tied table", 1, size))
    return found


def bubble(plan: Plan, micro_batches: int) -> float | None:
    """Return the fraction of a step in which a pipeline rank is idle, with stages of equal time (Narayanan et al. 2021,
    section 2.2). ZBVZeroBubble has none with 2 pp - 1 micro-batches or more, where forward, backward for inputs and
    backward for weights take the same time (Qi et al. 2024, section 6); None with fewer, for which no formula is known.
    """
    idle = plan.pp - 1
    if plan.schedule == "ZBVZeroBubble":
        return 0.0 if micro_batches >= 2 * plan.pp - 1 else None
    return idle / (plan.stages_of_rank * micro_batches + idle)
