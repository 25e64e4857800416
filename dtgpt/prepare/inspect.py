"""`dtgpt inspect PREFIX`: what token files hold, and digests by which two systems show that they see the same
samples."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from dtgpt.console import say
from dtgpt.data.blend import Blend, blend_sizes, load_blend, normalised, parse_data_path
from dtgpt.data.indexed import IndexedDataset, bin_path, idx_path
from dtgpt.data.prepared import open_sequences
from dtgpt.data.samples import Samples, count_epochs, load_samples, split_range
from dtgpt.data.token_shards import TokenSequences
from dtgpt.errors import UserError
from dtgpt.overrides import help_text
from dtgpt.prepare.command import HELP, parse_config
from dtgpt.tokenizers.vocabulary import load_vocabulary

HASHED = 200  # samples whose tokens go into a digest, at most
INDICES = ("document", "sample", "shuffle")
SHOWN = 300  # characters of a decoded sequence
USAGE = """What token files hold: dtgpt inspect PREFIX. With --digest, as JSON, the digests of their samples in
Megatron-LM's order; of a blend: dtgpt inspect 0.3 PREFIX1 0.7 PREFIX2 --digest ..."""


@dataclass(frozen=True, kw_only=True)
class InspectDataConfig:
    input: tuple[str, ...] = ()  # prefixes, or weights and prefixes in turns
    digest: Annotated[Literal["on", "off"], "digests of the samples, as JSON"] = "off"
    split: Annotated[str, "weights of training, validation and test"] = "969,30,1"
    subset: Annotated[Literal["train", "valid", "test"], "part of the split"] = "train"
    seq_length: Annotated[int, "tokens of a sample"] = 1024
    num_samples: Annotated[int | None, "samples that are asked for; none: one epoch"] = None
    seed: Annotated[int, "of the order"] = 1234
    tokenizer: Annotated[str | None, "shows text: as dtgpt prepare takes it; none: ids"] = None
    vocab_file: Annotated[str | None, "vocab.json, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    samples: Annotated[int, "sequences to show"] = 2


def is_data(words: list[str]) -> bool:
    """Whether the words of `dtgpt inspect` mean token files, and not a model."""
    first = words[0] if words else ""
    number = first.replace(".", "", 1).isdecimal()
    return number or idx_path(first).is_file() or (first.endswith(".bin") and "--digest" in words)


def inspect_data_command(words: list[str]) -> int:
    """`dtgpt inspect` of token files; returns the exit code. Raises UserError."""
    if any(word in HELP for word in words):
        say(help_text(InspectDataConfig(), USAGE, "dtgpt inspect PREFIX"))
        return 0
    config = parse_config(InspectDataConfig(), words)
    prefixes, weights = parse_data_path(config.input)
    opened = [open_sequences(prefix, None) for prefix in prefixes]
    if config.digest == "on":
        say(json.dumps(digests(opened, weights, config), indent=1))
        return 0
    for prefix, sequences in zip(prefixes, opened, strict=True):
        say("\n".join([*_statistics(prefix, sequences), *_beginnings(sequences, config)]))
    return 0


def digests(sequences: list[TokenSequences], weights: list[float] | None, config: InspectDataConfig) -> dict[str, Any]:
    """Facts of the samples; each hash is the SHA-256 of little-endian int64 values."""
    asked = config.num_samples
    if len(sequences) == 1 and weights is None:
        only = sequences[0]
        made = load_samples(only, config.split, config.subset, config.seq_length, asked, config.seed, None)
        return _of_one(only, made, config) | _of_index(made) | _first(made) | _of_windows(made)
    blend = load_blend(
        sequences, weights, config.split, config.subset, config.seq_length, asked, config.seed, cache=None
    )
    if not isinstance(blend, Blend):
        return _of_index(blend) | _of_windows(blend)
    requested = [None] * len(sequences) if weights is None else blend_sizes(normalised(weights), asked)[1]
    pairs = np.stack([blend.dataset_index.astype(np.int64), blend.dataset_sample_index], axis=1)
    return {
        "num_samples_built": len(blend),
        "datasets": [
            {"num_samples_requested": count, "num_samples_built": len(part), **_of_index(part)}
            for count, part in zip(requested, blend.datasets, strict=True)
        ],
        "pairs_first_200": pairs[:200].tolist(),
        "pairs_sha256": _sha256(pairs),
        **_of_windows(blend),
    }


def _of_one(sequences: TokenSequences, samples: Samples, config: InspectDataConfig) -> dict[str, Any]:
    documents = split_range(config.split, config.subset, len(sequences))
    tokens = int(sequences.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    epochs = count_epochs(tokens, config.seq_length, config.num_samples)
    return {
        "document_range": [documents.start, documents.stop],
        "documents_in_split": len(documents),
        "tokens_per_epoch": tokens,
        "num_epochs": epochs.count,
        "separate_last_epoch": epochs.samples_apart is not None,
        "num_samples_before_last_epoch": epochs.samples_apart,
        "num_samples_built": len(samples),
    }


def _of_index(samples: Samples) -> dict[str, str]:
    return {f"{name}_index_sha256": _sha256(getattr(samples.index, f"{name}_index")) for name in INDICES}


def _first(samples: Samples) -> dict[str, Any]:
    index = samples.index
    return {
        "document_index_first_8": index.document_index[:8].tolist(),
        "sample_index_first_4_rows": index.sample_index[:4].tolist(),
        "shuffle_index_first_8": index.shuffle_index[:8].tolist(),
    }


def _of_windows(samples: Samples | Blend) -> dict[str, Any]:
    count = min(len(samples), HASHED)
    windows = samples.windows(np.arange(count)).numpy()
    return {
        "windows_hashed": count,
        "windows_sha256": _sha256(windows),
        "first_3_windows_first_8_tokens": windows[:3, :8].tolist(),
    }


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<i8").tobytes()).hexdigest()


def _statistics(prefix: str, sequences: TokenSequences) -> list[str]:
    lengths = np.asarray(sequences.lengths)
    total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
    lines = [f"{prefix}: {total:,} tokens ({sequences.dtype}) in {count:,} sequences"]
    if isinstance(sequences, IndexedDataset):
        size = bin_path(prefix).stat().st_size + idx_path(prefix).stat().st_size
        lines[0] += f", {len(sequences.documents) - 1:,} documents; .bin and .idx {size / 2**20:,.1f} MiB"
    if count:
        middle = f"median {int(np.median(lengths)):,}, mean {total / count:,.1f}"
        empty = int((lengths == 0).sum())
        lines.append(f"  tokens of a sequence: {lengths.min():,} to {lengths.max():,}, {middle}; {empty:,} are empty")
    lines.append(f"  digest {sequences.digest}")
    return lines


def _beginnings(sequences: TokenSequences, config: InspectDataConfig) -> list[str]:
    if config.samples < 0:
        raise UserError(f"samples={config.samples} is negative; use 0 or more")
    vocabulary = None
    if config.tokenizer is not None or config.vocab_file is not None:
        vocabulary = load_vocabulary(config.tokenizer or "gpt2", config.vocab_file, config.merge_file)
    lines = []
    for i in range(min(config.samples, len(sequences))):
        tokens = sequences.window(i, 0, min(SHOWN, int(sequences.lengths[i])))
        shown = repr(vocabulary.decode(tokens)[:SHOWN]) if vocabulary else " ".join(map(str, tokens[:40].tolist()))
        lines.append(f"  sequence {i}: {shown}")
    return lines
