"""Which prompts are read in one pass. Plain Python: no tensor.

A pass takes prompts of one padded length, and that length follows from the prompt alone. A prompt's keys and values are
then computed by the same operations in any batch: attention within a sequence, norms within a row, and matrix products
of which each element is one sum in one order, if no product splits the dimension that it sums over.
"""

from collections import defaultdict
from collections.abc import Sequence

from dtgpt.inference.scheduler import PromptChunk

# Tokens of a prompt that is read at once, padded: few shapes, thus few graphs.
PROMPT_LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# The next two are estimates: the batch of the training forward (benchmarks/notes/steps.md), and the latency of a short
# pass.
BATCH_TOKENS = 8192  # most tokens of a pass over several prompts, padding included; more take memory
FEW_TOKENS = 256  # a pass over fewer takes as long, since it reads all weights
MOST_PROMPTS = 64  # of a pass


def padded_length(tokens: int, positions: int) -> int | None:
    """Return the length to which a prompt of so many tokens is padded, in a cache of `positions`; None where it is not
    read at once."""
    length = next((size for size in PROMPT_LENGTHS if size >= tokens), None)
    return None if length is None or length > positions else length


def batch_sizes(length: int, most_tokens: int) -> list[int]:
    """Return the numbers of prompts of a padded length that a pass of at most `most_tokens` may have, ascending: one,
    and powers of two, of which those that save nothing are left out."""
    sizes, size = [1], 2
    while size <= MOST_PROMPTS and size * length <= most_tokens:
        if size * length >= FEW_TOKENS:
            sizes.append(size)
        size *= 2
    return sizes


def padded_size(prompts: int, length: int, most_tokens: int) -> int:
    """Return the number of prompts to which a pass over `prompts` of them is padded, at most the largest size."""
    sizes = batch_sizes(length, most_tokens)
    return next(size for size in sizes if size >= min(prompts, sizes[-1]))


def passes_over(prompts: int, length: int, most_tokens: int) -> list[int]:
    """Return the numbers of prompts of each pass over `prompts` of a padded length. A pass is padded by a quarter at
    most, unless it has few tokens."""
    passes = []
    while prompts:
        padded = padded_size(prompts, length, most_tokens)
        if 4 * prompts < 3 * padded and padded * length > FEW_TOKENS:
            padded = max(size for size in batch_sizes(length, most_tokens) if size < padded)
        passes.append(min(padded, prompts))
        prompts -= passes[-1]
    return passes


def group_prompts(chunks: Sequence[PromptChunk], positions: int, most_tokens: int) -> list[list[PromptChunk]]:
    """Return the chunks to read together, two or more in each pass of at most `most_tokens`: whole prompts or their
    beginnings, of one padded length in a cache of `positions`. All other chunks are to be read alone, after these."""
    by_length: dict[int, list[PromptChunk]] = defaultdict(list)
    for chunk in chunks:
        if chunk.first == 0 and (length := padded_length(chunk.stop, positions)):
            by_length[length].append(chunk)
    groups = []
    for length, alike in by_length.items():
        first = 0
        for count in passes_over(len(alike), length, most_tokens):
            groups.append(alike[first : first + count])
            first += count
    return [group for group in groups if len(group) > 1]
