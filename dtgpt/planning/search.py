"""The search for the fastest plan that fits: degrees, ZeRO, schedule, micro-batch size and recomputation."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from dtgpt.config.execution import Recompute, Settings
from dtgpt.config.plan import GPUS_OF_HOST, ResolvedPlan, Schedule, divisors
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.parallel.recompute.rules import repeats_blocks
from dtgpt.planning.activations import residual_bytes
from dtgpt.planning.gpus import Gpu, Rates
from dtgpt.planning.memory import Memory, fullest, memory_of
from dtgpt.planning.step_time import StepTime, compute_time, step_time
from dtgpt.planning.what_fits import MOST_CP, fits_into, spreads, with_fewest_blocks
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

MOST_MICRO = 64  # samples of a micro-batch
MOST_STAGES = 8  # of a rank
LISTED = 8  # plans
EVALUATED = 4000  # candidates whose messages and memory are counted, the fastest by their operations
Make = Callable[[ResolvedPlan, int, Recompute], Settings]  # of a plan, a micro-batch size and what is computed again


class TooLarge(UserError):
    """Plans run, but none fits into the memory of a GPU."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What plans are looked for."""

    model: ModelConfig
    world: int
    samples: int  # of a step
    seq_length: int
    recomputes: list[Recompute]  # what may be computed again
    make: Make  # returns the settings of a candidate, or raises UserError where it cannot run


@dataclass(frozen=True)
class Candidate:
    """A plan with what was chosen for it. `time`: without messages where it does not fit."""

    settings: Settings
    memory: Memory
    seconds: float
    time: StepTime | None = None  # None: it does not fit

    @property
    def order(self) -> tuple[float, int, str, int]:
        """What candidates are sorted by, on every rank the same."""
        own = self.settings
        return self.seconds, get_args(Recompute).index(own.recompute), own.plan.name, own.micro_batch_size


@dataclass(frozen=True)
class Ranking:
    """What a search found."""

    fitting: list[Candidate]  # the fastest first, of each division into dp, cp, ep, tp, pp and ZeRO the fastest
    too_large: list[Candidate]  # that would be faster than the first of these, by their operations alone

    @property
    def best(self) -> Candidate:
        return self.fitting[0]


def rank_plans(search: Search, gpu: Gpu, most: int = LISTED) -> Ranking:
    """Return the plans by the time of a step, the `most` fastest that fit into the GPU.

    The time of the operations alone is a lower bound of a step's, so that the search ends where no candidate that is
    left can be among the first. Plans that cut samples (cp) are looked at only where no other fits. Raises TooLarge
    where nothing fits, and UserError where nothing can run.
    """
    assert gpu.rates is not None
    smallest, reason, large = float("inf"), "", False
    for cuts_samples in (False, True):
        queue, refused, dropped = _candidates(search, gpu.rates, gpu.size, cuts_samples)
        large = large or dropped or bool(queue)
        ranking, least = _first_of(queue, gpu, most)
        smallest, reason = min(smallest, least), reason or refused
        if ranking.fitting:
            fewer = sorted((_with_fewest_blocks(each, gpu) for each in ranking.fitting), key=lambda each: each.order)
            return replace(ranking, fitting=fewer)
    words = f"the smallest needs {smallest / 2**30:.1f} GiB" if smallest < float("inf") else "" if large else reason
    raise (TooLarge if large else UserError)(
        f"plan=auto finds no plan of {counted(search.world, 'process', 'processes')} for {gpu.name}"
        f"{f' ({words})' if words else ''}; use more processes, shorter samples or a smaller model"
    )


def _first_of(queue: list[tuple[float, int, Settings]], gpu: Gpu, most: int) -> tuple[Ranking, float]:
    """Return the first of a heap of candidates, and the bytes of the smallest that was looked at."""
    best: dict[tuple, Candidate] = {}
    large: dict[tuple, Candidate] = {}
    tried, smallest = 0, float("inf")
    assert gpu.rates is not None
    while queue and tried < EVALUATED:
        bound, _, settings = heapq.heappop(queue)
        ranked = sorted(candidate.seconds for candidate in best.values())
        if len(ranked) >= most and bound >= ranked[most - 1]:
            break
        division = _division(settings.plan)
        if division in best and bound >= best[division].seconds:
            continue
        tried += 1
        memory = _fullest_of_some(settings)
        smallest = min(smallest, memory.total)
        if not fits_into(memory.total, gpu.size):
            known = large.get(division[:-1])
            if known is None or memory.total < known.memory.total:
                large[division[:-1]] = Candidate(settings, memory, bound)
            continue
        time = step_time(settings, gpu.rates)
        found = Candidate(settings, memory, time.total, time)
        if division not in best or found.order < best[division].order:
            best[division] = found
    fitting = sorted(best.values(), key=lambda candidate: candidate.order)[:most]
    faster = [each for each in large.values() if not fitting or each.seconds < fitting[0].seconds]
    return Ranking(fitting, sorted(faster, key=lambda each: each.order)[:3]), smallest


def _with_fewest_blocks(candidate: Candidate, gpu: Gpu) -> Candidate:
    """Return the candidate with no more blocks computed again than it takes to fit."""
    assert gpu.rates is not None
    settings = with_fewest_blocks(candidate.settings, gpu.size)
    if settings == candidate.settings:
        return candidate
    time = step_time(settings, gpu.rates)
    return Candidate(settings, _fullest_of_some(settings), time.total, time)


