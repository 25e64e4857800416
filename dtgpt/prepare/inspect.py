"""`dtgpt inspect`: a model (`dtgpt.interop.inspect`), or what token files hold, and digests by which two systems show
that they see the same samples."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from dtgpt.console import counted, say
from dtgpt.data.blend import Blend, as_weight, blend_sizes, load_blend, normalised, parse_data_path
from dtgpt.data.indexed import IndexedDataset, bin_path, idx_path
from dtgpt.data.prepared import open_sequences, prefix_of, prefixes_near
from dtgpt.data.samples import DEFAULT_SPLIT, SPLITS, Samples, count_epochs, split_range
from dtgpt.data.token_shards import PIECE, TokenSequences, TokenShards
from dtgpt.data.tokenizer_beside import tokenizer_beside
from dtgpt.errors import UserError
from dtgpt.help import help_text, wants_help
from dtgpt.interop.inspect import InspectConfig, inspect
from dtgpt.interop.llmc import MAGIC
from dtgpt.prepare.command import ALIASES, parse_config, with_dashes
from dtgpt.storage import open_regular
from dtgpt.tokenizers.open import open_tokenizer
from dtgpt.tokenizers.tokenizer import Tokenizer

HASHED = 200  # samples whose tokens go into a digest, at most
INDICES = ("document", "sample", "shuffle")
SHOWN = 300  # characters of a decoded sequence
MODELS = (MAGIC.to_bytes(4, "little"), b"PK\x03\x04")  # how a .bin of llm.c and one of PyTorch begin
USAGE = """What a path holds. It may be

  model         a run, a checkpoint, or what another library wrote; each file of
                a checkpoint is verified
  token files   PREFIX of a .bin and .idx, or shards .bin of llm.c or nanoGPT (several: a glob in quotes); with
                --digest, as JSON, the digests of their samples in Megatron-LM's order, and of a blend, as in
                dtgpt inspect 0.3 PREFIX1 0.7 PREFIX2 --digest --num-samples N

