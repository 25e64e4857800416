"""Functional randomness: every random number is a pure function of (key, global element index).

There is no generator state. It would have to be kept apart or equal on the ranks, saved in checkpoints, and set back
where backward computes something again; a function has none of that to go wrong. A rank draws its part of a tensor
without drawing the rest.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11): it
turns a 64-bit key and a 128-bit counter into four words of 32 bits. CUDA (cuRAND) and Triton have the same generator,
so a fused kernel can draw the same words.

* A *key* is an int64 tensor `[..., 2]`, each entry a word of 32 bits; leading dimensions are a batch of keys.
* A *part* selects elements of a global tensor: one `range` per dimension (an int `n` means `range(n)`).
* The element (a, b, c, d) takes lane `d % lanes` of the evaluation with counter (d // lanes, c, b, a). The counter is
  the index itself, so values do not depend on the shape of the global tensor, and a shard that asks for its part gets
  exactly its part of the whole: `bits(key, part) == bits(key, whole)[part]`.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtgpt.util import seams

Selection = Sequence[int | range]

MASK = 0xFFFFFFFF
WORDS = 4  # words that one evaluation yields
ROUNDS = 10
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
# Philox's multipliers, less 2^32. A word times these stays inside int64, so that neither eager nor compiled C++
# ever overflows; `_multiply` adds the missing word * 2^32 to the high half.
MULTIPLIER_0, MULTIPLIER_1 = (multiplier - (1 << 32) for multiplier in MULTIPLIERS)
WEYL_0, WEYL_1 = WEYL
# Folding a key uses counters whose last word is this; a tensor's index never reaches it (dimensions < 2^31).
FOLD = MASK
FEW = 1 << 13  # elements for which NumPy, which starts sooner, is quicker than torch, which has several threads


def _multiply(word: Any, multiplier: int) -> tuple[Any, Any]:
    """Return the high and the low word of a product."""
    product = word * multiplier
    return ((product >> 32) + word) & MASK, product & MASK


def philox(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Evaluate Philox4x32-10.

    key: two words, counter: four words, each an int64 tensor or an int; their shapes broadcast to that of the four
    words returned, which are ints where all of them are.
    """
    k0, k1 = key
    # The `& MASK` also hides an arange from Inductor's index algebra, which would multiply it in 32 bits.
    c0, c1, c2, c3 = (c & MASK for c in counter)
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _multiply(c0, MULTIPLIER_0), _multiply(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def root_key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the key `[2]` of a run's seed (64 bits)."""
    return torch.tensor([seed & MASK, (seed >> 32) & MASK], dtype=torch.int64, device=device)


def fold(key: Tensor, *data: int | str | Tensor) -> Tensor:
    """Derive a new key from `key [..., 2]` and each of `data` in turn; shapes broadcast, the last dimension stays 2.

    An int or an int64 tensor enters as its 64 bits, a string as its 64-bit BLAKE2b digest.
    """
    # A round of few numbers takes torch longer to start than ints or NumPy to compute.
    if all(_is_plain(each) and each.numel() <= FEW for each in (key, *data) if isinstance(each, Tensor)):
        items = [item.numpy() if isinstance(item, Tensor) else item for item in data]
        words = _folded(key.tolist() if key.dim() == 1 else np.moveaxis(key.numpy(), -1, 0), *items)
        return torch.from_numpy(np.stack(np.broadcast_arrays(*words), axis=-1))
    return torch.stack(torch.broadcast_tensors(*_folded(key.unbind(-1), *data)), dim=-1)


def fold_words(seed: int, *data: int | str) -> tuple[int, int]:
    """Return the words of `fold(root_key(seed), *data)`."""
    return _folded((seed & MASK, (seed >> 32) & MASK), *data)


def _folded(key: Any, *data: Any) -> Any:
    """Return the two words of a key, as ints, arrays or tensors."""
    for item in data:
        number = _digest(item) if isinstance(item, str) else item
        key = philox(key, (number & MASK, (number >> 32) & MASK, 0, FOLD))[:2]
    return key


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _ranges(part: Selection) -> list[range]:
    return [p if isinstance(p, range) else range(p) for p in part]


def _indices(r: range | Tensor, device: torch.device) -> Tensor:
    return r if isinstance(r, Tensor) else torch.arange(r.start, r.stop, r.step, dtype=torch.int64, device=device)


def block_words(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> tuple[Tensor, ...]:
    """Return four words for every (leading index, block of the last dimension): int64 `[*key batch, *leading, blocks]`.

    leading: indices of each dimension, a range or int64 `[count]` on the key's device. Raises ValueError for more than
    four dimensions.
    """
    if len(leading) > 3:
        raise ValueError(f"the part has {len(leading) + 1} dimensions, but a counter holds at most 4")
    if (few := few_numbers(key)) and (words := few.words(key, leading, blocks)) is not None:
        return torch.from_numpy(words.astype("int64")).unbind(-1)
    dims = len(leading) + 1
    counter: list[Tensor | int] = [_indices(blocks, key.device)]
    for axis, r in enumerate(reversed(leading), start=2):
        counter.append(_indices(r, key.device).reshape(-1, *[1] * (axis - 1)))
    counter += [0] * (WORDS - len(counter))
    words = philox([k.reshape(*k.shape, *[1] * dims) for k in key.unbind(-1)], counter)
    shape = (*key.shape[:-1], *map(len, leading), len(blocks))
    return tuple(w.expand(shape) for w in words)


def few_numbers(key: Tensor) -> Any:
    """Return what makes few numbers sooner than torch does, where the host may read the key and a capability has it:
    functions like `block_words`, `keep_mask` and `attention_mask`, which return None for many, and `dropout`."""
    return _maker_of_few() if _is_plain(key) else None


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the host may read the tensor."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and tensor.device.type == "cpu"


@cache  # it is asked in each draw
def _maker_of_few() -> Any:
    return next(iter(seams.listed("few_words")), None)


def covering_blocks(r: range, lanes: int) -> tuple[range, slice]:
    """Return the blocks of `lanes` elements that cover `r`, and the slice that selects `r` from them.

    Raises ValueError for a negative step.
    """
    if len(r) == 0:
        return range(0), slice(0, 0)
    if r.step < 1:
        raise ValueError(f"a part may not run backwards, but its step is {r.step}")
    first, last = r[0] // lanes, r[-1] // lanes
    start = r[0] - first * lanes
    return range(first, last + 1), slice(start, start + (len(r) - 1) * r.step + 1, r.step)


def bits(key: Tensor, part: Selection) -> Tensor:
    """Return 32 random bits for every element of `part`: int64 `[*key batch, *part]` with values in [0, 2^32).

    All four words of an evaluation are used, one for each of four neighbours of the last dimension.
    """
    *leading, last = _ranges(part)
    blocks, cut = covering_blocks(last, WORDS)
    return torch.stack(block_words(key, leading, blocks), dim=-1).flatten(-2)[..., cut]


def _unit(word: Tensor) -> Tensor:
    """Map a word to float64 in the open interval (0, 1): the centre of one of 2^32 equal cells."""
    return (word.double() + 0.5) * 2.0**-32


def uniform(key: Tensor, part: Selection) -> Tensor:
    """Return a uniform float64 in the open interval (0, 1) for every element of `part`."""
    return _unit(bits(key, part))


def uniform_rows(key: Tensor, rows: Tensor, last: int) -> Tensor:
    """Return float64 `[B, last]`, whose row i is `uniform(key[i], [range(rows[i], rows[i] + 1), last])`.

    key: `[B, 2]`; rows: int64 `[B]`, on the device, so that the host need not know them.
    """
    blocks, cut = covering_blocks(range(last), WORDS)
    words = philox([k[:, None] for k in key.unbind(-1)], [_indices(blocks, key.device), rows[:, None], 0, 0])
    return _unit(torch.stack(words, dim=-1).flatten(-2)[..., cut])


def normal(key: Tensor, part: Selection) -> Tensor:
    """Return a standard normal float64 for every element of `part` (Box and Muller 1958: two words make two normals).

    Computed in float64, so that the float32 value that a weight takes is the same on every kind of device.
    """
    *leading, last = _ranges(part)
    blocks, cut = covering_blocks(last, WORDS)
    u = [_unit(w) for w in block_words(key, leading, blocks)]
    lanes = []
    for radius, angle in ((u[0], u[1]), (u[2], u[3])):
        radius, angle = torch.sqrt(-2 * torch.log(radius)), 2 * math.pi * angle
        lanes += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(lanes, dim=-1).flatten(-2)[..., cut]


def row_chunks(part: Selection, elements: int = 1 << 20) -> Iterator[tuple[slice, list[range]]]:
    """Split `part` along its first dimension into pieces of about `elements`; yield (rows of the result, piece)."""
    first, *rest = _ranges(part)
    rows = max(1, elements // max(1, math.prod(map(len, rest))))
    for begin in range(0, len(first), rows):
        yield slice(begin, begin + rows), [first[begin : begin + rows], *rest]
