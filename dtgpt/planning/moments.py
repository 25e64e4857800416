"""The moments of a training step at which a rank may need most memory: what is alive then beside weights and states."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dtgpt.config.execution import Settings
from dtgpt.models.roles import Role
from dtgpt.ops.loss.head import chunk_rows
from dtgpt.parallel.coordinates import RankCoordinates, chunk
from dtgpt.planning.activations import (
    block_activations,
    block_sizes,
    core_bytes,
    explicit_work,
    residual_bytes,
    whole_bytes,
)  # fmt: skip
from dtgpt.planning.parameters import (
    WIDTH_OF_SUMS,
    LocalParameter,
    by_block,
    gradient_bytes,
    gradient_width,
    shards_are_pushed,
)


@dataclass(frozen=True)
class Held:
    """What a rank holds, in one precision."""

    settings: Settings
    place: RankCoordinates
    parameters: list[LocalParameter]
    trained: list[LocalParameter]
    blocks: list[int]
    passes: float  # forward passes in flight of each stage, at most
    gathered: int  # bytes of weights that matmuls read

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return gradient_bytes(self.trained, self.settings)

    @cached_property
    def around(self) -> int:
        """Elements of what lies around the blocks, as the rank computes with it."""
        return sum(p.by_tp for p in self.trained if p.block is None)

    @cached_property
    def table(self) -> LocalParameter | None:
        """The output projection; None on a rank that does not hold or does not train it."""
        roles = (Role.OUTPUT, Role.VOCABULARY)
        if not self.place.holds_last or self.settings.lora.rank:
            return None
        return next(p for p in reversed(self.trained) if p.role in roles)

    @cached_property
    def head(self) -> int:
        """Bytes of the gradient of the output projection, as the head makes it."""
        return 0 if self.table is None else self.settings.dtype.itemsize * self.table.by_tp


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


def moments(held: Held) -> Iterator[Moment]:
    """Yield the moments: the head of the last forward pass, backward of a block while most activations are kept, and
    of the first block, when most gradients are there; the end of backward; the update."""
    settings, sent = held.settings, _sent_at_once(held)
    kept = held.passes * sum(block_activations(settings, block) for block in held.blocks)
    start, work = _gradients_at_start(held), max((_block_work(settings, block) for block in held.blocks), default=0.0)
    heads = 0.0
    if held.place.holds_last:
        whole, residual = whole_bytes(settings), residual_bytes(settings)
        passes = settings.micro_batches if settings.plan.schedule == "GPipe" and settings.plan.pp > 1 else 1
        heads = (passes - 1) * (residual + whole + held.head)  # of passes whose backward is still to come
        own = 2 * residual + whole * (2 if settings.plan.sequence_parallel else 1)
        yield Moment(start, held.gathered, kept + heads + own, _head_work(held) + sent)
        heads += held.head + residual
    yield Moment(start, held.gathered, kept + heads, work + sent)
    full = held.gradients
    if settings.micro_batches > 1 and start < full:
        fewer = 1 - 1 / settings.micro_batches
        yield Moment(full, held.gathered, fewer * (kept + heads), work + sent)
    if held.blocks:
        first = held.blocks[0]
        waiting = held.head + full - _in_blocks(held)
        yield Moment(waiting, held.gathered, block_activations(settings, first), _block_work(settings, first) + sent)
    yield _end_of_backward(held, sent)
    gathered = _gathered_at_end(held)
    yield Moment(full, gathered, 0, _update_bytes(held))


def _in_blocks(held: Held) -> float:
    """Return the bytes of gradients that are not yet there before those of the embedding are made."""
    settings = held.settings
    if settings.sums_gradients or settings.reduce == "exact" or settings.micro_batches > 1:
        return 0
    cut = settings.cuts_each_gradient
    return gradient_width(settings) * sum((p.local if cut else p.by_tp) for p in held.trained if p.block is None)


def _gradients_at_start(held: Held) -> float:
    """Return the bytes of gradients while most activations are kept: of micro-batches before, or of buckets that are
    always there."""
    settings, plan = held.settings, held.settings.plan
    if settings.sums_gradients or settings.reduce == "exact":
        return held.gradients
    if held.passes >= settings.micro_batches:
        return 0
    if not plan.zero or plan.pp > 1:
        return held.gradients
    sent = settings.scattered_dtype.itemsize if shards_are_pushed(settings) else 4
    left = sent * held.around if plan.zero >= 2 else 0  # what was scattered last, until the next is
    return held.gradients + left


def _head_work(held: Held) -> float:
    """Return the bytes of the head's forward pass: a chunk of logits, the gradient of its weight, in fp32 too where
    there are several chunks, and in backward a copy of it."""
    settings = held.settings
    width, rows = settings.dtype.itemsize, settings.micro_batch_size * settings.local_length
    columns = len(chunk(range(settings.model.padded_vocab_size), settings.plan.tp, 0))
    if settings.plan.splits_backward:  # logits whole, with their gradient
        return 2 * width * rows * columns
    at_once = chunk_rows(rows, columns, width)
    if held.table is None:  # logits alone
        return width * at_once * columns
    sums = 4 * held.table.by_tp if at_once < rows and width < 4 else 0
    return max(width * at_once * columns + held.head + sums, 2 * held.head)


def _block_work(settings: Settings, block: int) -> float:
    """Return the bytes of a block's backward pass: the gradient of its widest tensor, for which another one of that
    size is no longer needed, those of its branch and of the residual stream, of the scores where they are explicit,
    and what is computed again."""
    again = 0.0
    if settings.recompute == "full":
        again = block_activations(replace(settings, recompute="none"), block)
    elif settings.recompute == "selective":
        again = core_bytes(settings, block)
    sizes = block_sizes(settings, block)
    return max(sizes.widest + 2 * whole_bytes(settings), explicit_work(settings, block)) + again


def _end_of_backward(held: Held, sent: float) -> Moment:
    """Return the moment when the gradient of the embedding is made. That of a tied head waits for it, and where sums
    are kept apart, or ZeRO cuts them, the gradients of all that lies around the blocks are there in the type of the
    weights, too."""
    settings, plan = held.settings, held.settings.plan
    width, full = settings.dtype.itemsize, held.gradients
    if settings.lora.rank or not held.around:
        return Moment(full, _gathered_at_end(held), 0, sent)
    tables = [p for p in held.trained if p.role is Role.VOCABULARY]
    work = 0.0
    if held.place.holds_first:
        if settings.model.tied and held.place.holds_last:
            work += held.head
        if plan.tp > 1:  # DTensor makes the gradient of all rows, and copies this rank's
            work += width * (plan.tp + 1) * tables[0].by_tp
    if plan.zero and plan.pp == 1:
        local = sum(p.local for p in held.trained if p.block is None)
        scattered = settings.scattered_dtype.itemsize if shards_are_pushed(settings) else 4
        if settings.cuts_each_gradient and settings.micro_batches == 1:
            full -= gradient_width(settings) * local
        work = max(work + width * held.around, (width + scattered) * held.around)
    elif settings.sums_gradients or settings.reduce == "exact":
        work += width * held.around
    return Moment(full, _gathered_at_end(held), 0, work + sent)


def _gathered_at_end(held: Held) -> int:
    """Return the bytes of weights that matmuls read at the end of backward: `fully_shard` has freed those that it
    gathered into memory of its own by then."""
    settings, plan = held.settings, held.settings.plan
    frees = plan.zero and plan.pp == 1 and not shards_are_pushed(settings) and not settings.lora.rank
    return 0 if frees else held.gathered


def _update_bytes(held: Held) -> int:
    """Return the bytes that the optimizer works with."""
    settings, plan = held.settings, held.settings.plan
    if settings.optimizer is None or settings.lora.rank:
        return 0
    blocks, parts = tuple(held.blocks), plan.shard * plan.tp
    return settings.optimizer.update_bytes(
        settings.model, blocks, plan.ranks_of_stage, parts, settings.dtype.itemsize
    )


def _sent_at_once(held: Held) -> int:
    """Return the bytes of what ZeRO's ranks send for exact sums, and receive: of a block or the rest of a stage."""
    settings = held.settings
    if settings.reduce == "fast" or settings.plan.shard == 1:
        return 0
    largest = max([*by_block(held.trained), held.around])
    return largest * (2 * settings.dtype.itemsize if settings.cuts_each_gradient else WIDTH_OF_SUMS)