Options may be anywhere; all but --tensors are of token files."""


@dataclass(frozen=True, kw_only=True)
class InspectDataConfig:
    input: Annotated[tuple[str, ...], "prefixes, or weights and prefixes in turns; as before the options"] = ()
    split: Annotated[str, "weights of training, validation and test"] = DEFAULT_SPLIT
    tokenizer: Annotated[
        str | None, "decodes, tells documents of shards apart; as dtgpt prepare takes it; none: the one beside the data"
    ] = None
    vocab_file: Annotated[str | None, "vocab.json, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    eot: Annotated[int | None, "of shards: the token between documents; none: that of the tokenizer"] = None
    samples: Annotated[int, "sequences to show"] = 2
    digest: Annotated[Literal["on", "off"], "digests of the samples, as JSON"] = "off"
    subset: Annotated[Literal["train", "valid", "test"], "with --digest: part of the split"] = "train"
    seq_length: Annotated[int, "with --digest: tokens of a sample"] = 1024
    num_samples: Annotated[int | None, "with --digest: samples that are asked for; none: one epoch"] = None
    seed: Annotated[int, "with --digest: of the order"] = 1234


OF_DATA = {field.name for field in fields(InspectDataConfig)}


@dataclass(frozen=True, kw_only=True)
class InspectWords(InspectDataConfig, InspectConfig):
    """The options of both, among which the words of the command line are looked up."""


def inspect_command(words: list[str]) -> int:
    """`dtgpt inspect` of a model or of token files; returns the exit code. Raises UserError."""
    if wants_help(words):
        say(with_dashes(help_text(InspectWords(), USAGE, "dtgpt inspect MODEL|PREFIX")))
        return 0
    config = parse_config(InspectWords(), words)
    names = (word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--"))
    options = {ALIASES.get(name, name) for name in names}
    models = [word for word in config.input if Path(word).exists() and not _means_tokens(word)]
    if models and (wrong := options & OF_DATA):
        _refuse(wrong, f"is for token files, and {models[0]} is none")
    if is_data(config.input, options):
        _inspect_data(config, options)
    elif len(config.input) == 1:
        say(inspect(Path(config.input[0]), InspectConfig(tensors=config.tensors)))
    else:
        raise UserError(
            f"dtgpt inspect needs MODEL or PREFIX, one path and not {' '.join(config.input) or 'none'}, such as dtgpt "
            "inspect runs/gpt2_tiny-001; --tensors takes on, off or no word"
        )
    return 0


def is_data(inputs: Sequence[str], options: set[str]) -> bool:
    """Whether the words of `dtgpt inspect` mean token files, and not a model: by one of the words, by weights, or by an
    option that only they have."""
    weighted = len(inputs) > 1 and any(as_weight(word) is not None for word in inputs)
    return bool(options & OF_DATA) or weighted or any(map(_means_tokens, inputs))


def _means_tokens(word: str) -> bool:
    if idx_path(prefix_of(word)).is_file():
        return True
    path = Path(word)
    if path.exists():
        return path.suffix == ".bin" and not path.is_dir() and not _begins_as_model(path)
    return word.endswith((".bin", ".idx")) or has_magic(word) or bin_path(word).is_file() or bool(prefixes_near(word))


def _begins_as_model(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(4) in MODELS
    except OSError:
        return True  # whoever opens a model says what is wrong with the file


def _inspect_data(config: InspectWords, options: set[str]) -> None:
    prefixes, weights = parse_data_path(config.input)
    alone = {"samples"} if config.digest == "on" else {"subset", "seq_length", "num_samples", "seed"}
    why = "is not for --digest" if config.digest == "on" else "is for --digest, which is not given"
    _refuse(options & alone, why)
    _refuse(options & {"tensors"}, f"is for models, and {prefixes[0]} is token files")
    if config.samples < 0:
        raise UserError(f"--samples {config.samples} is negative; use 0 or more")
    if config.eot is not None and not 0 <= config.eot < 1 << 16:
        raise UserError(f"--eot {config.eot} is no token of shards, which have 16 bits; use 0 to 65535")
    vocabulary = None
    if config.tokenizer is not None or config.vocab_file is not None or config.merge_file is not None:
        vocabulary = open_tokenizer(config.tokenizer or "gpt2", config.vocab_file, config.merge_file)
    eot = config.eot if config.eot is not None or vocabulary is None else vocabulary.end_of_text
    opened = [open_sequences(prefix, eot) for prefix in prefixes]
    shards = [sequences for sequences in opened if isinstance(sequences, TokenShards)]
    if not shards:
        _refuse(options & {"eot"}, f"is for shards, and {prefixes[0]} has an .idx")
    if config.digest == "on":
        if shards and eot is None:
            raise UserError(
                f"{shards[0].name} has no .idx, and nothing tells which token stands between documents, on which the "
                "order of samples depends; add --tokenizer gpt2 or --eot ID"
            )
        say(json.dumps(digests(opened, weights, config, vocabulary), indent=1))
        return
    shares = [None] * len(opened) if weights is None else normalised(weights)
    for prefix, sequences, share in zip(prefixes, opened, shares, strict=True):
        lines, known = _statistics(sequences, share, config.split), vocabulary
        if vocabulary is None and (beside := tokenizer_beside([prefix_of(prefix)])):
            path, known = beside
            lines.append(f"  tokenizer {known.name}, {counted(known.num_tokens, 'token')}, of {path}")
        say("\n".join([*lines, *_beginnings(sequences, config, known)]))


def _refuse(options: set[str], why: str) -> None:
    if options:
        raise UserError(f"--{min(options).replace('_', '-')} {why}; leave it out")


def digests(
    sequences: list[TokenSequences],
    weights: list[float] | None,
    config: InspectDataConfig,
    vocabulary: Tokenizer | None = None,
) -> dict[str, Any]:
    """Facts of the samples; each hash is the SHA-256 of little-endian int64 values. Raises UserError, also where tokens
    that are looked at are not of the `vocabulary`."""
    asked = config.num_samples
    blend = load_blend(
        sequences, weights, config.split, config.subset, config.seq_length, asked, config.seed, cache=None
    )
    windows = blend.windows(np.arange(min(len(blend), HASHED))).numpy()
    if vocabulary is not None:
        check_ids(windows, vocabulary, sequences[0].name if len(sequences) == 1 else "the blend")
    if not isinstance(blend, Blend):
        return _of_one(sequences[0], blend, config) | _of_index(blend) | _first(blend) | _of_windows(windows)
    requested: Sequence[int | None] = [None] * len(sequences)
    if weights is not None and asked is not None:
        requested = blend_sizes(normalised(weights), asked)[1]
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


def _of_windows(windows: np.ndarray) -> dict[str, Any]:
    return {
        "windows_hashed": len(windows),
        "windows_sha256": _sha256(windows),
        "first_3_windows_first_8_tokens": windows[:3, :8].tolist(),
    }


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<i8").tobytes()).hexdigest()


def _statistics(sequences: TokenSequences, share: float | None, split: str) -> list[str]:
    lengths = np.asarray(sequences.lengths)
    total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
    lines = [
        f"{sequences.name}: {counted(total, 'token')} ({sequences.dtype}) in {counted(count, 'sequence')}, "
        f"{_files(sequences)}"
    ]
    lines += [f"  {share:.4g} of the samples of the blend"] if share is not None else []
    if count:
        middle = f"median {int(np.median(lengths)):,}, mean {total / count:,.1f}"
        empty = int((lengths == 0).sum())
        lines.append(f"  tokens of a sequence: {lengths.min():,} to {lengths.max():,}, {middle}; {empty:,} are empty")
    parts = {which: split_range(split, which, count) for which in SPLITS}
    sums = {which: int(lengths[r.start : r.stop].sum(dtype=np.int64)) for which, r in parts.items()}
    told = [f"{which} {counted(len(parts[which]), 'sequence')}, {counted(sums[which], 'token')}" for which in SPLITS]
    lines.append(f"  split {split}: {'; '.join(told)}")
    whole = all(len(tokens) <= PIECE * sequences.most_pieces for tokens in sequences.stored)
    lines.append(f"  digest of the lengths {sequences.digest}")
    lines.append(f"  digest of the tokens{'' if whole else ', of pieces of them'} {sequences.content_digest}")
    return lines


def _files(sequences: TokenSequences) -> str:
    if isinstance(sequences, IndexedDataset):
        size = sum(path(sequences.prefix).stat().st_size for path in (bin_path, idx_path))
        return f"{counted(len(sequences.documents) - 1, 'document')}; .bin and .idx {size / 2**20:,.1f} MiB"
    assert isinstance(sequences, TokenShards)
    size = sum(path.stat().st_size for path in sequences.paths)
    told = "" if sequences.eot is not None else "; documents not told apart, for which --tokenizer or --eot is needed"
    return f"{counted(len(sequences.paths), 'shard')} of {size / 2**20:,.1f} MiB{told}"


def _beginnings(sequences: TokenSequences, config: InspectDataConfig, vocabulary: Tokenizer | None) -> list[str]:
    lines = []
    for i in range(min(config.samples, len(sequences))):
        tokens = sequences.window(i, 0, min(SHOWN, int(sequences.lengths[i])))
        if vocabulary is None:
            shown = " ".join(map(str, tokens[:40].tolist()))
        else:
            check_ids(tokens, vocabulary, sequences.name)
            shown = repr(vocabulary.decode(tokens)[:SHOWN])
        lines.append(f"  sequence {i}: {shown}")
    return lines


def check_ids(tokens: np.ndarray, vocabulary: Tokenizer, name: str) -> None:
    """Raise UserError where `tokens`, of any shape, are not all of the vocabulary. `name` of what holds them."""
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary.vocab_size)]
    if wrong.size:
        raise UserError(
            f"{name} holds token {wrong[0]}, but the tokenizer {vocabulary.name} has {vocabulary.vocab_size} tokens; "
            "give the tokenizer that the data were prepared with"
        )
