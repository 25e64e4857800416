"""Samples of several datasets in the proportions of their weights, in Megatron-LM's order.

Sample t comes from the dataset that lags most behind its share: the largest w_i max(t, 1) - (samples taken from i), in
float64, the first of equals (megatron/core/datasets/helpers.cpp, blended_dataset.py and
blended_megatron_dataset_builder.py, state of August 2026).

That choice depends on all before it, but it forgets: from any counts near the shares it soon makes the same choices.
So the order is cut into lanes, which NumPy computes side by side, each from the counts that it should roughly begin
with. Where a lane did not begin with the very counts with which the lane before it ended, it is computed again. Lane 0
begins right, so in the end all are right; how many were wrong decides the time only.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dtgpt.data.file_array import Array
from dtgpt.data.index_cache import cached, check_memory
from dtgpt.data.samples import Samples, check_samples, load_samples, part_name
from dtgpt.data.token_shards import TokenSequences
from dtgpt.errors import UserError, shown

SURPLUS = 0.005  # that every dataset has ready over its share
MOST = 32766  # datasets, which are counted in 16 bits
LANE = 512  # samples of a lane at least
WIDTH = 20_000  # lanes x datasets: what is computed side by side
BLOCK = 1 << 16  # samples of the order counted together
WARM_UP = 128  # samples after which most lanes agree
FEW = 32  # lanes x datasets that are quicker computed one by one than side by side


def parse_data_path(arguments: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Megatron-LM's `--data-path`: prefixes, or weight and prefix in turns. Raises UserError."""
    arguments = [argument.strip() for argument in arguments]
    if not arguments:
        raise UserError("no dataset is given; give a prefix, or weights and prefixes in turns")
    weights = [as_weight(argument) for argument in arguments[::2]]
    if len(arguments) % 2 or all(weight is None for weight in weights):
        return arguments, None
    if None in weights:
        wrong = arguments[2 * weights.index(None)]
        raise UserError(
            f"{shown(wrong)} is no weight of a dataset; give weights and prefixes in turns, or prefixes only"
        )
    return arguments[1::2], weights


def as_weight(text: str) -> float | None:
    """None where the word of a data path is no number."""
    try:
        return float(text)
    except ValueError:
        return None


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1, rounded as Megatron-LM rounds them. Raises UserError."""
    values = np.array(weights, dtype=np.float64)
    if len(values) == 0 or len(values) > MOST or not (np.isfinite(values).all() and (values > 0).all()):
        raise UserError(f"the weights {list(weights)} are no blend; give 1 to {MOST} positive numbers")
    return (values / np.sum(values)).tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Of each dataset, by normalised weights: the samples that the blend takes, and those asked of the dataset."""
    taken = [ceil(num_samples * weight) for weight in weights]
    return taken, [ceil(count * (1 + SURPLUS)) for count in taken]


