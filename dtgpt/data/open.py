"""The data of a run by the options that name them, a text or a format that a capability knows, and the checks of these
options, before any file is read.

A start asks several times which format it is. Hence the formats of capabilities answer by a look at the path, and
import what reads files when they are asked for data."""

from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Literal, NamedTuple

from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset, load_dataset
from dtgpt.data.tokenizers.open import check_named_once, makes
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.util import seams
from dtgpt.util.field_types import changed_fields
from dtgpt.util.rules import Changed, Given, Is, Missing, Other, Rule, Rules, broken, check_rules

# Of `DataConfig`. Beside its fields: `meant`, the kind of tokenizer that `auto` means; `is_text`; the `vocab_size` of
# the model; `weights`, where they, and so the vocabulary, are from, None for new ones.
TOKENIZER_RULES: Rules = (
    Rule(
        "data.vocab_file belongs to the tokenizer gpt2; add --data.tokenizer gpt2, or leave it out",
        Given("vocab_file"),
        Missing("tokenizer_file"),
        Is("meant", "!=", "gpt2"),
    ),
    Rule(
        "data.tokenizer_file={tokenizer_file} and data.vocab_file={vocab_file} both name a tokenizer; leave one out",
        Given("tokenizer_file"),
        Given("vocab_file"),
    ),
    Rule(
        "data.tokenizer_file={tokenizer_file} and data.tokenizer={tokenizer} both name a tokenizer; leave one out",
        Given("tokenizer_file"),
        Is("tokenizer", "!=", "auto"),
    ),
    Rule(
        "data.tokenizer=ids takes token files as they are, and cannot be combined with data.vocab_file={vocab_file}; "
        "leave it out",
        Given("vocab_file"),
        Is("tokenizer", "==", "ids"),
    ),
    Rule(
        "data.tokenizer=ids takes token files as they are, and cannot be combined with data.path={path}, a text; leave "
        "it out",
        Given("is_text"),
        Is("tokenizer", "==", "ids"),
    ),
    Rule(
        "data.bpe_vocab_size={bpe_vocab_size} is more than the {vocab_size} tokens of {weights}; use "
        "--data.bpe_vocab_size {vocab_size}, or leave data.tokenizer out for the tokenizer of the model",
        Given("weights"),
        Is("meant", "==", "bpe"),
        Is("bpe_vocab_size", ">", Other("vocab_size")),
    ),
    Rule(
        "data.bpe_vocab_size={bpe_vocab_size} is more than model.vocab_size={vocab_size}; use --data.bpe_vocab_size "
        "{vocab_size}, or a larger model.vocab_size",
        Missing("weights"),
        Is("meant", "==", "bpe"),
        Is("bpe_vocab_size", ">", Other("vocab_size")),
    ),
)
TEXT_RULES: Rules = (
    Rule(
        "data.{field} needs prepared data, which data.path={path} is not; use dtgpt prepare, or leave data.{field} out",
        Given("valid_path", "test_path", "train_samples"),
    ),
)
UNUSED_BY_TEXTS: Rules = (
    Rule("data.{field}={value} has no effect: of a text, data.held_out is kept for validation", Changed("split")),
    Rule(
        "data.{field}={value} has no effect: no file is read: give its data.path", Changed("json_key"), Missing("path")
    ),
    Rule("data.{field}={value} has no effect: a .txt has no keys", Changed("json_key"), Is("suffix", "==", ".txt")),
    Rule(
        "data.{field}={value} has no effect: the tokenizer {remedy} is not trained on the text",
        Changed("bpe_vocab_size"),
        Is("tokenizer", "!=", "bpe"),
        remedy=lambda data: data.tokenizer_file or data.tokenizer,
    ),
)


class DataRequest(NamedTuple):
    """What a run takes of its data, where their format orders samples before training. `train_samples` and
    `held_out_samples`: how many for training, and at most for validation and for test. `seed`: of the order. `cache`: a
    folder. `vocab_size`: of the model. `batch`: samples of a step."""

    seq_length: int
    train_samples: int
    held_out_samples: int
    seed: int
    cache: Path
    vocab_size: int = 0
    batch: int = 1


