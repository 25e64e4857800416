"""The moments of a training step at which a rank may need most memory: what is alive then beside weights and states.

A step needs most while the last forward pass ends, while backward leaves the blocks, when the gradient of the embedding
is made, or in the update. Which moment that is depends on the plan: `dtgpt.planning.memory` takes the largest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtgpt.config.execution import Settings
from dtgpt.models.roles import Role
from dtgpt.ops.loss.head import chunk_rows
from dtgpt.parallel.layout import chunk
from dtgpt.planning.activations import block_activations, block_work, residual_bytes, whole_bytes
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.parameters import Rank
from dtgpt.planning.sums import is_pushed
from dtgpt.posttrain.demands import rows_of


@dataclass(frozen=True)
class Moment:
    """Bytes that are alive at a moment."""

    gradients: float
    gathered: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return self.gradients + self.gathered + self.activations + self.working


def whole_passes(here: Rank) -> Iterator[Moment]:
    """Yield the head of the last forward pass, backward of blocks while most activations are kept, and of the first
    block, when most gradients are there."""
    settings, sent, start = here.settings, _sent_at_once(here), _gradients_at_start(here)
    stream = residual_bytes(settings)  # of a gradient of the residual stream
    whole, again = _Blocks(here, again=False), _Blocks(here, again=True)
    kept = here.passes * (whole.kept + again.kept)
    work = max(whole.work, again.work)
    heads = 0.0
    if here.place.holds_last:
        tokens = whole_bytes(settings)
        passes = settings.micro_batches if settings.plan.schedule == "GPipe" and settings.plan.pp > 1 else 1
        heads = (passes - 1) * (stream + tokens + here.head)  # of passes whose backward is still to come
        own = 2 * stream + tokens * (2 if settings.plan.sequence_parallel else 1)
        yield Moment(start, here.gathered, kept + heads + own, _head_work(here) + sent)
        heads += here.head + stream
    yield Moment(start, here.gathered, kept + heads, (whole.work if whole.count else again.work) + sent)
    if len(here.blocks) > 1 and not start and not (whole.count and again.count):  # and of the block before it
        less = block_activations(settings, here.blocks[-1])
        yield Moment(sum(_scattered(here, here.blocks[-1])), here.gathered, kept + heads - less, work + sent)
    if whole.count and again.count:  # those that keep all are the last of a stage, and the first in backward
        made = here.head + (here.gradients - _of_ends(here)) * whole.count / len(here.blocks)
        yield Moment(max(start, made), here.gathered, kept - whole.kept, again.work + stream + sent)
    if settings.micro_batches > 1 and start < here.gradients:
        fewer = 1 - 1 / settings.micro_batches
        yield Moment(here.gradients, here.gathered, fewer * (kept + heads), work + sent)
    if here.blocks:
        first = here.blocks[0]
        made, work = here.head + here.gradients - _of_ends(here), block_work(settings, first) + stream
        if len(here.blocks) > 1:
            made += _scattered(here, here.blocks[1])[0] - _scattered(here, first)[1]
        yield Moment(made, here.gathered, block_activations(settings, first), work + sent)


def after_passes(here: Rank) -> Iterator[Moment]:
    """Yield the end of backward, and the update."""
    yield _end_of_backward(here)
    yield Moment(here.gradients, _gathered_at_end(here), 0, _update_bytes(here))


class _Blocks:
    """The blocks of a rank that compute something again in backward, or the others: how many, the bytes that they keep
    in a pass, and the most that a backward pass of one works with."""

    def __init__(self, here: Rank, again: bool):
        kinds, settings = here.blocks_by_kind(again), here.settings
        own = settings if again else replace(settings, recompute="none", recompute_blocks=None)
        self.count = kinds.total()
        self.kept = sum(count * block_activations(own, kind) for kind, count in kinds.items())
        self.work = max((block_work(own, kind) for kind in kinds), default=0.0)


def _of_ends(here: Rank) -> float:
    """Return the bytes of gradients that are not yet there before those of the embedding are made."""
    if here.sums.kept or here.settings.micro_batches > 1:
        return 0
    return here.sums.bytes_of([p for p in here.trained if p.block is None])


def _scattered(here: Rank, block: int) -> tuple[float, float]:
    """Return the bytes of the gradients of a block as `fully_shard` sends them, which stay until it sends those of the
    next one, and of those that it makes of them in a rank's only micro-batch."""
    sums = here.sums
    if not sums.scatters or here.settings.plan.pp > 1 or here.settings.freezes_weights:
        return 0, 0
    own = [p for p in here.trained if p.block == block]
    made = sums.width * sum(p.local for p in own) if here.settings.micro_batches == 1 else 0
    return sums.scattered_width * sum(p.by_tp for p in own), made


