"""The moments of a step under a schedule that cuts backward in two, as torch's ZBV orders it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dtgpt.models.roles import MATRICES, Role
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.activations import block_activations, block_work, residual_bytes, split_sizes
from dtgpt.planning.held import Held, Moment, columns_of_logits, rows_of_logits
from dtgpt.planning.torch_private import zero_bubble_order

TABLES = (Role.VOCABULARY, Role.POSITIONS)


class _State(NamedTuple):
    """What a rank computes, and what it keeps of its two stages meanwhile."""

    kind: str  # F, I or W: a forward pass, or backward for inputs or for weights
    stage: int  # 0 or 1
    forward: tuple[int, int]  # other passes of each stage before their backward
    halves: tuple[int, int]  # other passes between the halves of backward
    made: tuple[bool, bool]  # whether gradients of the stage's weights are there


@dataclass(frozen=True)
class _Stage:
    """Bytes of one stage, for a micro-batch but for the gradients."""

    forward: float  # kept by a forward pass, with casts of weights
    casts: float  # of these
    after: float  # kept beside, by the half for inputs
    during: float  # of the half for weights, at most
    gradients: float


def moments(held: Held) -> Iterator[Moment]:
    """Yield the moments of all passes."""
    settings = held.settings
    stages = [_stage(held, stage) for stage in held.place.stages]
    for state in _states(settings.plan.pp, settings.micro_batches, held.place.pp):
        kept, casts, now = 0.0, 0.0, stages[state.stage]
        for stage, forward, halves in zip(stages, state.forward, state.halves, strict=True):
            passes = forward + halves + (stage is now)
            kept += passes * (stage.forward - stage.casts) + halves * stage.after
            casts += passes * stage.casts
        made = sum(stage.gradients for stage, there in zip(stages, state.made, strict=True) if there)
        gradients = held.gradients if held.sums.kept else made
        work = {"F": 0.0, "I": now.after, "W": now.during}[state.kind]
        yield Moment(gradients, casts, kept, work)


@lru_cache(maxsize=256)
def _states(ranks: int, micro_batches: int, rank: int) -> frozenset[_State]:
    forward, halves, made, found = [0, 0], [0, 0], [False, False], set()
    for kind, number in zero_bubble_order(ranks, micro_batches, rank):
        stage = int(number != rank)
        if kind == "I":
            forward[stage] -= 1
        elif kind == "W":
            halves[stage] -= 1
            made[stage] = True
        found.add(_State(kind, stage, (forward[0], forward[1]), (halves[0], halves[1]), (made[0], made[1])))
        if kind == "F":
            forward[stage] += 1
        elif kind == "I":
            halves[stage] += 1
    return frozenset(found)


def _stage(held: Held, stage: int) -> _Stage:
    settings, plan = held.settings, held.settings.plan
    blocks, width = block_ranges(settings.model, plan)[stage], settings.dtype.itemsize
    first, last = stage == 0, stage == plan.num_stages - 1
    own = [
        p for p in held.trained if (p.block in blocks if p.block is not None else first if p.role in TABLES else last)
    ]
    matrices = sum(p.by_tp for p in own if p.role in MATRICES)
    casts = width * matrices if width < 4 and not settings.repeats_blocks else 0
    kept = sum(block_activations(settings, block) for block in blocks)
    gradients = held.sums.width * sum(p.by_tp for p in own)
    if first:  # its two halves are one, for weights
        during = residual_bytes(settings) + max((block_work(settings, block) for block in blocks), default=0.0)
        return _Stage(kept + casts, casts, 0, during, gradients)
    after, during, left = _halves(held, blocks)
    if last:  # logits; their gradient, until the half for weights, which copies it and makes the table's gradient
        logits = width * rows_of_logits(settings) * columns_of_logits(settings)
        cast, made = (held.head, 3 * held.head) if width < 4 else (0, held.head)
        kept, casts = kept + 2 * residual_bytes(settings) + logits, casts + cast
        after, during = after + logits, max(during + logits, left + logits + made)
    return _Stage(kept + casts, casts, after, during, gradients)


def _halves(held: Held, blocks: range) -> tuple[float, float, float]:
    """Return the bytes kept by the half for inputs, those of the half for weights at most, and those that it leaves
    until its end. Blocks are taken in turn."""
    sizes = [split_sizes(held.settings, block) for block in blocks]
    after, left, most = sum(size.after for size in sizes), 0.0, 0.0
    ahead = after
    for size in sizes:
        ahead -= size.after
        most = max(most, left + size.during + ahead)
        left += size.left
    return after, most, left
