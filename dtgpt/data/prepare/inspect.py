"""Describe token files for `dtgpt inspect`: statistics, first sequences, and digests by which two systems can compare
their samples."""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np

from dtgpt.config.sections import DEFAULT_SPLIT
from dtgpt.data.megatron.blend import Blend, blend_sizes, load_blend, normalised
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.megatron.paths import bin_path, idx_path, prefix_of
from dtgpt.data.megatron.prepared import check_ids
from dtgpt.data.megatron.samples import SPLITS, SampleRequest, Samples, count_epochs, count_tokens, split_range
from dtgpt.data.megatron.token_shards import PIECE, TokenSequences, TokenShards
from dtgpt.data.megatron.tokenizer_beside import tokenizer_beside
from dtgpt.data.tokenizers.tokenizer import MOST, Tokenizer
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

HASHED = 200  # samples whose tokens go into a digest, at most
INDICES = ("document", "sample", "shuffle")
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
    digest: Annotated[bool, "print digests of the samples, as JSON"] = False
    subset: Annotated[Literal["train", "valid", "test"], "with --digest: part of the split"] = "train"
    seq_length: Annotated[int, "with --digest: number of tokens in a sample"] = 1024
    num_samples: Annotated[int | None, "with --digest: number of samples; none: one epoch"] = None
    seed: Annotated[int, "with --digest: seed of the sample order"] = 1234


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


def digests(
    sequences: list[TokenSequences],
    weights: list[float] | None,
    config: InspectDataConfig,
    vocabulary: Tokenizer | None = None,
) -> dict[str, Any]:
    """Return facts about the samples; each hash is the SHA-256 of little-endian int64 values. Raises UserError, also if
    the first tokens are not in the `vocabulary`."""
    request = SampleRequest(config.split, config.subset, config.seq_length, config.num_samples, config.seed)
    blend = load_blend(sequences, weights, request)
    windows = blend.windows(np.arange(min(len(blend), HASHED))).numpy()
    if vocabulary is not None:
        check_ids(windows, vocabulary, sequences[0].name if len(sequences) == 1 else "the blend")
    if not isinstance(blend, Blend):
        return _of_one(sequences[0], blend, config) | _of_index(blend) | _of_windows(windows)
    requested: list[int] | list[None] = [None] * len(sequences)
    if weights is not None and config.num_samples is not None:
        requested = blend_sizes(normalised(weights), config.num_samples)[1]
    pairs = np.stack([np.asarray(blend.dataset_index, np.int64), blend.dataset_sample_index], axis=1)
    return {
        "num_samples_built": len(blend),
        "datasets": [
            {"num_samples_requested": count, "num_samples_built": len(part), **_of_index(part)}
            for count, part in zip(requested, blend.datasets, strict=True)
        ],
        "pairs_first_200": pairs[:200].tolist(),
        "pairs_sha256": _sha256(pairs),
        **_of_windows(windows),
    }


def _of_one(sequences: TokenSequences, samples: Samples, config: InspectDataConfig) -> dict[str, Any]:
    documents = split_range(config.split, config.subset, len(sequences))
    tokens = count_tokens(sequences, config.split, config.subset)
    epochs = count_epochs(tokens, config.seq_length, config.num_samples)
    return {
        "document_range": [documents.start, documents.stop],
        "documents_in_split": len(documents),
        "tokens_per_epoch": tokens,
        "num_epochs": epochs.count,
        "separate_last_epoch": epochs.samples_apart is not None,
        "num_samples_before_last_epoch": epochs.samples_apart,
        "num_samples_built": len(samples),
        "document_index_first_8": samples.index.document_index[:8].tolist(),
        "sample_index_first_4_rows": samples.index.sample_index[:4].tolist(),
        "shuffle_index_first_8": samples.index.shuffle_index[:8].tolist(),
    }


def _of_index(samples: Samples) -> dict[str, str]:
    return {f"{name}_index_sha256": _sha256(getattr(samples.index, f"{name}_index")) for name in INDICES}


def _of_windows(windows: np.ndarray) -> dict[str, Any]:
    return {
        "windows_hashed": len(windows),
        "windows_sha256": _sha256(windows),
        "first_3_windows_first_8_tokens": windows[:3, :8].tolist(),
    }


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<i8").tobytes()).hexdigest()


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
