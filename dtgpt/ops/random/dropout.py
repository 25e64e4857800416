"""Dropout (Srivastava et al. 2014) whose mask is a pure function of (key, global element index).

PyTorch's dropout draws from a generator's state, so that a mask depends on what was drawn before it: on the plan, on
the micro-batch size and on what is computed again in backward.

Inductor fuses the definition, which is plain torch. Philox runs once for every eight neighbours of the last dimension
(each of its four words serves two of them with 16 bits) and leaves one byte, so the kernel that applies the mask reads
1/16 of the bytes of a bf16 activation. Backward draws the mask again: nothing of the size of the activation is saved.

The masks of attention's probabilities follow a rule of their own, which is cheaper where decisions are kept as bits
(`attention_dropout`). An element (.., row, column) keeps its value where a number of 16 binary digits is at least the
threshold. The digits of 32 elements that are at one place make a word, so that one logical operation compares that
digit of 32 elements, and what remains of a draw is Philox. Eight low digits decide only where the eight high ones equal
the threshold's, so rows SHARING apart and the halves of a group of 64 columns have them in common. Each decision still
has its exact probability k / 2^16; two with common digits are dependent: both drop with a probability that is larger
than the square by at most 2^-18.

Column c belongs to group c // 64, half (c % 64) // 32 and lane c % 32, which is at the bit `bit_of_lane` of words. The
counters of Philox are (4 group + i, row, ..): words of i = 2 half and i = 2 half + 1 are the digits 8 to 15 of a half,
and those of i = 0 and 1 with the row 2^31 + row % SHARING are the digits 0 to 7 of both halves.

Sharding rule: a shard passes the global index of its first element as `start` and draws its part of the global mask.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtgpt.ops.operation import Operation, load_kernels
from dtgpt.ops.random.philox import block_words, covering_blocks, few_numbers, fold

LANES = 8  # elements that share one evaluation of Philox
Site = tuple  # (key [B, 2] or None, p) and, of a shard, the index of its first element
LEVELS = 1 << 16  # a keep decision compares 16 bits, so p is rounded to a multiple of 2^-16
# Of attention's probabilities:
GROUP = 64  # columns whose decisions make a word of int64
EVALUATIONS = 4  # of Philox, for a group of one row
HALF = 32
SHARING = 128  # rows this far apart have their low digits in common
LOW_DIGITS = 8
SHARED_ROWS = 1 << 31  # no row of a tensor: dimensions are below it


def threshold(p: float) -> int:
    """Return how many of the 2^16 equally likely values drop an element."""
    return min(round(p * LEVELS), LEVELS - 1)


def keep_scale(p: float) -> float:
    """Return the exact inverse of the fraction that is kept, so that the mean of kept elements is unbiased."""
    return LEVELS / (LEVELS - threshold(p))


def keep_bytes(key: Tensor, ranges: Sequence[range], p: float) -> Tensor:
    """Return keep decisions, eight to a byte: uint8 `[*key batch, *leading, blocks]`, bit i for lane i of the block."""
    *leading, last = ranges
    blocks, _ = covering_blocks(last, LANES)
    drop = threshold(p)
    halves = [half for word in block_words(key, leading, blocks) for half in (word & 0xFFFF, word >> 16)]
    return as_bits([half >= drop for half in halves])


def keep_mask(key: Tensor, ranges: Sequence[range], p: float) -> Tensor:
    """Return bool `[*key batch, *ranges]`, True where an element is kept: that part of the whole tensor's mask."""
    if (few := few_numbers(key)) and (mask := few.keep_mask(key, ranges, threshold(p))) is not None:
        return mask
    return unpack_bytes(keep_bytes(key, ranges, p), covering_blocks(ranges[-1], LANES)[1])


def as_bits(lanes: Sequence[Tensor]) -> Tensor:
    """Return uint8 whose bit i is `lanes[i]`, bool and all of one shape."""
    return functools.reduce(operator.or_, (lane.to(torch.uint8) << i for i, lane in enumerate(lanes)))


def unpack_bytes(packed: Tensor, cut: slice) -> Tensor:
    """Return bool `[.., elements]` for decisions that lie eight to a byte. cut: the elements to return of those
    in all bytes."""
    lanes = torch.arange(LANES, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> lanes) & 1).bool().flatten(-2)[..., cut]


def bit_of_lane(lanes: Any) -> Any:
    """Return the bit, 0 ... 31, of the decisions of `lanes`, 0 ... 31, in a word: the order in which the tensor cores'
    registers hold columns, so that a kernel need not move them."""
    return ((lanes & 1) << 4) | (lanes & 8) | ((lanes & 16) >> 2) | ((lanes & 6) >> 1)


def keep_words(key: Tensor, ranges: Sequence[range], drop: int) -> Tensor:
    """Return keep decisions, 64 to a word: int64 `[*key batch, *leading, groups]`, the low half for the first 32 lanes.

    ranges: of two to four dimensions, the last two of which are rows and columns; groups: those of 64 columns that
    cover the columns. drop: the threshold, how many of 2^16 values drop an element.
    """
    *leading, rows, columns = ranges
    groups, _ = covering_blocks(columns, GROUP)
    own = _digits(key, [*leading, rows], groups).unflatten(-2, (2, 2)).flatten(-2)  # [.., rows, groups, half, 8]
    # Bitwise operations, since Inductor would fold % and + into its 32-bit index algebra.
    row = torch.arange(rows.start, rows.stop, rows.step, device=key.device) & (SHARING - 1)
    shared = _digits(key, [*leading, row[:SHARING] | SHARED_ROWS], groups)[..., :2, :].flatten(-2).unsqueeze(-2)
    shared = shared.index_select(-4, torch.arange(len(row), device=key.device) % SHARING)
    kept = torch.full_like(own[..., 0], (1 << HALF) - 1)
    for digit in range(16):
        word = shared[..., digit] if digit < LOW_DIGITS else own[..., digit - LOW_DIGITS]
        kept = kept & word if drop >> digit & 1 else kept | word
    return (kept[..., 0] | kept[..., 1] << HALF).contiguous()


