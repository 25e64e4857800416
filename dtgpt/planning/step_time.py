"""The time of a training step, without a GPU: the operations of each rank, its messages and what of them is hidden, the
idle time of a pipeline, the optimizer, and the host."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtgpt.config.execution import Settings
from dtgpt.config.plan import GPUS_OF_HOST
from dtgpt.models.inventory import inventory
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.gpus import Rates
from dtgpt.planning.operation_time import START, Operations, Passes, Work
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.parameters import LocalParameter, Rank, blocks_again
from dtgpt.planning.sums import costs_of
from dtgpt.planning.traffic import MATRICES_TRAVEL, Collective, collectives_of, ranks_over
from dtgpt.posttrain.demands import slots_of

LATENCY = 10e-6  # seconds of a message by copy engines within a host, with its flag; not measured apart
NETWORK_LATENCY, HOP = 20e-6, 5e-6  # seconds of one between hosts, and of each further host of a ring; not measured
# What messages that are hidden cost all the same, as a part of their time; plans.md. Copy engines within a host take
# power: dp2 of the 345M costs 2.5 to 3.6 ms for 1.9 ms of copies. NCCL's kernels take multiprocessors: 7.0 ms more of
# other kernels beside 14.7 ms of NCCL's within a host, which is taken for those between hosts, too.
BESIDE, BESIDE_NETWORK = 1.2, 0.45
COPIED = {"zero": 20, "replicas": 7}  # bytes moved for each gradient beside its messages: plans.md, 2.7 and 0.58 ms
# Seconds of the host for each block and micro-batch without CUDA graphs: notes/plans.md, uncaptured steps of the 345M;
# compiled blocks steps.md.
HOST = {"compiled": 3.4e-3, "plain": 4.3e-3, "zero": 10.6e-3, "tp": 14.4e-3, "pp": 6.5e-3}
WHOLE_REACHES = 0.4  # of the rate of products, in an update of whole matrices: docs/benchmarks.md, 28 ms of the 345M


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on, on the rank that decides."""

    work: Work  # operations of all micro-batches, without what is computed again
    again: float  # recomputation
    optimizer: float  # update and norm of the gradient
    messages: dict[str, float]  # over cp, ep, tp, dp and pp: what is not hidden
    bubble: float  # the rank waits for other stages
    host: float  # the GPU waits for the host

    @property
    def total(self) -> float:
        return self.work.total + self.again + self.optimizer + sum(self.messages.values()) + self.bubble + self.host


def step_time(settings: Settings, rates: Rates) -> StepTime:
    """Return the time of a training step."""
    plan, passes, stages = settings.plan, settings.micro_batches, _Stages(settings, rates)
    sent = {pp: collectives_of(settings, pp * plan.ranks_of_stage) for pp in stages.examples}
    inside = {pp: seconds_over(("tp", "cp", "ep"), sent[pp], settings, rates) / passes for pp in sent}
    micro = [stages.seconds(pp) + inside[stages.like(pp)] for pp in range(plan.pp)]
    slowest = micro.index(max(micro))
    example = stages.like(slowest)
    trained = Rank(settings, example * plan.ranks_of_stage).trained
    messages = {over: seconds_over((over,), sent[example], settings, rates) for over in ("cp", "ep", "tp", "pp")}
    messages["dp"] = over_replicas(sent[example], settings, rates, stages.passes(slowest), trained)
    one, again = stages.work(slowest)
    summed = 10 * sum(p.by_tp for p in trained) / rates.memory  # gradients of a micro-batch added, in fp32
    work = one * passes + Work(pointwise=summed * (passes - 1))
    bubble, update = idle_time(settings, micro), update_time(settings, rates, trained)
    busy = work.total + again * passes + sum(messages.values()) + bubble + update
    blocks = stages.blocks(slowest) * passes
    host = (
        max(0.0, blocks * host_time(settings) - busy) if settings.device.type == "cuda" and not settings.graphs else 0.0
    )
    return StepTime(
        work=work,
        again=again * passes,
        optimizer=update,
        messages=messages,
        bubble=bubble,
        host=host,
    )


