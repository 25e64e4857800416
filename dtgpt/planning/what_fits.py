"""Whether a plan fits into a GPU, the longest sample that does, and what to change where it does not."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from dtgpt.config.execution import Settings
from dtgpt.config.plan import GPUS_OF_HOST, ResolvedPlan, divisors
from dtgpt.models.config import LARGEST_SIZE, ModelConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.parallel.recompute.rules import recomputes
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.gpus import Gpu
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.planning.step_time import step_time
from dtgpt.util.console import byte_size
from dtgpt.util.errors import UserError
from dtgpt.util.shared.option_words import value_text

# Of the device: CUDA's context, NCCL's buffers and what the allocator holds for one stream and cannot give another take
# the rest. A captured step of 0.898 ran out of memory (benchmarks/notes/planning.md).
HEADROOM = 0.89
# Up to so much of the device, blocks keep activations although the step fits without: nearer to its end, less is sure.
FILLED = 0.8
GRAIN = 1024  # tokens, of the longest sequence
MOST_CP = 64  # that `what_fits` tries
MOST_CHANGES = 4  # that `what_fits` names
MOST_TIMES = 64  # the micro-batch of a recipe, of the largest that is looked for


def fits_into(needed: float, size: float) -> bool:
    return needed <= HEADROOM * size


def longest_sequence(settings: Settings, size: float) -> int:
    """Return the tokens of the longest sample, a multiple of 2 cp and tp, and above GRAIN of GRAIN, with which the plan
    fits into `size` bytes, with the same stages and as many samples in a micro-batch; 0 where none fits."""
    finest = 2 * settings.plan.cp * settings.plan.tp
    coarse = math.lcm(GRAIN, finest)
    return _longest(settings, size, coarse, LARGEST_SIZE) or _longest(settings, size, finest, coarse - 1)


def _longest(settings: Settings, size: float, grain: int, largest: int) -> int:
    """Return the largest multiple of `grain`, up to `largest`, that fits; 0 where none does."""
    sizes = tuple(len(blocks) for blocks in block_ranges(settings.model, settings.plan))
    plan = replace(settings.plan, blocks_per_stage=sizes) if settings.plan.pp > 1 else settings.plan

    def fits(grains: int) -> bool:
        length = grains * grain
        model = replace(settings.model, seq_length=max(length, settings.model.seq_length))
        longer = replace(settings, plan=plan, model=model, seq_length=length)
        return fits_into(fullest(memory_by_rank(longer)).total, size)

    low, high = 0, largest // grain + 1  # `low` grains fit, `high` do not, or are not allowed
    guess = max(1, settings.seq_length // grain)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if fits(guess):
            low, guess = guess, 2 * guess if high > largest // grain else (guess + high) // 2
        else:
            high, guess = guess, (low + guess) // 2
    return low * grain


def largest_micro_batch(settings: Settings, size: float) -> int:
    """Return the largest micro-batch size with which the plan fits into `size` bytes and runs; 0 where none does."""
    for micro in reversed(divisors(settings.global_batch_size // settings.plan.dp)):
        changed = replace(settings, micro_batch_size=micro)
        if micro > settings.micro_batch_size * MOST_TIMES or not _runs(changed):
            continue
        if fits_into(fullest(memory_by_rank(changed)).total, size):
            return micro
    return 0


def with_fewest_blocks(settings: Settings, size: float) -> Settings:
    """Return the settings with as few blocks computed again in backward as take up to FILLED of `size` bytes: with no
    more than now."""
    if settings.recompute == "none" or settings.plan.splits_backward:
        return settings
    most = max(len(blocks) for blocks in block_ranges(settings.model, settings.plan))
    most = min(most, settings.recompute_blocks or most)
    changed = [replace(settings, recompute="none", recompute_blocks=None)]
    changed += [replace(settings, recompute_blocks=count) for count in range(1, most)]
    first = bisect_left(changed, True, key=lambda each: fullest(memory_by_rank(each)).total <= FILLED * size)
    return [*changed, settings][first]


def what_fits(settings: Settings, gpu: Gpu) -> list[str]:
    """Return changes, in words, with each of which a plan that does not fit into the GPU would, the fastest step first;
    all but the last keep the loss curve."""
    found: list[tuple[float, str, frozenset[str]]] = []
    for changed in _changed(settings):
        words = options_of_change(settings, changed)
        if not words or any(known <= words for _, _, known in found) or not _runs(changed):
            continue
        memory = fullest(memory_by_rank(changed)).total
        if fits_into(memory, gpu.size):
            seconds = step_time(changed, gpu.rates).total if gpu.rates else 0.0
            found.append((seconds, f"{' '.join(sorted(words))} ({byte_size(memory)})", words))
    found.sort()
    lines = []
    for seconds, text, _ in found[:MOST_CHANGES]:
        slower = seconds / found[0][0] - 1 if gpu.rates else 0.0
        lines.append(f"{text}, {slower:+.0%} time" if slower >= 0.005 else text)
    if not found:
        lines += _on_more_gpus(settings, gpu.size)
    longest = longest_sequence(settings, gpu.size)
    lines.append(
        f"--seq_length {longest}, the longest of this plan" if longest else "no sample length fits with this plan"
    )
    return lines


def spreads(model: ModelConfig, plan: ResolvedPlan) -> list[int]:
    """Return over how many ranks of data the experts of a model can be spread: from as many as in the plan on."""
    experts = model.num_experts if isinstance(model, ExpertsConfig) else 1
    return [ep for ep in divisors(math.gcd(experts, plan.data_ranks)) if ep >= plan.ep]


def _changed(settings: Settings) -> Iterator[Settings]:
    """Yield settings that take less memory on as many GPUs: one change, then two, then three."""
    plans: list[ResolvedPlan] = []
    for split in dict.fromkeys((settings.plan.sequence_parallel, settings.plan.tp > 1)):
        plan = replace(settings.plan, sequence_parallel=split)
        levels = range(plan.zero, 4 if plan.data_ranks > 1 else plan.zero + 1)
        plans += [replace(plan, zero=zero, ep=ep) for zero in levels for ep in spreads(settings.model, plan)]
        for times in (n for n in divisors(plan.dp) if n > 1):
            if plan.tp * times <= GPUS_OF_HOST:
                plans.append(replace(plan, dp=plan.dp // times, tp=plan.tp * times, sequence_parallel=True))
            plans.append(replace(plan, dp=plan.dp // times, cp=plan.cp * times, zero=max(plan.zero, 3)))
            plans.append(replace(plan, dp=plan.dp // times, pp=plan.pp * times, zero=min(plan.zero, 1)))
    sizes, own = dict.fromkeys((settings.micro_batch_size, 1)), settings.recompute
    less = ["full"] if settings.plan.splits_backward else recomputes(settings)[1:]
    ways = [own, *less] if own != "full" else [own]
    again = dict.fromkeys([(own, settings.recompute_blocks), *((each, None) for each in ways)])
    every = [
        replace(
            settings, plan=cut.without_idle_zero(), micro_batch_size=micro, recompute=recompute, recompute_blocks=blocks
        )
        for cut in plans
        for micro in sizes
        for recompute, blocks in again
    ]
    yield from sorted(every, key=lambda changed: len(options_of_change(settings, changed)))


def options_of_change(settings: Settings, changed: Settings) -> frozenset[str]:
    """Return the options by which `changed` differs."""
    words = set()
    if changed.plan != settings.plan:
        words.add(f"--plan {changed.plan.name}")
    for name in ("micro_batch_size", "recompute", "recompute_blocks"):
        if (value := getattr(changed, name)) != getattr(settings, name):
            words.add(f"--{name} {value_text(value)}")
    return frozenset(words)


def _on_more_gpus(settings: Settings, size: float) -> list[str]:
    """Return the fewest GPUs, with context parallelism and full recomputation, on which a sample fits; [] for none."""
    plan = settings.plan
    for cp in (2**n for n in range(1, MOST_CP.bit_length()) if 2**n > plan.cp):
        more = replace(plan, cp=cp, zero=3, sequence_parallel=plan.tp > 1)
        cut = replace(settings, plan=more, recompute="full", recompute_blocks=None)
        if _runs(cut) and fits_into(fullest(memory_by_rank(cut)).total, size):
            words = options_of_change(settings, replace(cut, plan=plan))
            return [" ".join([f"--plan {cut.plan.name}", *sorted(words), f"on {cut.plan.world:,} GPUs"])]
    return []


def _runs(settings: Settings) -> bool:
    """Return whether the model and the batch can be cut as the plan says."""
    own = settings
    try:
        own.plan.validate(own.model, own.micro_batch_size, own.global_batch_size, own.seq_length)
    except UserError:
        return False
    return True
