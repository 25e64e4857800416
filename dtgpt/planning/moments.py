"""The moments of a training step at which a rank may need most memory: what is alive then beside weights and states."""

from collections.abc import Iterator
from dataclasses import replace

from dtgpt.models.roles import Role
from dtgpt.ops.loss.head import chunk_rows
from dtgpt.parallel.gradients import is_pushed
from dtgpt.planning import zero_bubble
from dtgpt.planning.activations import block_activations, block_work, residual_bytes, whole_bytes
from dtgpt.planning.held import Held, Moment, columns_of_logits, rows_of_logits


def moments(held: Held) -> Iterator[Moment]:
    """Yield the moments of the passes, the end of backward, and the update."""
    yield from zero_bubble.moments(held) if held.settings.plan.splits_backward else _passes(held)
    yield _end_of_backward(held)
    yield Moment(held.gradients, _gathered_at_end(held), 0, _update_bytes(held))


def _passes(held: Held) -> Iterator[Moment]:
    """Yield the head of the last forward pass, backward of blocks while most activations are kept, and of the first
    block, when most gradients are there."""
    settings, sent, start = held.settings, _sent_at_once(held), _gradients_at_start(held)
    stream = residual_bytes(settings)  # of a gradient of the residual stream
    whole, again = _Blocks(held, again=False), _Blocks(held, again=True)
    kept = held.passes * (whole.kept + again.kept)
    work = max(whole.work, again.work)
    heads = 0.0
    if held.place.holds_last:
        tokens = whole_bytes(settings)
        passes = settings.micro_batches if settings.plan.schedule == "GPipe" and settings.plan.pp > 1 else 1
        heads = (passes - 1) * (stream + tokens + held.head)  # of passes whose backward is still to come
        own = 2 * stream + tokens * (2 if settings.plan.sequence_parallel else 1)
        yield Moment(start, held.gathered, kept + heads + own, _head_work(held) + sent)
        heads += held.head + stream
    yield Moment(start, held.gathered, kept + heads, (whole.work if whole.count else again.work) + sent)
    if len(held.blocks) > 1 and not start and not (whole.count and again.count):  # and of the block before it
        less = block_activations(settings, held.blocks[-1])
        yield Moment(sum(_scattered(held, held.blocks[-1])), held.gathered, kept + heads - less, work + sent)
    if whole.count and again.count:  # those that keep all are the last of a stage, and the first in backward
        made = held.head + (held.gradients - _of_ends(held)) * whole.count / len(held.blocks)
        yield Moment(max(start, made), held.gathered, kept - whole.kept, again.work + stream + sent)
    if settings.micro_batches > 1 and start < held.gradients:
        fewer = 1 - 1 / settings.micro_batches
        yield Moment(held.gradients, held.gathered, fewer * (kept + heads), work + sent)
    if held.blocks:
        first = held.blocks[0]
        made, work = held.head + held.gradients - _of_ends(held), block_work(settings, first) + stream
        if len(held.blocks) > 1:
            made += _scattered(held, held.blocks[1])[0] - _scattered(held, first)[1]
        yield Moment(made, held.gathered, block_activations(settings, first), work + sent)


class _Blocks:
    """The blocks of a rank that compute something again in backward, or the others: how many, the bytes that they keep
    in a pass, and the most that a backward pass of one works with."""

    def __init__(self, held: Held, again: bool):
        kinds, settings = held.blocks_of(again), held.settings
        own = settings if again else replace(settings, recompute="none", recompute_blocks=None)
        self.count = kinds.total()
        self.kept = sum(count * block_activations(own, kind) for kind, count in kinds.items())
        self.work = max((block_work(own, kind) for kind in kinds), default=0.0)


def _of_ends(held: Held) -> float:
    """Return the bytes of gradients that are not yet there before those of the embedding are made."""
    if held.sums.kept or held.settings.micro_batches > 1:
        return 0
    return held.sums.bytes_of([p for p in held.trained if p.block is None])


