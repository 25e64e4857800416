"""Whether a plan fits into a GPU, the longest sample that does, and what to change where it does not."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dtgpt.config.execution import Settings
from dtgpt.models.config import LARGEST_SIZE
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.util.errors import UserError

HEADROOM = 0.94  # of the device: CUDA's context, NCCL's buffers and gaps between allocations take the rest
GRAIN = 1024  # tokens, of the longest sequence
MOST_CP = 64  # that `what_fits` tries


def fits_into(needed: float, size: float) -> bool:
    return needed <= HEADROOM * size


def longest_sequence(settings: Settings, size: float) -> int:
    """Return the tokens of the longest sample, a multiple of GRAIN, 2 cp and tp, with which the plan fits into `size`
    bytes, with the same stages and as many samples in a micro-batch; 0 where none fits."""
    grain = math.lcm(GRAIN, 2 * settings.plan.cp * settings.plan.tp)
    sizes = tuple(len(blocks) for blocks in block_ranges(settings.model, settings.plan))
    plan = replace(settings.plan, blocks_per_stage=sizes) if settings.plan.pp > 1 else settings.plan

    def fits(grains: int) -> bool:
        length = grains * grain
        model = replace(settings.model, seq_length=max(length, settings.model.seq_length))
        longer = replace(settings, plan=plan, model=model, seq_length=length)
        return fits_into(fullest(memory_by_rank(longer)).total, size)

    low, high = 0, LARGEST_SIZE // grain + 1  # `low` grains fit, `high` do not, or are not allowed
    guess = max(1, settings.seq_length // grain)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if fits(guess):
            low, guess = guess, 2 * guess if high > LARGEST_SIZE // grain else (guess + high) // 2
        else:
            high, guess = guess, (low + guess) // 2
    return low * grain


def what_fits(settings: Settings, size: float) -> list[str]:
    """Return changes, in words, with each of which a plan that does not fit into `size` bytes would; all but the last
    keep the loss curve."""
    found = []
    for words, change in _changes(settings):
        changed = replace(settings, **change)
        try:
            changed.plan.validate(
                changed.model, changed.micro_batch_size, changed.global_batch_size, changed.seq_length
            )
        except UserError:
            continue
        if fits_into(fullest(memory_by_rank(changed)).total, size):
            found.append(words)
            if changed.plan.cp > settings.plan.cp:
                break  # more ranks than needed fit, too
    longest = longest_sequence(settings, size)
    found.append(f"--seq_length {longest}, the longest of this plan" if longest else "no sample, however short")
    return found


def _changes(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes that may save memory, in words and as fields of the settings, the cheapest first."""
    plan = settings.plan
    if settings.micro_batch_size > 1:
        yield "--micro_batch_size 1", {"micro_batch_size": 1}
    if settings.recompute != "full":
        yield "--recompute full", {"recompute": "full"}
    if plan.data_ranks > 1 and plan.zero < 3:
        sharded = replace(plan, zero=3)
        yield f"--plan {sharded.name}", {"plan": sharded}
    for cp in (2**n for n in range(1, MOST_CP.bit_length()) if 2**n > plan.cp):
        cut = replace(plan, cp=cp, zero=3)
        again = {"recompute": "full"}
        yield f"--plan {cut.name} --recompute full on {cut.world:,} GPUs", {"plan": cut, **again}
