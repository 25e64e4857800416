"""Blend samples of several datasets in the proportions of their weights, in Megatron-LM's order.

Sample t comes from the dataset that is furthest below its fraction: the largest w_i max(t, 1) - (samples taken from i),
in float64, the first of equals (megatron/core/datasets/helpers.cpp, blended_dataset.py and
blended_megatron_dataset_builder.py, state of August 2026).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dtgpt.data.cached.file_array import Array, check_memory
from dtgpt.data.cached.folders import cached_index
from dtgpt.data.megatron.samples import SampleRequest, Samples, check_samples, load_samples
from dtgpt.data.megatron.token_shards import TokenSequences
from dtgpt.util.errors import UserError, shown

SURPLUS = 0.005  # that every dataset has ready over its fraction
MOST = 32766  # datasets, which are counted in 16 bits
BLOCK = 1 << 16  # samples of the order counted together


def parse_data_path(arguments: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes, and weights if any, of Megatron-LM's `--data-path`: prefixes, or weight and prefix in turns.
    Raises UserError."""
    arguments = [argument.strip() for argument in arguments]
    if not arguments:
        raise UserError("no dataset is given; give a prefix, or weights and prefixes in turns")
    weights = [as_weight(argument) for argument in arguments[::2]]
    if len(arguments) % 2 or all(weight is None for weight in weights):
        return arguments, None
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        wrong = arguments[2 * weights.index(None)]
        raise UserError(
            f"{shown(wrong)} is not a weight of a dataset; give weights and prefixes in turns, or prefixes only"
        )
    return arguments[1::2], found


def as_weight(text: str) -> float | None:
    """Return the number in a word of a data path, or None where the word is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights scaled to the sum 1, rounded as Megatron-LM rounds them. Raises UserError."""
    values = np.array(weights, dtype=np.float64)
    with np.errstate(all="ignore"):
        fractions = values / np.sum(values)  # 0 where a weight is too small beside the others
    if not 0 < len(values) <= MOST or not ((values > 0) & (fractions > 0) & np.isfinite(fractions)).all():
        raise UserError(f"the weights {list(weights)} are not a blend; give 1 to {MOST} positive numbers")
    return fractions.tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Return how many samples the blend takes of each dataset, by normalised weights, and how many are asked of it."""
    taken = [ceil(num_samples * weight) for weight in weights]
    return taken, [ceil(count * (1 + SURPLUS)) for count in taken]


def blend_order(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset (int16 [size]) and the sample of that dataset (int64 [size]) of every sample of a blend.

    `weights` are normalised. Dataset i gives `limits[i]` samples at most; together these are `size` at least. Takes
    about 1.5 s per million samples, once: the order is cached.
    """
    dataset_index, dataset_sample_index = np.empty(size, np.int16), np.empty(size, np.int64)
    shares, taken, lag = np.array(weights, np.float64), np.zeros(len(weights)), np.empty(len(weights))
    most = np.full(len(weights), np.inf) if limits is None else np.array(limits, np.float64)
    taken[most == 0] = np.inf
    for t in range(size):
        np.multiply(shares, max(t, 1.0), out=lag)
        np.subtract(lag, taken, out=lag)
        chosen = lag.argmax()  # the first of equals
        dataset_index[t], dataset_sample_index[t] = chosen, taken[chosen]
        taken[chosen] += 1.0
        if taken[chosen] == most[chosen]:
            taken[chosen] = np.inf  # lags least from here on
    return dataset_index, dataset_sample_index


class Blend:
    """Samples of several datasets, by number: `dataset_index` int16 [N], `dataset_sample_index` int64 [N]."""

    def __init__(self, datasets: Sequence[Samples], dataset_index: Array, dataset_sample_index: Array):
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
        """Return the tokens int64 [B, T + 1] of the samples `samples [B]`, on the CPU. Raises IndexError."""
        samples = check_samples(samples, len(self))
        chosen, numbers = self.dataset_index[samples], self.dataset_sample_index[samples]
        windows = torch.empty(len(samples), self.datasets[0].index.seq_length + 1, dtype=torch.int64)
        for i in np.unique(chosen):
            mine = np.flatnonzero(chosen == i)
            windows[torch.from_numpy(mine)] = self.datasets[i].windows(numbers[mine])
        return windows


