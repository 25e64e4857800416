"""Describe token files for `dtgpt inspect`: statistics, and the first sequences."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np

from dtgpt.config.sections import DEFAULT_SPLIT
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.megatron.paths import bin_path, idx_path, prefix_of
from dtgpt.data.megatron.prepared import check_ids
from dtgpt.data.megatron.samples import SPLITS, count_tokens, split_range
from dtgpt.data.megatron.token_shards import PIECE, TokenSequences, TokenShards
from dtgpt.data.megatron.tokenizer_beside import tokenizer_beside
from dtgpt.data.tokenizers.tokenizer import MOST, Tokenizer
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

SHOWN = 300  # characters of a decoded sequence


@dataclass(frozen=True, kw_only=True)
class InspectDataConfig:
    input: Annotated[tuple[str, ...], "prefixes, or alternating weights and prefixes, in addition to PREFIX"] = ()
    split: Annotated[str, "relative sizes of the training, validation and test parts"] = DEFAULT_SPLIT
    tokenizer: Annotated[
        str | None,
        "tokenizer that decodes, and separates documents of shards, as for dtgpt prepare; none: the one saved with the "
        "data",
    ] = None
    vocab_file: Annotated[str | None, "vocab.json, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    eot: Annotated[
        int | None, "id of the token between documents of shards; none: the tokenizer's", Bounds(0, MOST - 1)
    ] = None
    samples: Annotated[int, "number of sequences to show", Bounds(0)] = 2
    show: Annotated[bool, "of chats: show them whole, and in [brackets] what the loss does not count"] = False


def describe(
    prefix: str,
    sequences: TokenSequences,
    fraction: float | None,
    config: InspectDataConfig,
    tokenizer: Tokenizer | None,
) -> str:
    """Return statistics and the first sequences, decoded by `tokenizer` or by the one saved with the data. fraction: of
    the samples of a blend."""
    lines = _statistics(sequences, fraction, config.split)
    if tokenizer is None and (beside := tokenizer_beside([prefix_of(prefix)])):
        path, tokenizer = beside
        lines.append(f"  tokenizer {tokenizer.name}, {counted(tokenizer.num_tokens, 'token')}, of {path}")
    weights = sequences.weights if isinstance(sequences, IndexedDataset) else None
    if weights is not None:
        lines.append(f"  the loss counts {int(np.asarray(weights).sum(dtype=np.int64)):,} of the tokens")
    if not config.show:
        return "\n".join([*lines, *_beginnings(sequences, config.samples, tokenizer)])
    if weights is None or tokenizer is None:
        raise UserError(f"--show is for chats with their tokenizer, and {prefix} has none; leave it out")
    assert isinstance(sequences, IndexedDataset)
    return "\n".join([*lines, *_marked(sequences, config.samples, tokenizer)])


def _statistics(sequences: TokenSequences, fraction: float | None, split: str) -> list[str]:
    lengths = np.asarray(sequences.lengths)
    total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
    lines = [
        f"{sequences.name}: {counted(total, 'token')} ({sequences.dtype}) in {counted(count, 'sequence')}, "
        f"{_files(sequences)}"
    ]
    lines += [f"  {fraction:.4g} of the samples of the blend"] if fraction is not None else []
    if count:
        middle = f"median {int(np.median(lengths)):,}, mean {total / count:,.1f}"
        empty = int((lengths == 0).sum())
        lines.append(f"  tokens of a sequence: {lengths.min():,} to {lengths.max():,}, {middle}; {empty:,} are empty")
    parts = (
        f"{which} {counted(len(split_range(split, which, count)), 'sequence')}, "
        f"{counted(count_tokens(sequences, split, which), 'token')}"
        for which in SPLITS
    )
    lines.append(f"  split {split}: {'; '.join(parts)}")
    whole = all(len(tokens) <= PIECE * sequences.most_pieces for tokens in sequences.stored)
    lines.append(f"  digest of the lengths {sequences.digest}")
    lines.append(f"  digest of the tokens{'' if whole else ', of pieces of them'} {sequences.content_digest}")
    return lines


def _files(sequences: TokenSequences) -> str:
    if isinstance(sequences, IndexedDataset):
        size = sum(path(sequences.prefix).stat().st_size for path in (bin_path, idx_path))
        return f"{counted(len(sequences.documents) - 1, 'document')}; .bin and .idx {size / 2**20:,.1f} MiB"
    if not isinstance(sequences, TokenShards):
        raise TypeError(f"{type(sequences).__name__} is neither an IndexedDataset nor TokenShards")
    size = sum(path.stat().st_size for path in sequences.paths)
    note = "" if sequences.eot is not None else "; documents not separated, which needs --tokenizer or --eot"
    return f"{counted(len(sequences.paths), 'shard')} of {size / 2**20:,.1f} MiB{note}"


def _marked(sequences: IndexedDataset, count: int, vocabulary: Tokenizer) -> list[str]:
    """Return the text of the first chats, with what the loss does not count in brackets."""
    lines = []
    for i in range(min(count, len(sequences))):
        tokens, length = sequences.window(i), np.array([sequences.lengths[i]], np.int64)
        check_ids(tokens, vocabulary, sequences.name)
        weights = sequences.read_weights(np.array([i]), length)
        cuts = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(tokens)]
        pieces = [
            text if weights[begin] else f"[{text}]"
            for begin, end in pairwise(cuts)
            if (text := vocabulary.decode(tokens[begin:end]))
        ]
        lines += [f"  chat {i}, {counted(int(weights.sum()), 'token')} of {len(tokens)}:", "".join(pieces)]
    return lines


def _beginnings(sequences: TokenSequences, count: int, vocabulary: Tokenizer | None) -> list[str]:
    lines = []
    for i in range(min(count, len(sequences))):
        tokens = sequences.window(i, 0, min(SHOWN, int(sequences.lengths[i])))
        if vocabulary is None:
            shown = " ".join(map(str, tokens[:40].tolist()))
        else:
            check_ids(tokens, vocabulary, sequences.name)
            shown = repr(vocabulary.decode(tokens)[:SHOWN])
        lines.append(f"  sequence {i}: {shown}")
    return lines
