"""Samples to score, packed by length into padded batches. Every rank packs the same samples in the same way."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.inference.commands import told_by_rank_0
from dtgpt.inference.request import check_range
from dtgpt.models.config import ModelConfig
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

LENGTH_MULTIPLE = 16  # of the length of a batch: kernels are specialised for addresses that 16 divides


class Sample(NamedTuple):
    """Ids of which those after the first `context` are scored."""

    ids: Sequence[int]
    context: int = 1  # at least one id, since nothing predicts the first one


def fitted(context: Sequence[int], target: Sequence[int], positions: int) -> Sample:
    """Return the sample that scores `target` after `context`, of which the beginning is left out where a model does not
    have enough positions. The last id takes no position, since it is predicted and not read. Raise UserError where the
    target alone has too many ids."""
    if len(target) > positions:
        raise UserError(
            f"a continuation of {counted(len(target), 'token')} is longer than the model's {positions} positions; use "
            "data with shorter ones, or a model with more positions"
        )
    kept = context[max(0, len(context) + len(target) - positions - 1) :]
    return Sample([*kept, *target], len(kept))


class FlatSamples:
    """Samples in flat arrays of int64: `ids [N]`, `lengths [S]` and `contexts [S]`."""

    def __init__(self, ids: np.ndarray, lengths: np.ndarray, contexts: np.ndarray):
        self.ids, self.lengths, self.contexts = ids, lengths, contexts
        self.starts = np.cumsum(lengths) - lengths  # of each sample in `ids`
        self.target_ends = np.cumsum(lengths - contexts)  # of each sample in the array of all targets

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_targets(self) -> int:
        return int(self.target_ends[-1]) if len(self) else 0

    def targets_of(self, index: int) -> slice:
        """Return where the targets of a sample stand in the array of all targets."""
        end = int(self.target_ends[index])
        return slice(end - int(self.lengths[index] - self.contexts[index]), end)


def share_samples(mesh: Mesh, samples: Sequence[Sample] | None, config: ModelConfig) -> FlatSamples:
    """Return the samples of rank 0 on every rank; those of other ranks do not matter. Raise UserError, on every rank,
    for a sample that the model cannot score."""
    own = samples or ()
    (count, total), _ = told_by_rank_0(mesh, lambda: ((len(own), sum(len(sample.ids) for sample in own)), None))
    flat = torch.zeros(total + 2 * count, dtype=torch.int64)

    def fill() -> tuple[None, None]:
        numbers = flat.numpy()
        numbers[:count] = [len(sample.ids) for sample in own]
        numbers[count : 2 * count] = [sample.context for sample in own]
        numbers[2 * count :] = np.fromiter(chain.from_iterable(sample.ids for sample in own), np.int64, total)
        check_samples(samples_in(flat, count), config)
        return None, None

    told_by_rank_0(mesh, fill)
    if mesh.world > 1:
        dist.broadcast(flat, 0, group=mesh.commands)
    return samples_in(flat, count)


def samples_in(flat: Tensor, count: int) -> FlatSamples:
    """Return the samples in one array: lengths `[count]`, contexts `[count]`, ids."""
    numbers = flat.numpy()
    return FlatSamples(numbers[2 * count :], numbers[:count], numbers[count : 2 * count])


def check_samples(samples: FlatSamples, config: ModelConfig) -> None:
    """Raise UserError for the first sample that a model cannot score."""
    lengths, contexts = samples.lengths, samples.contexts
    wrong = (contexts < 1) | (contexts >= lengths)
    if wrong.any():
        length, context = lengths[wrong.argmax()], contexts[wrong.argmax()]
        raise UserError(
            f"a sample of {counted(int(length), 'token')} has a context of {context}; use 1 to {max(1, length - 1)}, "
            "and at least one token after it"
        )
    longest = int(lengths.max(initial=0))
    if longest > config.seq_length + 1:
        raise UserError(
            f"a sample of {counted(longest, 'token')} needs {longest - 1} positions, but the model has "
            f"{config.seq_length}; leave its beginning out"
        )
    if longest:
        check_range(int(samples.ids.min()), int(samples.ids.max()), config.vocab_size)


def pack(samples: FlatSamples, tokens: int, multiple: int, longest: int) -> list[tuple[np.ndarray, int]]:
    """Return batches of up to `tokens` tokens, padding included, longest first: indices of samples, and the length that
    they are padded to. `multiple`: of lengths below `longest`, the number of positions of the model."""
    order = np.argsort(-samples.lengths, kind="stable")
    batches, first = [], 0
    while first < len(order):
        inputs = int(samples.lengths[order[first]]) - 1
        length = min(-(-inputs // multiple) * multiple, longest)
        rows = max(1, tokens // length)
        batches.append((order[first : first + rows], length))
        first += rows
    return batches


class Rows(NamedTuple):
    """A batch on the CPU."""

    tokens: Tensor  # int64 [B, T]
    asked: Tensor  # int64 [M], indices into the flat B x T positions: those whose next token is scored
    targets: Tensor  # int64 [M], the next tokens
    places: Tensor  # int64 [M], where each target stands among those of all samples


def make_rows(samples: FlatSamples, indices: np.ndarray, length: int) -> Rows:
    """Return the batch of the samples with these indices, padded with id 0."""
    tokens = np.zeros((len(indices), length), np.int64)
    asked, targets, places = [], [], []
    for row, index in enumerate(indices):
        start, size, context = samples.starts[index], samples.lengths[index], samples.contexts[index]
        ids = samples.ids[start : start + size]
        tokens[row, : size - 1] = ids[:-1]
        asked.append(np.arange(row * length + context - 1, row * length + size - 1))
        targets.append(ids[context:])
        places.append(np.arange(size - context) + samples.target_ends[index] - (size - context))
    flat = map(np.concatenate, (asked, targets, places))
    return Rows(torch.from_numpy(tokens), *map(torch.from_numpy, flat))
