"""Keep decisions of dropout as the bits of words: those of attention's probabilities.

An element (.., row, column) keeps its value where a number of 16 binary digits is at least the threshold. The digits of
32 elements that are at one place make a word, so that one logical operation compares that digit of 32 elements, and
what remains of a draw is Philox. Eight low digits decide only where the eight high ones equal the threshold's, so rows
SHARING apart and the halves of a group of 64 columns have them in common. Each decision still has its exact probability
k / 2^16; two with common digits are dependent: both drop with a probability that is larger than the square by at most
2^-18.

Column c belongs to group c // 64, half (c % 64) // 32 and lane c % 32, which is at the bit `bit_of_lane` of words. The
counters of Philox are (4 group + i, row, ..): words of i = 2 half and i = 2 half + 1 are the digits 8 to 15 of a half,
and those of i = 0 and 1 with the row 2^31 + row % SHARING are the digits 0 to 7 of both halves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.random.philox import block_words, covering_blocks

GROUP = 64  # columns whose decisions make a word of int64
HALF = 32
SHARING = 128  # rows this far apart have their low digits in common
LOW_DIGITS = 8
SHARED_ROWS = 1 << 31  # no row of a tensor: dimensions are below it


def bit_of_lane(lanes: Any) -> Any:
    """Return the bit, 0 ... 31, of the decisions of `lanes`, 0 ... 31, in a word: the order in which the tensor cores'
    registers hold columns, see `dtgpt.ops.kernels.attention.flash_mask.kept`."""
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
    words = block_words(key, leading, range(4 * groups.start, 4 * groups.stop))
    return torch.stack(words, dim=-1).unflatten(-2, (len(groups), 4))


def unpack_words(words: Tensor, columns: range) -> Tensor:
    """Return bool `[.., columns]`, True where an element is kept, for what `keep_words` returns for these columns."""
    lanes = torch.arange(GROUP, device=words.device)
    kept = (words.unsqueeze(-1) >> (bit_of_lane(lanes % HALF) + (lanes // HALF) * HALF)) & 1
    return kept.bool().flatten(-2)[..., covering_blocks(columns, GROUP)[1]]
