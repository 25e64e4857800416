"""The data of a run by the options that name them: a text, or a format that a capability knows.

A start asks several times which of them it is, before any file is read. Hence the formats of capabilities answer by a
look at the path, and import what reads files when they are asked for data.
"""

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset, load_dataset
from dtgpt.util import seams


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

    def check_options(self, data: DataConfig) -> None:
        """Raise UserError for an option of this format that no data can have, whatever the data are."""

    def check(self, data: DataConfig) -> None:
        """Raise UserError for options that do not go together. `takes` is true of the path, here and below."""

    def check_text(self, data: DataConfig, path: str, model: Path | None) -> None:
        """Raise UserError for the `path` of the data, which no format takes, but which is no plain text either: with
        what makes data of it. model: where the weights, and so the vocabulary, are from."""

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
