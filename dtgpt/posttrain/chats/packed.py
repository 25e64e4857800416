"""Chats packed into samples, each chat apart from the others.

A sample has `seq_length` + 1 tokens. Chats are placed whole, the longest first, into the sample with the least room
that suffices; which of equally long ones meet, and the order of the samples in each epoch, are functions of the seed. A
chat that is longer than a sample is cut at its end. What is left of a sample is filled with tokens that do not count.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.dataset import PART_NAMES, AnswerStart, Dataset, HeldOutPart, check_vocabulary, warn_of_unused_rows
from dtgpt.data.documents.masks import document_bounds, reset_positions
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.megatron.paths import has_weights, prefix_of
from dtgpt.data.megatron.prepared import blended_with_chats, checked_prefixes, parsed_paths
from dtgpt.data.megatron.samples import split_range
from dtgpt.data.megatron.tokenizer_beside import tokenizer_of
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.batch import Batch, WindowMasks
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig

COUNTS, BEGINS = 1, 2  # marks of a token: its loss counts; a chat begins with it
PROBED = 256  # samples that are looked at before a run begins
LOOKED_AT = 4096  # chats whose weights are in memory at a time


@dataclass(frozen=True)
class PackedPart:
    """Samples of a part of the chats. `chats` int64 `[C]`: sequences of the dataset, sample by sample; `bounds` int64
    `[N + 1]`: where the chats of each sample are among them; `uncounted`: chats, or pairs, that are left out, since
    nothing counts in what a sample would have of them."""

    sequences: IndexedDataset
    seq_length: int
    chats: np.ndarray
    bounds: np.ndarray
    uncounted: int = 0

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def num_tokens(self) -> int:
        """Return the tokens of all chats, as far as they are in samples."""
        lengths = self.sequences.lengths[self.chats].astype(np.int64)
        return int(np.minimum(lengths, self.seq_length + 1).sum())

    def windows(self, samples: np.ndarray) -> Tensor:
        """Return int64 `[B, T + 1, 2]`: tokens, and the marks COUNTS and BEGINS of each."""
        width = self.seq_length + 1
        found = np.zeros((len(samples), width, 2), np.int64)
        for row, sample in zip(found, samples.tolist(), strict=True):
            chats = self.chats[self.bounds[sample] : self.bounds[sample + 1]]
            lengths = np.minimum(self.sequences.lengths[chats].astype(np.int64), width)
            begins, used = np.cumsum(lengths) - lengths, int(lengths.sum())
            zeros = np.zeros(len(chats), np.int64)
            row[:used, 0] = self.sequences.read(chats, zeros, lengths)
            row[:used, 1] = (self.sequences.read_weights(chats, lengths) > 0) * COUNTS
            row[begins, 1] = BEGINS
            row[used : used + 1, 1] = BEGINS  # of the padding
        return torch.from_numpy(found)


def packed_batch(windows: Tensor, dropout_keys: Tensor | None = None) -> Batch:
    """Return the batch of windows int64 `[B, T + 1, 2]` in which chats are kept apart, and only marked tokens count."""
    tokens, marks = windows.unbind(-1)
    ends = (marks[:, 1:] & BEGINS) > 0  # the next token begins another chat
    return Batch(
        tokens[:, :-1].contiguous(),
        dropout_keys=dropout_keys,
        targets=tokens[:, 1:].contiguous(),
        positions=reset_positions(ends),
        document_bounds=document_bounds(ends),
        loss_weights=((marks[:, 1:] & COUNTS) > 0).float(),
    )


def chat_beginning(sequences: IndexedDataset, chat: int) -> AnswerStart | None:
    """Return a chat without its last answer, which is the last run of tokens that count; None where none counts. Where
    all of them count, it is the first token alone, and nothing says what ends an answer."""
    lengths = sequences.lengths[chat : chat + 1].astype(np.int64)
    ids, weights = sequences.window(chat), sequences.read_weights(np.array([chat]), lengths)
    weights[:1] = 0  # nothing predicts the first token
    counted = np.flatnonzero(weights)
    if not len(counted):
        return None
    last = int(counted[-1])
    begin = int(np.flatnonzero(weights[:last] == 0)[-1]) + 1
    return AnswerStart(ids[:begin].tolist(), (int(ids[last]),) if begin > 1 else ())


def permutation(key: Tensor, count: int) -> np.ndarray:
    """Return the numbers below `count` in an order that is a function of the key."""
    return np.random.RandomState(key.numpy().astype(np.uint32)).permutation(count)


def pack(lengths: np.ndarray, room: int, seed: int) -> list[list[int]]:
    """Return the numbers of the chats in each sample of `room` tokens: best fit, the longest first. lengths `[C]`: at
    most `room`. seed: of the order of equally long ones."""
    order = permutation(fold(root_key(seed), "packing"), len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    samples: list[list[int]] = []
    open_: dict[int, list[int]] = {}  # numbers of samples by the room that they have left
    rooms: list[int] = []  # the keys of `open_`, sorted
    for chat in order.tolist():
        length = int(lengths[chat])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            sample, left = len(samples), room
            samples.append([])
        else:
            left = rooms[place]
            sample = open_[left].pop()
            if not open_[left]:
                del open_[left], rooms[place]
        samples[sample].append(chat)
        left -= length
        if left:
            if left not in open_:
                open_[left] = []
                rooms.insert(bisect_left(rooms, left), left)
            open_[left].append(sample)
    return samples


def pack_part(sequences: IndexedDataset, chats: range, seq_length: int, seed: int) -> PackedPart:
    """Return the samples of the chats of these numbers; those in which nothing counts are left out."""
    lengths = np.minimum(sequences.lengths[chats.start : chats.stop].astype(np.int64), seq_length + 1)
    used = np.flatnonzero(counts_in(sequences, np.arange(chats.start, chats.stop), lengths))
    samples = pack(lengths[used], seq_length + 1, seed)
    places = np.array([chat for sample in samples for chat in sample], np.int64)
    bounds = np.cumsum([0, *map(len, samples)])
    order = used[places] + chats.start if len(places) else places
    return PackedPart(sequences, seq_length, order, bounds, len(lengths) - len(used))


def counts_in(sequences: IndexedDataset, chats: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return whether a token counts among the first ones of each chat, of which there are `lengths`: bool `[C]`. The
    first token does not, since nothing predicts it."""
    found = np.zeros(len(chats), bool)
    there = np.flatnonzero(lengths)
    for some in np.array_split(there, len(there) // LOOKED_AT + 1):
        if len(some):
            begins = np.cumsum(lengths[some]) - lengths[some]
            weights = sequences.read_weights(chats[some], lengths[some]) > 0
            weights[begins] = False
            found[some] = np.logical_or.reduceat(weights, begins)
    return found


def tell_uncounted(parts: dict[str, PackedPart], what: str, source: str) -> None:
    """Say how many chats or pairs are left out, since nothing counts in them. Raises UserError where none is left to
    train on."""
    train = parts["train"]
    if train.uncounted and not len(train):
        raise UserError(
            f"no token of {source} counts in samples of {train.seq_length} tokens: the answers are cut off, or have "
            f"weight=0; use a larger --seq_length, or {what}s with other answers"
        )
    for name, part in zip(("training", *PART_NAMES.values()), parts.values(), strict=True):
        if part.uncounted:
            none = "" if len(part) else f"; none is left, so that there is no {name} loss"
            left_out = f"{counted(part.uncounted, what)} for {name} left out"
            say(f"{left_out}, in which no token counts within {part.seq_length} tokens{none}", warning=True)


class ChatDataset(Dataset):
    """Packed chats for training, validation and test; the last two may be empty."""

    def __init__(self, tokenizer: Tokenizer, parts: dict[str, PackedPart], source: str, seed: int):
        self.tokenizer, self.source = tokenizer, source
        self.train, self.valid, self.test = parts["train"], parts["valid"], parts["test"]
        self._seed = seed
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)  # of an epoch
        settings: list[object] = [hashlib.sha256(b"".join(tokenizer.ranks)).hexdigest(), seed]
        for part in (self.train, self.valid):
            sequences = part.sequences
            packed = hashlib.sha256(part.chats.tobytes() + part.bounds.tobytes()).hexdigest()
            contents = [sequences.digest, sequences.content_digest, sequences.weights_digest]
            settings.append([*contents, part.seq_length, packed])
        self.digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def num_train_tokens(self) -> int:
        return self.train.num_tokens

    @property
    def num_valid_tokens(self) -> int:
        return self.valid.num_tokens

    def num_samples(self, part: Literal["train"] | HeldOutPart, seq_length: int) -> int:
        return len({"train": self.train, "valid": self.valid, "test": self.test}[part])

    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        """Return training samples int64 `[B, T + 1, 2]`: tokens and marks. Every epoch has each sample once."""
        return self.train.windows(self.samples(sample_ids))

    def samples(self, sample_ids: Tensor) -> np.ndarray:
        """Return the numbers, in the part for training, of the samples of a run."""
        epochs, places = np.divmod(sample_ids.numpy(), len(self.train))
        chosen = [int(self._epoch(int(epoch))[place]) for epoch, place in zip(epochs, places, strict=True)]
        return np.array(chosen, np.int64)

    def held_out(self, part: HeldOutPart, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
        samples = self.valid if part == "valid" else self.test
        chosen = np.arange(len(samples))
        if max_samples < len(samples):  # the first ones have the longest chats
            chosen = permutation(fold(root_key(self._seed), part), len(samples))[:max_samples]
        for first in range(0, len(chosen), batch_size):
            yield samples.windows(chosen[first : first + batch_size])

    def to_batch(self, windows: Tensor, masks: WindowMasks, dropout_keys: Tensor | None = None) -> Batch:
        return packed_batch(windows, dropout_keys)  # chats are kept apart in any case

    def beginnings(self, count: int, positions: int) -> list[AnswerStart]:
        part = self.valid if len(self.valid) else self.train
        found = (chat_beginning(part.sequences, chat) for chat in np.sort(part.chats)[:PROBED])
        return list(islice((chat for chat in found if chat is not None and len(chat.ids) < positions), count))

    def bytes_per_token(self) -> float:
        spread = np.linspace(0, len(self.train) - 1, min(PROBED, len(self.train))).astype(np.int64)
        windows = self.train.windows(spread)
        counted_ids = windows[..., 0][(windows[..., 1] & COUNTS) > 0].numpy()
        return float(self.tokenizer.token_bytes()[counted_ids].mean()) if len(counted_ids) else 0.0

    def check(self, seq_length: int, vocab_size: int) -> None:
        check_vocabulary(self.tokenizer, vocab_size)
        warn_of_unused_rows(self.tokenizer, vocab_size)
        tokens = self.train.windows(np.arange(min(PROBED, len(self.train))))
        if int(tokens[..., 0].max()) >= self.tokenizer.vocab_size:
            raise UserError(f"{self.source} holds tokens that its tokenizer does not have; prepare the chats again")

    def _epoch(self, epoch: int) -> np.ndarray:
        """Return the order of samples in an epoch."""
        if self._order[0] != epoch:
            key = fold(fold(root_key(self._seed), "chats"), torch.tensor(epoch))
            self._order = epoch, permutation(key, len(self.train))
        return self._order[1]


def parts_of(
    data: "DataConfig",
    opened: dict[str, IndexedDataset],
    packed: Callable[[IndexedDataset, range], PackedPart],
    size: int = 1,
) -> dict[str, PackedPart]:
    """Return what `packed` makes of the items for training, validation and test, which are of `size` sequences each.
    Raises UserError where an option does not go with chats."""
    masked = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if asked := next((name for name in masked if getattr(data, name)), None):
        raise UserError(f"data.{asked} is for texts, and chats are kept apart in any case; leave it out")
    if data.order == "sequential":
        raise UserError("data.order=sequential takes shards of texts, and chats are packed; leave it out")
    own = data.valid_path is not None or data.test_path is not None
    paths = {"train": data.path, "valid": data.valid_path, "test": data.test_path}
    parts = {}
    for which, path in paths.items():
        sequences = opened[str(path if own and path is not None else data.path)]
        absent = own and path is None
        items = range(0) if absent else split_range(None if own else data.split, which, len(sequences) // size)
        parts[which] = packed(sequences, items)
    return parts


def holds_pairs(sequences: IndexedDataset) -> bool:
    """Return whether each document is two sequences, as `dtgpt prepare --preferences` writes them."""
    return len(sequences.documents) > 1 and bool((np.diff(sequences.documents[:]) == 2).all())


def open_chats(data: "DataConfig", vocab_size: int) -> tuple[dict[str, IndexedDataset], Tokenizer]:
    """Return the datasets of all paths, and their tokenizer, for a model of `vocab_size` tokens. Raise UserError where
    one path has other data than chats, or several datasets, and where some hold pairs of answers and others do not."""
    parsed, prefixes = parsed_paths(data), checked_prefixes(data)
    tokenizer = tokenizer_of(data, prefixes, vocab_size)
    if len(parsed) < len(prefixes) or not all(map(has_weights, prefixes)):
        raise blended_with_chats(data)
    opened = {path: IndexedDataset(prefix_of(found[0])) for path, (found, _) in parsed.items()}
    if len({holds_pairs(sequences) for sequences in opened.values()}) > 1:
        raise UserError(
            f"of data.path={shown(data.path)} and the paths beside it some have pairs of answers, others chats; "
            "prepare all of them with --preferences, or all with --chat"
        )
    return opened, tokenizer


def load_chats(
    data: "DataConfig", opened: dict[str, IndexedDataset], tokenizer: Tokenizer, seq_length: int, seed: int
) -> ChatDataset:
    """Return the chats of `data`, packed into samples of `seq_length` tokens. opened: the datasets by their paths.
    Raises UserError where an option does not go with chats, or where none is there to train on."""
    parts = parts_of(data, opened, lambda sequences, chats: pack_part(sequences, chats, seq_length, seed))
    train = parts["train"]
    tell_uncounted(parts, "chat", str(data.path))
    if not len(train):
        raise UserError(f"{data.path} has no chat to train on; add chats, or change data.split={data.split}")
    cut = int((train.sequences.lengths[train.chats] > seq_length + 1).sum())
    filled = 1 - train.num_tokens / (len(train) * (seq_length + 1))
    say(
        f"{counted(len(train.chats), 'chat')} in {counted(len(train), 'sample')} (an epoch), of which {filled:.1%} "
        f"is padding; {counted(cut, 'chat')} cut after {seq_length + 1} tokens",
        warning=cut > 0,
    )
    return ChatDataset(tokenizer, parts, str(data.path), seed)
