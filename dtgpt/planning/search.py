"""The search for the fastest plan that fits: degrees, ZeRO, schedule, micro-batch size and recomputation."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dtgpt.config.execution import Recompute, Settings
from dtgpt.config.plan import ResolvedPlan, divisors
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.planning.fit import fits_into
from dtgpt.planning.gpus import Gpu, Rates
from dtgpt.planning.memory import Memory, fullest, memory_by_rank, memory_of
from dtgpt.planning.parameters import GPUS_OF_HOST
from dtgpt.planning.step_time import StepTime, compute_time, step_time
from dtgpt.util.errors import UserError

MOST_MICRO = 64  # samples of a micro-batch
MOST_STAGES = 8  # of a rank
LONG = 8192  # tokens of a sample from which on it may be cut
LISTED = 8  # plans
EVALUATED = 4000  # candidates whose messages and memory are counted, the fastest by their operations
Make = Callable[[ResolvedPlan, int, Recompute], Settings]  # of a plan, a micro-batch size and what is computed again


@dataclass(frozen=True)
class Candidate:
    """A plan with what was chosen for it. `time`: without messages where it does not fit."""

    settings: Settings
    memory: Memory
    seconds: float
    time: StepTime | None = None  # None: it does not fit

    @property
    def order(self) -> tuple[float, str, int, str]:
        """What candidates are sorted by, on every rank the same."""
        own = self.settings
        return self.seconds, own.plan.name, own.micro_batch_size, own.recompute


@dataclass(frozen=True)
class Ranking:
    """What a search found."""

    fitting: list[Candidate]  # the fastest first, of each division into dp, cp, tp, pp and ZeRO the fastest
    too_large: list[Candidate]  # that would be faster than the first of these, by their operations alone
    tried: int

    @property
    def best(self) -> Candidate:
        return self.fitting[0]


def rank_plans(
    model: ModelConfig, world: int, samples: int, seq_length: int, selective: bool, make: Make, gpu: Gpu, most: int = LISTED
) -> Ranking:
    """Return the plans of `world` ranks by the time of a step, the `most` fastest that fit into the GPU.

    samples: of a step. selective: whether recomputation of attention alone saves memory. make: returns the settings of
    a candidate, or raises UserError where it cannot run. The time of the operations alone is a lower bound of a step's,
    so that the search ends where no candidate that is left can be among the first. Raises UserError where nothing fits.
    """
    assert gpu.rates is not None
    queue, reason = _candidates(model, world, samples, seq_length, selective, make, gpu.rates, gpu.size)
    best: dict[tuple, Candidate] = {}
    large: dict[tuple, Candidate] = {}
    tried, smallest = 0, float("inf")
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
            large.setdefault(division, Candidate(settings, memory, bound))
            continue
        time = step_time(settings, gpu.rates)
        found = Candidate(settings, memory, time.total, time)
        if division not in best or found.order < best[division].order:
            best[division] = found
    fitting = sorted(best.values(), key=lambda candidate: candidate.order)[:most]
    if not fitting:
        need = f"; the smallest needs {smallest / 2**30:.1f} GiB" if smallest < float("inf") else ""
        raise UserError(
            f"plan=auto: no plan of {world:,} processes fits {gpu.name}{need}" + (f" ({reason})" if reason and not need else "")
            + "; use more processes, shorter samples or a smaller model"
        )
    faster = [each for each in large.values() if each.seconds < fitting[0].seconds]
    return Ranking(fitting, sorted(faster, key=lambda each: each.order)[:3], tried)


def why_slower(other: Candidate, best: Candidate) -> str:
    """Return what most of the difference between two steps is spent on, in words."""
    assert other.time is not None and best.time is not None
    mine, theirs = _spent(other.time), _spent(best.time)
    name = max(mine, key=lambda part: mine[part] - theirs[part])
    more = mine[name] - theirs[name]
    return f"{name} +{more / best.seconds:.1%}" if more > 0 else "the same"


def _spent(time: StepTime) -> dict[str, float]:
    return {
        "operations": time.work.total, "recomputation": time.again, "optimizer": time.optimizer, "bubble": time.bubble,
        "host": time.host, **{f"messages over {axis}": seconds for axis, seconds in time.messages.items()},
    }  # fmt: skip


def _division(plan: ResolvedPlan) -> tuple[int, ...]:
    return plan.dp, plan.cp, plan.tp, plan.pp, plan.zero


def _fullest_of_some(settings: Settings) -> Memory:
    """Return the memory of the fullest of the first two pipeline ranks and the last: those between hold no more."""
    plan = settings.plan
    ranks = sorted({0, min(1, plan.pp - 1), plan.pp - 1})
    return fullest({pp: memory_of(settings, pp * plan.ranks_of_stage) for pp in ranks})


def _candidates(
    model: ModelConfig, world: int, samples: int, seq_length: int, selective: bool, make: Make, rates: Rates, size: float
) -> tuple[list[tuple[float, int, Settings]], str]:
    """Return a heap of all candidates by the time of their operations, and the reason of the first that was refused."""
    queue: list[tuple[float, int, Settings]] = []
    reason = ""
    recomputes: list[Recompute] = ["none", *(["selective"] if selective else []), "full"]
    for plan, schedules, zeros in _divisions(model, world, seq_length):
        if samples % plan.dp:
            reason = reason or f"{samples} samples cannot be shared by {plan.dp} replicas"
            continue
        zeros = [zero for zero in zeros if _may_fit(model, replace(plan, zero=zero), size)]
        for micro in (n for n in divisors(samples // plan.dp) if n <= MOST_MICRO):
            for schedule, stages in schedules if zeros else []:
                timed: dict[Recompute, float] = {}
                for zero in zeros:
                    cut = replace(plan, zero=zero, schedule=schedule, stages_per_rank=stages)
                    for recompute in recomputes:
                        try:
                            settings = make(cut, micro, recompute)
                        except UserError as error:
                            reason = reason or str(error)
                            break
                        if recompute not in timed:
                            timed[recompute] = compute_time(settings, rates)
                        queue.append((timed[recompute], len(queue), settings))
    heapq.heapify(queue)
    return queue, reason


def _divisions(
    model: ModelConfig, world: int, seq_length: int
) -> Iterator[tuple[ResolvedPlan, list[tuple[str, int | None]], list[int]]]:
    """Yield plans with their degrees, the schedules and stages of a rank that each can have, and its ZeRO levels."""
    for tp in (n for n in divisors(world) if n <= GPUS_OF_HOST and all(size % n == 0 for size in model.cut_by_tp.values())):
        for cp in (n for n in divisors(world // tp) if n & (n - 1) == 0 and (n == 1 or seq_length >= LONG)):
            if cp > 1 and min(model.cut_by_tp.values()) % (cp * tp):
                continue
            for pp in (n for n in divisors(world // tp // cp) if n <= model.num_layers):
                sp = tp > 1 and seq_length % (tp * cp) == 0
                plan = ResolvedPlan(dp=world // (tp * cp * pp), cp=cp, tp=tp, pp=pp, sequence_parallel=sp)
                several = plan.data_ranks > 1
                if pp == 1:
                    yield plan, [("1F1B", None)], [0, 1, 2, 3] if several else [0]
                    continue
                most = min(MOST_STAGES, model.num_layers // pp)
                interleaved = [("Interleaved1F1B", n) for n in range(2, most + 1)]
                yield plan, [("1F1B", None), *interleaved, ("GPipe", None)], [0, 1] if several else [0]


def _may_fit(model: ModelConfig, plan: ResolvedPlan, size: float) -> bool:
    """Return whether fp32 weights and 16-bit copies alone leave a rank of average size any room: a quick lower bound."""
    each = inventory(model).num_parameters / (plan.tp * plan.pp)
    return fits_into(4 * each / plan.shard, size)