def load_blend(
    sequences: Sequence[TokenSequences], weights: Sequence[float] | None, request: SampleRequest
) -> Samples | Blend:
    """Return the samples that are asked of one or several datasets.

    With weights, the request needs a number of samples, and the blend is at most a sample per dataset longer. Without,
    each dataset has one epoch, in proportion to its samples: all of them, or the first `num_samples`. One process of a
    machine calls this first, then all others. Raises UserError.
    """
    count = request.num_samples
    if weights is not None and len(weights) != len(sequences):
        raise UserError(f"{len(weights)} weights are given for {len(sequences)} datasets; give one each, or none")
    if len(sequences) == 1 and (weights is None or request.split is None):
        return load_samples(sequences[0], request)
    if weights is not None:
        if count is None:
            raise UserError("a blend with weights has no end of its own; give num_samples, or no weights")
        weights = normalised(weights)
        taken, counts = blend_sizes(weights, count)
        asked = (replace(request, num_samples=number) for number in counts)
        datasets = [load_samples(*pair) for pair in zip(sequences, asked, strict=True)]
        return Blend(datasets, *_load_order(weights, sum(taken), request.cache))
    datasets = [load_samples(s, replace(request, num_samples=None)) for s in sequences]
    sizes = [len(dataset) for dataset in datasets]
    if 0 in sizes:
        raise UserError(
            f"{request.name(sequences[sizes.index(0)])} is shorter than one sample of {request.seq_length + 1} "
            "tokens; leave the dataset out of the blend, give weights, or use shorter samples"
        )
    return Blend(datasets, *_load_order(sizes, None if count is None else min(count, sum(sizes)), request.cache))


def load_each_once(
    sequences: Sequence[TokenSequences], weights: Sequence[float] | None, request: SampleRequest
) -> Samples | Blend:
    """Return the samples to evaluate on: the first `num_samples` of `load_blend`, but no window twice. When a dataset
    has no more, the others of the blend go on in their proportions. Raises UserError."""
    if weights is None and len(sequences) > 1:
        return load_blend(sequences, None, request)
    datasets = [_one_epoch(s, request) for s in sequences]
    if weights is None or (request.split is None and len(datasets) == 1):
        return datasets[0]
    sizes = [len(dataset) for dataset in datasets]
    size = sum(sizes) if request.num_samples is None else min(request.num_samples, sum(sizes))
    return Blend(datasets, *_load_order(normalised(weights), size, request.cache, sizes))


def _one_epoch(sequences: TokenSequences, request: SampleRequest) -> Samples:
    """Return one epoch; if the part is shorter than a sample, one sample of its documents repeated."""
    samples = load_samples(sequences, replace(request, num_samples=None))
    return samples if len(samples) else load_samples(sequences, replace(request, num_samples=1))


def _load_order(
    weights: Sequence[float], size: int | None, cache: Path | None, limits: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """Return the arrays of a `Blend`. size None: `weights` are numbers of samples, and all of them are taken. limits:
    the most samples that each dataset gives."""
    shares = normalised(weights)  # again, where they were: Megatron-LM does, which may change their last bit
    if size is None:
        limits = [int(weight) for weight in weights]
        size = sum(limits)
    check_memory(size * (2 + 8), f"a blend of {size:,} samples")

    def build() -> dict[str, np.ndarray]:
        return dict(zip(("dataset", "dataset_sample"), blend_order(shares, size, limits), strict=True))

    settings: dict[str, object] = {
        "kind": "blend",
        "weights": [weight.hex() for weight in shares],
        "size": size,
        "limits": limits,
    }
    arrays = cached_index(cache, settings, build)
    return arrays["dataset"], arrays["dataset_sample"]
