"""In which order the ranks of a pipeline compute, as torch's schedules say, and what that order alone guarantees."""

from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from dtgpt.config.plan import ResolvedPlan

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
Pass = tuple[str, int, int]  # F, B or W (the half of backward for weights); stage; micro-batch


def order_of_rank(plan: ResolvedPlan, micro_batches: int, rank: int) -> list[Pass]:
    """What a pipeline rank computes in turn."""
    if plan.schedule == "GPipe":
        return [(kind, rank, index) for kind in "FB" for index in range(micro_batches)]
    if plan.schedule == "1F1B":
        ahead = min(micro_batches, plan.pp - rank)
        passes: list[Pass] = [("F", rank, index) for index in range(ahead)]
        for index in range(micro_batches):
            passes.append(("B", rank, index))
            passes += [("F", rank, index + ahead)] if index + ahead < micro_batches else []
        return passes
    schedule: Any = ScheduleZBVZeroBubble if plan.schedule == "ZBVZeroBubble" else ScheduleInterleaved1F1B
    rounds = max(1, micro_batches // plan.pp)
    shape = SimpleNamespace(
        pp_group_size=plan.pp, _n_microbatches=micro_batches, num_stages=plan.num_stages, _num_stages=plan.num_stages,
        n_local_stages=plan.stages_of_rank, number_of_rounds=rounds, microbatches_per_round=micro_batches // rounds,
        rank=rank,
    )  # fmt: skip
    actions = schedule._calculate_single_rank_operations(cast(Any, shape), rank)
    return [(KINDS[each.computation_type.name], each.stage_index, each.microbatch_index) for each in actions if each]


def least_places(plan: ResolvedPlan, micro_batches: int) -> int:
    """The fewest places of an edge with which each message is sent after its receiver has used the one before it in the
    same place for the last time, whatever time passes take: by what a rank computed before, and what came with messages
    of others."""
    orders = [order_of_rank(plan, micro_batches, rank) for rank in range(plan.pp)]
    at = {each: (rank, index) for rank, order in enumerate(orders) for index, each in enumerate(order)}
    known: dict[Pass, list[int]] = {}  # how many passes of each rank have surely ended after this one
    now, done = [[0] * plan.pp for _ in orders], [0] * plan.pp
    while len(known) < len(at):
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                kind, stage, index = order[done[rank]]
                source = (kind, stage - 1 if kind == "F" else stage + 1, index)
                if kind != "W" and source in at and source not in known:
                    break
                if kind != "W" and source in at:
                    now[rank] = list(map(max, now[rank], known[source]))
                done[rank] += 1
                now[rank][rank] = done[rank]
                known[kind, stage, index] = list(now[rank])
    most = 1
    for (kind, stage, index), ended in known.items():
        receiver = {"F": stage + 1, "B": stage - 1, "W": -1}[kind]
        if not 0 <= receiver < plan.num_stages or plan.stage_rank(receiver) == plan.stage_rank(stage):
            continue
        last = "W" if ("W", receiver, 0) in at else "B"
        uses = [at[last, receiver, earlier] for earlier in range(index)]
        free = next((i for i, (rank, place) in enumerate(uses) if ended[rank] <= place), index)
        most = max(most, index - free + 1)
    return most