def message_seconds(c: Collective, settings: Settings, rates: Rates) -> float:
    """Return the seconds of all messages of a kind, one after the other, as rings and copy engines send them. Ranks of
    a host reach each other by NVLink; of a group over several hosts, those of a host share its network adapters."""
    plan = settings.plan
    stride = {"tp": 1, "pp": plan.ranks_of_stage}.get(c.over, plan.tp * c.apart)
    ranks = ranks_over(c, plan)
    share = 1.0 if c.kind == "send" else (ranks - 1) / ranks * (2 if c.kind == "all-reduce" else 1)
    if stride * (2 if c.over == "pp" else ranks) <= GPUS_OF_HOST:
        if c.over == "tp":
            return c.count * START + share * c.bytes / rates.link_kernels
        return c.count * LATENCY + share * c.bytes / rates.link
    beside = max(1, GPUS_OF_HOST // stride) if c.over != "pp" else 1  # ranks of the group in one host
    hosts = math.ceil(ranks / beside)
    latency = NETWORK_LATENCY + HOP * (math.log2(hosts) if c.kind in ("all-reduce", "send") else hosts - 1)
    return c.count * latency + share * c.bytes / min(rates.link_kernels, beside * rates.network)


def seconds_over(axes: tuple[str, ...], sent: list[Collective], settings: Settings, rates: Rates) -> float:
    """Return the seconds of the messages over some axes, without those of the optimizer."""
    return sum(message_seconds(c, settings, rates) for c in sent if c.over in axes and c.what != MATRICES_TRAVEL)


def over_replicas(
    sent: list[Collective], settings: Settings, rates: Rates, micro: tuple[float, float], trained: list[LocalParameter]
) -> float:
    """Return the seconds that weights and gradients between replicas cost: what is not hidden, what hidden messages
    take from the operations beside them, and copies. micro: seconds of a micro-batch's forward and backward pass."""
    plan, passes = settings.plan, settings.micro_batches
    over = [c for c in sent if c.over == "dp" and c.what != MATRICES_TRAVEL]
    travels = sum(message_seconds(c, settings, rates) for c in sent if c.what == MATRICES_TRAVEL)
    if not over:
        return travels
    seconds = sum(message_seconds(c, settings, rates) for c in over)
    forward, backward = micro
    hideable = backward  # of the last micro-batch
    if plan.pp > 1:  # torch sums all micro-batches before ZeRO cuts
        hideable = 0.0 if plan.zero else backward
    elif plan.zero == 3:
        hideable = passes * (forward + backward)
    elif plan.zero:
        hideable = forward + backward * (passes if plan.zero == 2 else 1)
    whole = sum(p.by_tp for p in trained)
    last = sum(p.by_tp for p in trained if p.block is None) / max(1, whole) / (passes if plan.zero >= 2 else 1)
    hidden = min(hideable, seconds * (1 - last / 2))
    inside = plan.tp * plan.data_ranks <= GPUS_OF_HOST
    reductions = passes if plan.zero >= 2 and plan.pp == 1 else 1
    copied = COPIED["zero" if plan.zero else "replicas"] * whole * reductions / rates.memory
    return seconds - hidden + (BESIDE if inside else BESIDE_NETWORK) * hidden + copied + travels


def left_out(settings: Settings) -> list[str]:
    """Return a line on what times of a step leave out; [] where that is nothing."""
    return ["without the time in which answers are drawn and rewarded"] if slots_of(settings) else []


def host_time(settings: Settings) -> float:
    """Return the seconds in which the host launches a block, forward and backward, without CUDA graphs."""
    plan = settings.plan
    parts = [HOST["compiled" if settings.compile else "plain"]]
    parts += [HOST["tp"]] * (plan.tp > 1) + [HOST["zero"]] * (plan.zero > 0) + [HOST["pp"]] * (plan.pp > 1)
    return max(parts)


def update_time(settings: Settings, rates: Rates, trained: list[LocalParameter]) -> float:
    """Return the seconds of the gradient's norm and the update of the weights: each reads and writes its state and the
    fp32 weights once. Products of whole matrices are spread over the ranks of a stage."""
    optimizer = settings.optimizer
    if optimizer is None:
        return 0.0
    copies = settings.dtype.itemsize if settings.low_precision else 0
    width = costs_of(settings).width
    costs = OptimizerCosts(optimizer)
    moved = sum(p.local * (2 * costs.state_bytes(p.shape, p.role) + 8 + copies + 2 * width) for p in trained)
    flops = sum(costs.whole_flops(p.shape, p.role) for p in trained) / settings.plan.ranks_of_stage
    return 4 * START + moved / rates.memory + flops / (WHOLE_REACHES * rates.products)


def idle_time(settings: Settings, micro: Iterable[float]) -> float:
    """Return the seconds in which the slowest pipeline rank waits. micro: seconds of a micro-batch on each rank. With n
    micro-batches, 1F1B and GPipe take n - 1 times the slowest rank and each rank once; v stages a rank wait 1 / v of
    that (Narayanan et al. 2021, section 2.2), ZBV's none with 2 pp - 1 micro-batches or more (Qi et al. 2024)."""
    plan, seconds = settings.plan, list(micro)
    others = sum(seconds) - max(seconds)
    if plan.schedule == "ZBVZeroBubble":
        return others * max(0.0, 1 - settings.micro_batches / (2 * plan.pp - 1))
    return others / plan.stages_of_rank


def compute_time(settings: Settings, rates: Rates) -> float:
    """Return the seconds of a step's operations and its bubble, without messages and optimizer: less than the step."""
    stages = _Stages(settings, rates)
    micro = [stages.seconds(pp) for pp in range(settings.plan.pp)]
    return settings.micro_batches * max(micro) + idle_time(settings, micro)


class _Stages:
    """The operations of each pipeline rank for one micro-batch."""

    def __init__(self, settings: Settings, rates: Rates):
        plan, parts = settings.plan, inventory(settings.model)
        operations = Operations(settings, rates)
        repeated = blocks_again(settings)
        kinds = [(example, block in repeated) for block, example in enumerate(parts.examples)]
        blocks = {kind: operations.block(*kind) for kind in dict.fromkeys(kinds)}
        ranges = block_ranges(settings.model, plan)
        self._of_rank: list[list[tuple[int, Passes]]] = []
        self._ends: list[int] = []
        for pp in range(plan.pp):
            counts: dict[tuple[int, bool], int] = {}
            stages = [stage for stage in range(plan.num_stages) if plan.stage_rank(stage) == pp]
            for stage in stages:
                for index in ranges[stage]:
                    counts[kinds[index]] = counts.get(kinds[index], 0) + 1
            found = [(count, blocks[kind]) for kind, count in counts.items()]
            found += [(1, operations.embedding())] * (0 in stages)
            found += [(1, operations.head())] * (plan.num_stages - 1 in stages)
            self._of_rank.append(found)
            self._ends.append(len(found) - len(counts))
        self.examples = sorted({0, plan.pp // 2, plan.pp - 1})

    def like(self, pp: int) -> int:
        """Return the rank in `examples` that sends as this one does."""
        return pp if pp in self.examples else self.examples[1]

    def seconds(self, pp: int) -> float:
        return sum(count * part.total for count, part in self._of_rank[pp])

    def passes(self, pp: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass."""
        forward = sum(count * part.forward.total for count, part in self._of_rank[pp])
        return forward, self.seconds(pp) - forward

    def blocks(self, pp: int) -> int:
        return sum(count for count, _ in self._of_rank[pp]) - self._ends[pp]

    def work(self, pp: int) -> tuple[Work, float]:
        """Return the work of a micro-batch, and the seconds of what is computed again."""
        total, again = Work(), 0.0
        for count, part in self._of_rank[pp]:
            total, again = total + (part.forward + part.backward) * count, again + count * part.again.total
        return total, again
