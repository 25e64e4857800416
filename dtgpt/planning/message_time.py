"""The time of a plan's messages, and what of it is not hidden behind operations."""

import math

from dtgpt.config.execution import Settings
from dtgpt.parallel.collectives import GPUS_OF_HOST
from dtgpt.planning.gpus import Rates
from dtgpt.planning.parameters import LocalParameter
from dtgpt.planning.traffic import MATRICES_TRAVEL, Collective
from dtgpt.planning.work import START

LATENCY = 10e-6  # seconds of a message by copy engines within a host, with its flag; not measured apart
NETWORK_LATENCY, HOP = 20e-6, 5e-6  # seconds of one between hosts, and of each further host of a ring; not measured
# What messages that are hidden cost all the same, as a part of their time; plans.md. Copy engines within a host take
# power: dp2 of the 345M costs 2.5 to 3.6 ms for 1.9 ms of copies. NCCL's kernels take multiprocessors: 7.0 ms more of
# other kernels beside 14.7 ms of NCCL's within a host, which is taken for those between hosts, too.
BESIDE, BESIDE_NETWORK = 1.2, 0.45
COPIED = {"zero": 20, "replicas": 7}  # bytes moved for each gradient beside its messages: plans.md, 2.7 and 0.58 ms


def message_seconds(c: Collective, settings: Settings, rates: Rates) -> float:
    """Return the seconds of all messages of a kind, one after the other, as rings and copy engines send them. Ranks of
    a host reach each other by NVLink; of a group over several hosts, those of a host share its network adapters."""
    plan = settings.plan
    stride = {"tp": 1, "cp": plan.tp, "dp": plan.tp, "pp": plan.ranks_of_stage}[c.over]
    ranks = {"tp": plan.tp, "cp": plan.cp, "dp": plan.data_ranks, "pp": 2}[c.over]
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