def _gradients_at_start(here: Rank) -> float:
    """Return the bytes of gradients while most activations are kept: of micro-batches before, or of buckets that are
    always there."""
    settings, plan = here.settings, here.settings.plan
    if here.sums.kept:
        return here.gradients
    if here.passes >= settings.micro_batches:
        return 0
    if not plan.zero or plan.pp > 1:
        return here.gradients
    left = here.around if plan.zero >= 2 else 0  # elements that were scattered last, until the next are
    return here.gradients + here.sums.scattered_width * left


def _head_work(here: Rank) -> float:
    """Return the bytes of the head's forward pass: a chunk of logits, the gradient of its weight, in fp32 too where
    there are several chunks, and in backward a copy of it."""
    settings = here.settings
    width, rows = settings.dtype.itemsize, rows_of_logits(settings)
    columns = columns_of_logits(settings)
    at_once = chunk_rows(rows, columns, width)
    if here.table is None:  # logits alone
        return width * at_once * columns
    sums = 4 * here.table.by_tp if at_once < rows and width < 4 else 0
    return max(width * at_once * columns + here.head + sums, 2 * here.head)


def _end_of_backward(here: Rank) -> Moment:
    """Return the moment when the gradient of the embedding is made. That of a tied head waits for it, and where sums
    are kept apart, or ZeRO cuts them, the gradients of all that lies around the blocks are there in the type of the
    weights, too."""
    settings, plan, sent = here.settings, here.settings.plan, _sent_at_once(here)
    width, full = settings.dtype.itemsize, here.gradients
    if settings.freezes_weights or not here.around:
        return Moment(full, _gathered_at_end(here), 0, sent)
    tables = [p for p in here.trained if p.role is Role.VOCABULARY]
    work = 0.0
    if here.place.holds_first:
        if settings.model.tied and here.place.holds_last:
            work += here.head
        if plan.tp > 1:  # DTensor makes the gradient of all rows, and copies this rank's
            work += width * (plan.tp + 1) * tables[0].by_tp
    if plan.zero and plan.pp == 1:
        whole = making = width * here.around
        if here.sums.scatters:  # while sums are made, torch's `foreach_reduce` still holds the last gradient
            ends = [p for p in here.trained if p.block is None]
            local = here.sums.width * sum(p.local for p in ends)
            making = max(whole, local + width * ends[-1].by_tp)
            if here.sums.cuts and settings.micro_batches == 1:
                full -= local
        work = max(work + whole, here.sums.scattered_width * here.around + making)
    elif here.sums.kept:
        work += width * here.around
    return Moment(full, _gathered_at_end(here), 0, work + sent)


def _gathered_at_end(here: Rank) -> int:
    """Return the bytes of weights that matmuls read at the end of backward: `fully_shard` has freed those that it
    gathered into memory of its own by then."""
    settings, plan = here.settings, here.settings.plan
    frees = plan.zero and plan.pp == 1 and not is_pushed(settings) and not settings.freezes_weights
    return 0 if frees else here.gathered


def _update_bytes(here: Rank) -> int:
    """Return the bytes that the optimizer works with."""
    settings, plan = here.settings, here.settings.plan
    if settings.optimizer is None or settings.freezes_weights:
        return 0
    blocks, parts = tuple(here.blocks_by_kind().elements()), plan.shard * plan.tp  # stages of one size are one
    costs = OptimizerCosts(settings.optimizer)
    return costs.update_bytes(settings.model, blocks, plan.ranks_of_stage, parts, settings.dtype.itemsize)


def _sent_at_once(here: Rank) -> int:
    """Return the bytes of what ranks send for exact sums, beside their buckets, and receive: of a block or the rest of
    a stage."""
    return here.sums.bytes_at_once(here.trained)


def rows_of_logits(settings: Settings) -> int:
    """Return the tokens of a micro-batch on a rank."""
    return rows_of(settings).number * rows_of(settings).length


def columns_of_logits(settings: Settings) -> int:
    """Return the most columns of logits on a tp rank."""
    return len(chunk(range(settings.model.padded_vocab_size), settings.plan.tp, 0))