def _digits(key: Tensor, leading: Sequence[range | Tensor], groups: range) -> Tensor:
    """Return the words of the four evaluations of each group: int64 `[*key batch, *leading, groups, 4, 4]`."""
    words = block_words(key, leading, range(EVALUATIONS * groups.start, EVALUATIONS * groups.stop))
    return torch.stack(words, dim=-1).unflatten(-2, (len(groups), EVALUATIONS))


def unpack_words(words: Tensor, columns: range) -> Tensor:
    """Return bool `[.., columns]`, True where an element is kept, for what `keep_words` returns for these columns."""
    lanes = torch.arange(GROUP, device=words.device)
    kept = (words.unsqueeze(-1) >> (bit_of_lane(lanes % HALF) + (lanes // HALF) * HALF)) & 1
    return kept.bool().flatten(-2)[..., covering_blocks(columns, GROUP)[1]]


def attention_mask(key: Tensor, ranges: Sequence[range], p: float) -> Tensor:
    """Return bool `[*key batch, *ranges]`, True where `attention_dropout` keeps an element."""
    if (few := few_numbers(key)) and (mask := few.attention_mask(key, ranges, threshold(p))) is not None:
        return mask
    return unpack_words(keep_words(key, ranges, threshold(p)), ranges[-1])


def _apply(x: Tensor, key: Tensor, p: float, start: Sequence[int], attention: bool) -> Tensor:
    batch = key.dim() - 1
    ranges = [range(begin, begin + size) for begin, size in zip(start, x.shape[batch:], strict=True)]
    mask = attention_mask if attention else keep_mask
    return torch.where(mask(key, ranges, p), x * keep_scale(p), 0)


DROPOUT = Operation("dropout", _apply, "x / (1 - p) where a number of (key, index) is at least p, else 0")


def dropout(x: Tensor, key: Tensor, p: float, start: Sequence[int] | None = None) -> Tensor:
    """Zero each element with probability `p` (rounded to a multiple of 2^-16) and scale the others to keep the mean.

    x: `[*batch, *rest]`; key: int64 `[*batch, 2]`, one for each batch entry (a sample). The mask of an entry depends on
    its key and on the index within `rest` alone. `rest` has 1 to 4 dimensions. start: global index in `rest` of x's
    first element, zeros by default.
    """
    return _dropped(x, key, p, start, attention=False)


def attention_dropout(x: Tensor, key: Tensor, p: float, start: Sequence[int] | None = None) -> Tensor:
    """Return the dropout of probabilities, by the mask that is theirs (`attention_mask`). x: attention's probabilities
    `[*batch, .., queries, columns]`."""
    return _dropped(x, key, p, start, attention=True)


def _dropped(x: Tensor, key: Tensor, p: float, start: Sequence[int] | None, attention: bool) -> Tensor:
    if p == 0:
        return x
    first = [0] * (x.dim() - key.dim() + 1) if start is None else list(start)
    if type(x) is Tensor and x.is_cpu and (few := few_numbers(key)):
        return few.dropout(x, key, p, first, attention)
    if torch.compiler.is_compiling() and (x.is_cpu or not _is_served(x, key, p, first, attention)):
        # Inductor fuses plain torch with its neighbours. Its partitioner would save the mask instead of drawing it
        # again; checkpoint forbids that, and saves the key alone, since the gradient does not need x.
        return checkpoint(_apply, x, key, p, first, attention, use_reentrant=False, preserve_rng_state=False)
    return torch.ops.dtgpt.dropout(x, key, p, first, attention)


def _is_served(*inputs: Any) -> bool:
    return load_kernels(DROPOUT.name) and any(kernel.serves(*inputs) for kernel in DROPOUT.kernels)


def _dropout_keys(key: Tensor, sample_ids: Tensor, sites: int) -> Tensor:
    """Return int64 `[B, sites, 2]`: the key of every dropout site for the samples `sample_ids` int64 `[B]`.

    key: int64 `[2]`, that of a step. A mask depends on the sample's index in the run, never on its place in a
    micro-batch.
    """
    return fold(key, sample_ids[:, None], torch.arange(sites, device=key.device))


dropout_keys = Operation("dropout_keys", _dropout_keys, "fold(key, sample, site)")


@torch.library.custom_op("dtgpt::dropout", mutates_args=())
def _dropout(x: Tensor, key: Tensor, p: float, start: list[int], attention: bool) -> Tensor:
    return DROPOUT(x, key, p, start, attention)


_dropout.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))


def _save(ctx, inputs, output) -> None:
    _, key, *ctx.settings = inputs
    ctx.save_for_backward(key)


def _backward(ctx, grad: Tensor):
    """Return the gradients; dropout is linear in x, so that of x is dropout with the same mask."""
    (key,) = ctx.saved_tensors
    return torch.ops.dtgpt.dropout(grad, key, *ctx.settings), None, None, None, None


_dropout.register_autograd(_backward, setup_context=_save)
