"""The tokenizer of a model in any format: the one that a run keeps, or files beside the weights."""

from pathlib import Path

from dtgpt.checkpoint.manifest import STATE
from dtgpt.checkpoint.open import formats, run_of
from dtgpt.data.tokenizers.open import load_tokenizer, open_tokenizer, tokenizer_file
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError


def named_tokenizer(
    config: ModelConfig, tokenizer: str | None, vocab_file: str | None, merge_file: str | None
) -> Tokenizer | None:
    """Return the tokenizer that options of `dtgpt generate` or `dtgpt convert` name; None where they name none. Raise
    UserError where it has more tokens than the model."""
    if tokenizer is None and vocab_file is None and merge_file is None:
        return None
    named = open_tokenizer(tokenizer or "gpt2", vocab_file, merge_file)
    check_size(named, config)
    return named


def check_size(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise UserError where a tokenizer has more tokens than the model."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; "
            "give the one that the model was trained with"
        )


def tokenizer_beside(path: Path) -> Tokenizer | None:
    """Return the tokenizer of the run to which `path` belongs, or the one whose files are in the folder `path`; None
    where there is none."""
    place = tokenizer_place(path)
    if place is None:
        return None
    return open_tokenizer(str(place)) if place.is_dir() else load_tokenizer(place.parent)


def tokenizer_place(path: Path) -> Path | None:
    """Return the file of the tokenizer of a run to which `path` belongs, or the folder at `path` that has one's files,
    or the one that its format names. None where there is none."""
    if run := run_of(path):
        return run / "tokenizer.json"
    if (path / STATE).is_file() and (path / "tokenizer.json").is_file():  # of a run from which it was exported
        return path / "tokenizer.json"
    named = (form.tokenizer_folder(path) for form in formats())
    return next((folder for folder in [path, *filter(None, named)] if tokenizer_file(folder)), None)
