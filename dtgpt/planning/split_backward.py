"""The memory of a schedule that cuts backward in two, as torch's ZBV orders it.

What the halves keep of a block is measured on the meta device, by torch's own halves. The half for inputs keeps all
activations, and the gradient of each operation with weights. The half for weights asks autograd for the gradients of
one operation after the other, and with full recomputation computes the whole block again for each: what this operation
does not use stays until the pass ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.layers import Context
from dtgpt.models.roles import MATRICES, Role
from dtgpt.ops.operation import split_backward
from dtgpt.parallel.recompute.blocks import recomputed
from dtgpt.parallel.recompute.rules import repeats_blocks
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.activations import block_activations, block_work, kind_of_block, residual_bytes
from dtgpt.planning.fullest_moment import Moment, columns_of_logits, rows_of_logits
from dtgpt.planning.meta_block import BlockKind, LiveBytes, make_block, make_input
from dtgpt.planning.parameters import Rank
from dtgpt.planning.torch_private import backward_of_inputs, backward_of_weights, zero_bubble_order
from dtgpt.posttrain.demands import rows_of

TABLES = (Role.VOCABULARY, Role.POSITIONS)


@dataclass(frozen=True)
class SplitSizes:
    """Bytes of one block and a micro-batch, beside what its forward pass keeps."""

    after: float  # the half for inputs
    during: float  # the half for weights, at most
    left: float  # by the half for weights, until that of the last block ends

    def scaled(self, samples: int) -> "SplitSizes":
        return SplitSizes(*(samples * size for size in vars(self).values()))


@lru_cache(maxsize=64)
def halves_of(kind: BlockKind, again: bool) -> SplitSizes:
    """Return the sizes for one sample. again: whether the block is computed again in backward."""
    block = make_block(kind)
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    if again:
        bind(block, run=recomputed(block.compute))
    x, made = make_input(kind, 1).requires_grad_(), make_input(kind, 1)
    with split_backward(), LiveBytes(weights) as alive:
        outputs = [block(x, Context())]
        before, chain = alive.now, outputs[0].grad_fn  # which the blocks that follow in a stage keep
        groups = backward_of_inputs(outputs, [made], [x], block.parameters())
        x.grad = None
        after = alive.now - before
        during = left = after
        for _ in _weights_in_turn(block.parameters(), groups):
            during, left = max(during, alive.peak - before), alive.now - before
            for parameter in block.parameters():
                parameter.grad = None
        del groups, chain
    return SplitSizes(after, during, left)


def _weights_in_turn(parameters: Iterator[Any], groups: list[dict[str, Any]]) -> Iterator[None]:
    every = list(parameters)
    for group in groups:
        backward_of_weights(iter(every), [group])
        yield


def split_sizes(settings: Settings, block: int) -> SplitSizes:
    """Return what the two halves of a backward pass of block `block` keep, measured once for each kind, in the
    activations' type."""
    kind = kind_of_block(settings, block)._replace(fp8=False)
    again = settings.recompute == "full"
    return halves_of(kind, again).scaled(rows_of(settings).number)


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


def passes(here: Rank) -> Iterator[Moment]:
    """Yield the moments of all passes, as torch's ZBV orders them."""
    settings = here.settings
    stages = [_stage(here, stage) for stage in here.place.stages]
    for state in _states(settings.plan.pp, settings.micro_batches, here.place.pp):
        kept, casts, now = 0.0, 0.0, stages[state.stage]
        for stage, forward, halves in zip(stages, state.forward, state.halves, strict=True):
            passes = forward + halves + (stage is now)
            kept += passes * (stage.forward - stage.casts) + halves * stage.after
            casts += passes * stage.casts
        made = sum(stage.gradients for stage, there in zip(stages, state.made, strict=True) if there)
        gradients = here.gradients if here.sums.kept else made
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


def _stage(here: Rank, stage: int) -> _Stage:
    settings, plan = here.settings, here.settings.plan
    blocks, width = block_ranges(settings.model, plan)[stage], settings.dtype.itemsize
    first, last = stage == 0, stage == plan.num_stages - 1
    own = [
        p for p in here.trained if (p.block in blocks if p.block is not None else first if p.role in TABLES else last)
    ]
    matrices = sum(p.by_tp for p in own if p.role in MATRICES)
    casts = width * matrices if width < 4 and not repeats_blocks(settings) else 0
    kept = sum(block_activations(settings, block) for block in blocks)
    gradients = here.sums.width * sum(p.by_tp for p in own)
    if first:  # its two halves are one, for weights
        during = residual_bytes(settings) + max((block_work(settings, block) for block in blocks), default=0.0)
        return _Stage(kept + casts, casts, 0, during, gradients)
    after, during, left = _halves(here, blocks)
    if last:  # logits; their gradient, until the half for weights, which copies it and makes the table's gradient
        logits = width * rows_of_logits(settings) * columns_of_logits(settings)
        cast, made = (here.head, 3 * here.head) if width < 4 else (0, here.head)
        kept, casts = kept + 2 * residual_bytes(settings) + logits, casts + cast
        after, during = after + logits, max(during + logits, left + logits + made)
    return _Stage(kept + casts, casts, after, during, gradients)


def _halves(here: Rank, blocks: range) -> tuple[float, float, float]:
    """Return the bytes kept by the half for inputs, those of the half for weights at most, and those that it leaves
    until its end. Blocks are taken in turn."""
    sizes = [split_sizes(here.settings, block) for block in blocks]
    after, left, most = sum(size.after for size in sizes), 0.0, 0.0
    ahead = after
    for size in sizes:
        ahead -= size.after
        most = max(most, left + size.during + ahead)
        left += size.left
    return after, most, left