class DataFormat:
    """A format of data that are no plain text, or of files of which data are to be made first."""

    def takes(self, path: str) -> bool:
        """Return whether `data.path` names data of this format, by a look at the path."""
        return False

    def is_here(self, path: str) -> bool:
        """Return whether a `path` of this format may name files although none has its very name."""
        return False

    def is_name(self, path: str) -> bool:
        """Return whether a `path` is no path, but a name of data of this format."""
        return False

    def check_options(self, data: DataConfig) -> None:
        """Raise UserError for an option of this format that no data can have, whatever the data are."""

    def check(self, data: DataConfig) -> None:
        """Raise UserError for options that do not go together. `takes` is true of the path, here and below."""

    def check_text(self, data: DataConfig, path: str, model: Path | None) -> None:
        """Raise UserError for the `path` of the data, which no format takes, but which is no plain text either: with
        what makes data of it. model: where the weights, and so the vocabulary, are from."""

    def documents(self, path: str, json_key: str) -> Iterator[str] | None:
        """Return the documents of the file `path`, where it holds several in a way that this format reads: the texts
        under `json_key`, where they have keys. Raise UserError where one of them is damaged."""
        return None

    def named_documents(self, name: str, json_key: str) -> Iterator[str] | None:
        """Return the documents of data of which `is_name` is true: the texts under `json_key`; None where
        this format knows no such name. Raise UserError where the data cannot be had."""
        return None

    def unpacked(self, file: BufferedReader, name: str) -> Iterator[bytes] | None:
        """Return the text in a `file`, which is at its beginning, in pieces, where this format knows how it may be
        compressed. Raise UserError where it is, in a way that is not read. `name`: for messages."""
        return None

    def unused(self, data: DataConfig) -> dict[str, str]:
        """Return options that these data do not use, and why."""
        return {}

    def has_tokenizer(self, data: DataConfig) -> bool:
        """Return whether these data carry their tokenizer. Raise UserError where files cannot be read."""
        return False

    def load(self, data: DataConfig, request: DataRequest) -> Dataset:
        """Return the data. Raise UserError where a file is missing or damaged."""
        raise NotImplementedError


def formats() -> list[DataFormat]:
    """Return the formats of capabilities."""
    return seams.listed("datasets")


def format_of(path: str | None) -> DataFormat | None:
    """Return the format of the data that `data.path` names; None for a text, and for a path of which nothing is
    known."""
    return None if path is None else next((form for form in formats() if form.takes(path)), None)


def open_dataset(data: DataConfig, request: DataRequest) -> Dataset:
    """Return the data that the options name, whose kind of tokenizer is not `auto` any more. Raise UserError where
    files cannot be read, or do not hold what they should."""
    form = format_of(data.path)
    return load_dataset(data, request.cache) if form is None else form.load(data, request)


def with_tokenizer(data: DataConfig, vocab_size: int) -> DataConfig:
    """Return the same data with the tokenizer that `auto` means for them and a model of this vocabulary."""
    if data.tokenizer != "auto" or data.tokenizer_file is not None:
        return data
    if format_of(data.path) is not None:  # otherwise the one that is saved with the files, once they are opened
        return replace(data, tokenizer="gpt2") if data.vocab_file else data
    wanted: Literal["gpt2", "bpe"] = "gpt2" if data.path and vocab_size >= GPT2_124M.vocab_size else "bpe"
    return replace(data, tokenizer=wanted) if makes(wanted) else replace(data, tokenizer="bytes")


def check_data(data: DataConfig, vocab_size: int, model: Path | None = None) -> None:
    """Raise UserError, one sentence, on the first data option that does not go with the others or with its files.
    model: where the weights, and so the vocabulary, are from."""
    _check_tokenizer(data, vocab_size, model)
    if changed_fields(data):  # else no format has to say whether it takes its options
        for form in formats():
            form.check_options(data)
    if (own := format_of(data.path)) is not None:
        own.check(data)
        return
    if data.path is not None:  # a text, or what only looks like one
        for form in formats():
            form.check_text(data, data.path, model)
    check_rules(TEXT_RULES, data)


def without_effect(data: DataConfig) -> list[str]:
    """Return a sentence for each option, other than its default, that these data do not use."""
    if (form := format_of(data.path)) is None:
        return list(broken(UNUSED_BY_TEXTS, data, suffix=(data.path or "")[-4:]))
    given = changed_fields(data)
    found = form.unused(data).items()
    return [f"data.{name}={getattr(data, name)} has no effect: {why}" for name, why in found if name in given]


def _check_tokenizer(data: DataConfig, vocab_size: int, model: Path | None) -> None:
    check_named_once("gpt2", data.vocab_file, data.merge_file)
    meant, is_text = with_tokenizer(data, vocab_size).tokenizer, format_of(data.path) is None
    check_rules(TOKENIZER_RULES, data, meant=meant, is_text=is_text, vocab_size=vocab_size, weights=model)