def _scattered(held: Held, block: int) -> tuple[float, float]:
    """Return the bytes of the gradients of a block as `fully_shard` sends them, which stay until it sends those of the
    next one, and of those that it makes of them in a rank's only micro-batch."""
    sums = held.sums
    if not sums.scatters or held.settings.plan.pp > 1 or held.settings.freezes_weights:
        return 0, 0
    own = [p for p in held.trained if p.block == block]
    made = sums.width * sum(p.local for p in own) if held.settings.micro_batches == 1 else 0
    return sums.scattered_width * sum(p.by_tp for p in own), made


def _gradients_at_start(held: Held) -> float:
    """Return the bytes of gradients while most activations are kept: of micro-batches before, or of buckets that are
    always there."""
    settings, plan = held.settings, held.settings.plan
    if held.sums.kept:
        return held.gradients
    if held.passes >= settings.micro_batches:
        return 0
    if not plan.zero or plan.pp > 1:
        return held.gradients
    left = held.around if plan.zero >= 2 else 0  # elements that were scattered last, until the next are
    return held.gradients + held.sums.scattered_width * left


def _head_work(held: Held) -> float:
    """Return the bytes of the head's forward pass: a chunk of logits, the gradient of its weight, in fp32 too where
    there are several chunks, and in backward a copy of it."""
    settings = held.settings
    width, rows = settings.dtype.itemsize, rows_of_logits(settings)
    columns = columns_of_logits(settings)
    at_once = chunk_rows(rows, columns, width)
    if held.table is None:  # logits alone
        return width * at_once * columns
    sums = 4 * held.table.by_tp if at_once < rows and width < 4 else 0
    return max(width * at_once * columns + held.head + sums, 2 * held.head)


def _end_of_backward(held: Held) -> Moment:
    """Return the moment when the gradient of the embedding is made. That of a tied head waits for it, and where sums
    are kept apart, or ZeRO cuts them, the gradients of all that lies around the blocks are there in the type of the
    weights, too."""
    settings, plan, sent = held.settings, held.settings.plan, _sent_at_once(held)
    width, full = settings.dtype.itemsize, held.gradients
    if settings.freezes_weights or not held.around:
        return Moment(full, _gathered_at_end(held), 0, sent)
    tables = [p for p in held.trained if p.role is Role.VOCABULARY]
    work = 0.0
    if held.place.holds_first:
        if settings.model.tied and held.place.holds_last:
            work += held.head
        if plan.tp > 1:  # DTensor makes the gradient of all rows, and copies this rank's
            work += width * (plan.tp + 1) * tables[0].by_tp
    if plan.zero and plan.pp == 1:
        whole = making = width * held.around
        if held.sums.scatters:  # while sums are made, torch's `foreach_reduce` still holds the last gradient
            ends = [p for p in held.trained if p.block is None]
            local = held.sums.width * sum(p.local for p in ends)
            making = max(whole, local + width * ends[-1].by_tp)
            if held.sums.cuts and settings.micro_batches == 1:
                full -= local
        work = max(work + whole, held.sums.scattered_width * held.around + making)
    elif held.sums.kept:
        work += width * held.around
    return Moment(full, _gathered_at_end(held), 0, work + sent)


def _gathered_at_end(held: Held) -> int:
    """Return the bytes of weights that matmuls read at the end of backward: `fully_shard` has freed those that it
    gathered into memory of its own by then."""
    settings, plan = held.settings, held.settings.plan
    frees = plan.zero and plan.pp == 1 and not is_pushed(settings) and not settings.freezes_weights
    return 0 if frees else held.gathered


def _update_bytes(held: Held) -> int:
    """Return the bytes that the optimizer works with."""
    settings, plan = held.settings, held.settings.plan
    if settings.optimizer is None or settings.freezes_weights:
        return 0
    blocks, parts = tuple(held.kinds.elements()), plan.shard * plan.tp  # stages of one size are one
    return settings.optimizer.update_bytes(settings.model, blocks, plan.ranks_of_stage, parts, settings.dtype.itemsize)


def _sent_at_once(held: Held) -> int:
    """Return the bytes of what ranks send for exact sums, beside their buckets, and receive: of a block or the rest of
    a stage."""
    return held.sums.bytes_at_once(held.trained)