def blend_order(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The dataset (int16 [size]) and the sample of that dataset (int64 [size]) of every sample of a blend. `limits`:
    the most samples that each dataset gives, which are `size` together at least."""
    most = None if limits is None else np.array(limits, np.float64)
    order = _greedy(np.array(weights, np.float64), size, most)
    return order, _occurrences(order, len(weights))


def exhaustive_order(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same for a blend that takes all samples of every dataset."""
    limits = np.array(sizes, np.float64)
    order = _greedy(limits / limits.sum(), int(sum(sizes)), limits)
    return order, _occurrences(order, len(sizes))


def _occurrences(order: np.ndarray, num_datasets: int) -> np.ndarray:
    """How often each entry stood before it."""
    samples, before = np.empty(len(order), np.int64), np.zeros(num_datasets, np.int64)
    for begin in range(0, len(order), BLOCK):
        block = order[begin : begin + BLOCK]
        counts = np.bincount(block, minlength=num_datasets)
        by_dataset = np.argsort(block, kind="stable")
        first = before - (np.cumsum(counts) - counts)
        samples[begin : begin + BLOCK][by_dataset] = np.arange(len(block)) + np.repeat(first, counts)
        before += counts
    return samples


def _greedy(weights: np.ndarray, size: int, limits: np.ndarray | None) -> np.ndarray:
    lanes = max(1, min(size // LANE, WIDTH // len(weights)))
    steps = -(-size // lanes)
    order = np.empty((lanes, steps), np.int16)
    first = np.arange(lanes) * float(steps)
    start = np.zeros((lanes, len(weights)))
    if lanes > 1:
        start[1:] = _guess(weights, first[1:] - WARM_UP)
        _side_by_side(weights, limits, first[1:] - WARM_UP, start[1:], np.empty((lanes - 1, WARM_UP), np.int16))
    end = start.copy()
    wrong = np.arange(lanes)
    while len(wrong) * len(weights) > FEW:
        counts, found = start[wrong], np.empty((len(wrong), steps), np.int16)
        _side_by_side(weights, limits, first[wrong], counts, found)
        end[wrong], order[wrong] = counts, found
        wrong = 1 + np.flatnonzero((start[1:] != end[:-1]).any(1))
        start[wrong] = end[wrong - 1]
    for lane in range(lanes) if len(wrong) else ():
        begin = end[lane - 1] if lane else start[0]
        if lane in wrong or (start[lane] != begin).any():
            order[lane], end[lane] = _one_by_one(weights, limits, first[lane], begin, steps)
    return order.reshape(-1)[:size]


def _guess(weights: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Whole counts [lanes, datasets] near the shares of `first` samples: those rounded off most get what is left."""
    shares = first[:, None] * weights
    counts = np.floor(shares)
    rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)
    return counts + (rank < (first - counts.sum(1))[:, None])


def _side_by_side(
    weights: np.ndarray, limits: np.ndarray | None, first: np.ndarray, counts: np.ndarray, order: np.ndarray
) -> None:
    """The choices `order` [lanes, steps] from sample `first` [lanes] on; `counts` [lanes, datasets] goes along."""
    lanes, steps = order.shape
    lag, flat, begins = np.empty(counts.shape), counts.reshape(-1), np.arange(lanes) * len(weights)
    for step in range(steps):
        np.multiply(np.maximum(first + step, 1.0)[:, None], weights, out=lag)
        np.subtract(lag, counts, out=lag)
        if limits is not None:
            lag[counts >= limits] = -np.inf
        chosen = lag.argmax(1)  # the first of equals
        flat[begins + chosen] += 1.0
        order[:, step] = chosen


def _one_by_one(
    weights: np.ndarray, limits: np.ndarray | None, first: float, counts: np.ndarray, steps: int
) -> tuple[list[int], list[float]]:
    """The choices of one lane, and the counts at its end."""
    shares, taken, order = weights.tolist(), counts.tolist(), []
    most = [np.inf] * len(shares) if limits is None else limits.tolist()
    for step in range(steps):
        t = max(first + step, 1.0)
        lag = [w * t - c if c < m else -np.inf for w, c, m in zip(shares, taken, most, strict=True)]
        chosen = lag.index(max(lag))
        taken[chosen] += 1.0
        order.append(chosen)
    return order, taken


class Blend:
    """The samples of several datasets, by number: `dataset_index` int16 [N], `dataset_sample_index` int64 [N]."""

    def __init__(
        self, datasets: Sequence[Samples], dataset_index: Array,
        dataset_sample_index: Array,
    ):  # fmt: skip
        self.datasets = list(datasets)
        self.dataset_index, self.dataset_sample_index = dataset_index, dataset_sample_index
        counts = np.zeros(len(self.datasets), np.int64)
        for begin in range(0, len(dataset_index), BLOCK):
            counts += np.bincount(dataset_index[begin : begin + BLOCK], minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if len(dataset) < count:
                raise UserError(
                    f"the blend takes {count} samples of {dataset.sequences.name}, which has {len(dataset)} ready; ask "
                    "for more samples, or give weights that differ less"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def windows(self, samples: ArrayLike) -> Tensor:
        """Tokens int64 [B, T + 1] of the samples `samples [B]`, on the CPU. Raises IndexError."""
        samples = check_samples(samples, len(self))
        chosen, numbers = self.dataset_index[samples], self.dataset_sample_index[samples]
        windows = None
        for i in np.unique(chosen):
            mine = torch.from_numpy(np.flatnonzero(chosen == i))
            part = self.datasets[i].windows(numbers[mine.numpy()])
            windows = part.new_empty(len(samples), part.shape[1]) if windows is None else windows
            windows[mine] = part
        return self.datasets[0].windows([]) if windows is None else windows


def load_blend(
    sequences: Sequence[TokenSequences],
    weights: Sequence[float] | None,
    split: str | None,
    which: str,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    cache: Path | None,
) -> Samples | Blend:
    """The samples of `which` (train, valid or test) of one or several datasets.

    With weights, `num_samples` is needed, and the blend is at most a sample a dataset longer. Without, each dataset has
    one epoch, in proportion to its samples: all of them, or the first `num_samples`. `split` None: the datasets are
    there for `which` only. One process of a machine calls this first, then all others. Raises UserError.
    """
    if weights is not None and len(weights) != len(sequences):
        raise UserError(f"{len(weights)} weights are given for {len(sequences)} datasets; give one each, or none")
    if len(sequences) == 1 and (weights is None or split is None):
        return load_samples(sequences[0], split, which, seq_length, num_samples, seed, cache)
    if weights is not None and num_samples is None:
        raise UserError("a blend with weights has no end of its own; give num_samples, or no weights")
    taken, asked = None, [None] * len(sequences)
    if weights is not None:
        weights = normalised(weights)
        taken, asked = blend_sizes(weights, num_samples)
    datasets = [
        load_samples(s, split, which, seq_length, count, seed, cache) for s, count in zip(sequences, asked, strict=True)
    ]
    if taken is not None:
        return Blend(datasets, *_load_order(weights, sum(taken), cache))
    sizes = [len(dataset) for dataset in datasets]
    if 0 in sizes:
        raise UserError(
            f"{part_name(sequences[sizes.index(0)], split, which)} is shorter than one sample of {seq_length + 1} "
            "tokens; leave the dataset out of the blend, give weights, or use shorter samples"
        )
    return Blend(datasets, *_load_order(sizes, None if num_samples is None else min(num_samples, sum(sizes)), cache))


def load_each_once(
    sequences: Sequence[TokenSequences],
    weights: Sequence[float] | None,
    split: str | None,
    which: str,
    seq_length: int,
    most: int,
    seed: int,
    cache: Path | None,
) -> Samples | Blend:
    """The samples of `which` to evaluate on: the first `most` of `load_blend`, but no window twice. Where a dataset has
    no more, the others of the blend go on in their proportions. Raises UserError."""
    if weights is None and len(sequences) > 1:
        return load_blend(sequences, None, split, which, seq_length, most, seed, cache)
    datasets = [_one_epoch(s, split, which, seq_length, seed, cache) for s in sequences]
    if weights is None or (split is None and len(datasets) == 1):
        return datasets[0]
    sizes = [len(dataset) for dataset in datasets]
    return Blend(datasets, *_load_order(normalised(weights), min(most, sum(sizes)), cache, sizes))


def _one_epoch(
    sequences: TokenSequences, split: str | None, which: str, seq_length: int, seed: int, cache: Path | None
) -> Samples:
    """Where the part is shorter than a sample, one sample of its documents repeated."""
    samples = load_samples(sequences, split, which, seq_length, None, seed, cache)
    return samples if len(samples) else load_samples(sequences, split, which, seq_length, 1, seed, cache)


def _load_order(
    weights: Sequence[float], size: int | None, cache: Path | None, limits: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """`size` None: all samples, of which there are `weights`. `limits`: the most that each dataset gives."""
    shares = normalised(weights)  # again, where they were: Megatron-LM does, which may change their last bit
    count = sum(weights) if size is None else size
    check_memory(2 * count * (2 + 8), f"a blend of {count:,} samples")  # while it is built there are two of each

    def build() -> dict[str, np.ndarray]:
        order = exhaustive_order(weights) if size is None else blend_order(shares, size, limits)
        return dict(zip(("dataset", "dataset_sample"), order, strict=True))

    settings = {
        "kind": "blend", "weights": [float(w).hex() for w in shares],
        "size": list(weights) if size is None else size, **({"limits": list(limits)} if limits else {}),
    }  # fmt: skip
    arrays = build() if cache is None else cached(cache, settings, build)
    return arrays["dataset"], arrays["dataset_sample"]
