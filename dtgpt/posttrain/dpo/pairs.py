"""Pairs of answers packed into samples: both answers of a pair are in one sample, with the prompt before each, and
every answer is kept apart from the others as chats are. Pairs that are longer than a sample are left out."""

import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.batch import Batch
from dtgpt.posttrain.chats.packed import BEGINS, ChatDataset, PackedPart, counts_in, pack, parts_of, tell_uncounted
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig


def pack_pairs(sequences: IndexedDataset, pairs: range, seq_length: int, seed: int) -> tuple[PackedPart, int]:
    """Return the samples of the pairs of these numbers, and how many pairs are left out, since they are longer than a
    sample. Those with an answer of which nothing counts are left out, too."""
    each = sequences.lengths[2 * pairs.start : 2 * pairs.stop].astype(np.int64)
    lengths = each.reshape(-1, 2).sum(1)
    counts = counts_in(sequences, np.arange(2 * pairs.start, 2 * pairs.stop), each).reshape(-1, 2).all(1)
    fits = lengths <= seq_length + 1
    used = np.flatnonzero(fits & counts)
    samples = pack(lengths[used], seq_length + 1, seed)
    order = used[[pair for sample in samples for pair in sample]] + pairs.start if samples else used
    bounds = 2 * np.cumsum([0, *map(len, samples)])
    answers = (2 * order[:, None] + [0, 1]).reshape(-1)
    return PackedPart(sequences, seq_length, answers, bounds, int((~counts).sum())), int((~fits & counts).sum())


class PairDataset(ChatDataset):
    """Packed pairs. `reference`: by the name of a part, log-probabilities fp64 `[C]` of the answers `PackedPart.chats`
    under the model with which the run began."""

    def __init__(self, tokenizer: Tokenizer, parts: dict[str, PackedPart], source: str, seed: int):
        super().__init__(tokenizer, parts, source, seed)
        self.parts, self.reference = parts, dict[str, np.ndarray]()

    @cached_property
    def answers(self) -> int:
        """The largest number of answers in a sample, 2 P."""
        return max(int(np.diff(part.bounds).max(initial=0)) for part in self.parts.values())

    @cached_property
    def pairs_digest(self) -> str:
        """Return the digest of what `reference` belongs to."""
        packed = [hashlib.sha256(part.chats.tobytes()).hexdigest() for part in self.parts.values()]
        return hashlib.sha256(json.dumps([self.digest, *packed]).encode()).hexdigest()

    only_for = "pairs of answers, but dpo.beta=0; give --dpo.beta, such as 0.1"

    def bytes_per_token(self) -> float:
        """Return 0: the loss is not that of tokens."""
        return 0.0

    def references(self, sample_ids: Tensor) -> Tensor:
        """Return the reference of the training samples, fp64 `[B, 2 P]`, 0 where a sample has fewer answers."""
        part, values = self.train, self.reference["train"]
        found = np.zeros((len(sample_ids), self.answers))
        for row, sample in zip(found, self.samples(sample_ids), strict=True):
            own = values[part.bounds[sample] : part.bounds[sample + 1]]
            row[: len(own)] = own
        return torch.from_numpy(found)


def with_answers(batch: Batch, windows: Tensor, answers: int, reference: Tensor | None) -> Batch:
    """Return the batch of packed pairs, with which answer each target belongs to. windows: as of `PackedPart.windows`;
    answers: 2 P; reference: `[B, 2 P]`."""
    number = ((windows[..., 1] & BEGINS) > 0).cumsum(1)[:, 1:] - 1
    assert batch.loss_weights is not None
    of_answer = number[..., None] == torch.arange(answers, device=windows.device)
    of_answer &= batch.loss_weights[..., None] > 0
    there = of_answer.any(1)
    weights = (there[:, 0::2] & there[:, 1::2]).float()
    return batch._replace(loss_weights=weights, by_token=of_answer, by_sample=reference)


def load_pairs(
    data: "DataConfig", opened: dict[str, IndexedDataset], tokenizer: Tokenizer, seq_length: int, seed: int
) -> PairDataset:
    """Return the pairs of `data` as `load_chats` does chats. Raises UserError."""
    left_out = []

    def packed(sequences: IndexedDataset, pairs: range) -> PackedPart:
        part, missing = pack_pairs(sequences, pairs, seq_length, seed)
        left_out.append(missing)
        return part

    parts = parts_of(data, opened, packed, size=2)
    train, missing = parts["train"], sum(left_out)
    if len(train) or not missing:
        tell_uncounted(parts, "pair", str(data.path))
    if not len(train):
        reason = f" ({counted(missing, 'pair')} of more than {seq_length + 1} tokens left out)" if missing else ""
        raise UserError(f"{data.path} has no pair to train on{reason}; add pairs, or use a larger --seq_length")
    filled = 1 - train.num_tokens / (len(train) * (seq_length + 1))
    say(
        f"{counted(len(train.chats) // 2, 'pair')} in {counted(len(train), 'sample')} (an epoch), of which "
        f"{filled:.1%} is padding; {counted(missing, 'pair')} of more than {seq_length + 1} tokens left out",
        warning=missing > 0,
    )
    return PairDataset(tokenizer, parts, str(data.path), seed)