def why_slower(other: Candidate, best: Candidate) -> str:
    """Return what most of the difference between two steps is spent on, in words."""
    assert other.time is not None and best.time is not None
    mine, theirs = _spent(other.time), _spent(best.time)
    name = max(mine, key=lambda part: mine[part] - theirs[part])
    more = mine[name] - theirs[name]
    return f"{name} +{more / best.seconds:.1%}" if more > 0 else "the same"


def _spent(time: StepTime) -> dict[str, float]:
    return {
        "operations": time.work.total,
        "recomputation": time.again,
        "optimizer": time.optimizer,
        "bubble": time.bubble,
        "host": time.host,
        **{f"messages over {axis}": seconds for axis, seconds in time.messages.items()},
    }


def _division(plan: ResolvedPlan) -> tuple[int, ...]:
    return plan.dp, plan.cp, plan.ep, plan.tp, plan.pp, plan.zero


def _fullest_of_some(settings: Settings) -> Memory:
    """Return the memory of the fullest of the first two pipeline ranks and the last: those between hold no more."""
    plan = settings.plan
    ranks = sorted({0, min(1, plan.pp - 1), plan.pp - 1})
    return fullest({pp: memory_of(settings, pp * plan.ranks_of_stage) for pp in ranks})


def _candidates(
    search: Search, rates: Rates, size: float, cuts_samples: bool
) -> tuple[list[tuple[float, int, Settings]], str, bool]:
    """Return a heap of all candidates by the time of their operations, the reason of the first that was refused, and
    whether others were left out, whose weights and activations alone are too large."""
    model, samples = search.model, search.samples
    queue: list[tuple[float, int, Settings]] = []
    reason, dropped = "", False
    for plan, schedules, zeros in _divisions(model, search.world, search.seq_length, cuts_samples):
        if samples % plan.dp:
            reason = reason or f"{samples} samples cannot be shared by {plan.dp} replicas"
            continue
        for micro in (n for n in divisors(samples // plan.dp) if n <= MOST_MICRO):
            for schedule, stages in schedules:
                timed: dict[Recompute, float] = {}
                for zero in zeros:
                    cut = replace(plan, zero=zero, schedule=schedule, stages_per_rank=stages)
                    for recompute in search.recomputes:
                        try:
                            settings = search.make(cut, micro, recompute)
                        except UserError as error:
                            reason = reason or str(error)
                            break
                        if not _may_fit(settings, size):
                            dropped = True
                            continue
                        if recompute not in timed:
                            timed[recompute] = compute_time(settings, rates)
                        queue.append((timed[recompute], len(queue), settings))
    heapq.heapify(queue)
    return queue, reason, dropped


def numbers_of_processes(search: Search) -> list[int]:
    """Return the numbers to search, the largest first: all processes, and fewer where a division of them has replicas
    that can share the samples."""
    model, counts = search.model, {1}
    tps = (n for n in divisors(math.gcd(*model.cut_by_tp.values())) if n <= GPUS_OF_HOST)
    cps = (2**n for n in range(MOST_CP.bit_length()))
    for factors in (divisors(search.samples), tps, cps, range(1, model.num_layers + 1)):
        counts = {count * n for n in factors for count in counts if count * n < search.world}
    return [search.world, *sorted(counts, reverse=True)]


def _divisions(
    model: ModelConfig, world: int, seq_length: int, cuts_samples: bool
) -> Iterator[tuple[ResolvedPlan, list[tuple[Schedule, int | None]], list[int]]]:
    """Yield plans with their degrees, the schedules and stages of a rank that each can have, and its ZeRO levels."""
    common = math.gcd(world, *model.cut_by_tp.values())
    for tp in (n for n in divisors(common) if n <= GPUS_OF_HOST):
        degrees = [n for n in divisors(world // tp) if n & (n - 1) == 0 and n <= MOST_CP]
        for cp in (n for n in degrees if (n > 1) == cuts_samples):
            for pp in (n for n in divisors(world // tp // cp) if n <= model.num_layers):
                sp = tp > 1 and seq_length % (tp * cp) == 0
                plan = ResolvedPlan(dp=world // (tp * cp * pp), cp=cp, tp=tp, pp=pp, sequence_parallel=sp)
                several = plan.data_ranks > 1
                spread = [replace(plan, ep=ep) for ep in spreads(model, plan)]
                if pp == 1:
                    for each in spread:
                        yield each, [("1F1B", None)], [0, 1, 2, 3] if several else [0]
                    continue
                most = min(MOST_STAGES, model.num_layers // pp)
                interleaved: list[tuple[Schedule, int | None]] = [("Interleaved1F1B", n) for n in range(2, most + 1)]
                schedules: list[tuple[Schedule, int | None]] = [("1F1B", None), *interleaved, ("GPipe", None)]
                yield from ((each, schedules, [0, 1] if several else [0]) for each in spread)


def _may_fit(settings: Settings, size: float) -> bool:
    """Return whether a rank of average size may fit: fp32 weights, and what the blocks of a stage keep at the least."""
    plan, model = settings.plan, settings.model
    weights = (
        0.0
        if settings.freezes_weights
        else 4 * inventory(model).num_parameters / (plan.tp * plan.pp * max(plan.shard, plan.ep))
    )
    in_flight = min(plan.pp, settings.micro_batches)
    kept = 1.0 if repeats_blocks(settings) else 6 / (1 if plan.sequence_parallel else plan.tp)
    return fits_into(weights + in_flight * model.num_layers / plan.pp * kept * residual_bytes(settings), size)
