"""The tokenizer of a model in any format, and the ids at which its texts end: what a run keeps, or files beside the
weights.

Weights mean the ids of the tokenizer with which they were trained, and not those of another one. Ends come from files
that name them, in a format which a capability reads; the tokenizer's end of text is that of all other models."""

from pathlib import Path
from typing import NamedTuple

from dtgpt.checkpoint.manifest import STATE
from dtgpt.checkpoint.open import formats, run_of
from dtgpt.data.tokenizers.open import load_tokenizer, open_tokenizer, tokenizer_file
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M
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


def check_tokenizer(run: Path, ours: Tokenizer) -> None:
    """Raise UserError where `run`, which goes on, was trained with another tokenizer than `ours`."""
    if not load_tokenizer(run).is_same(ours):
        raise UserError(f"{run} was trained with another tokenizer; give the --data values that it began with")


class Ends(NamedTuple):
    """Ids at which texts end. `source`: what names them; None: nothing does. `ignored`: ids that the files name beside
    these, or in vain, and that the model does not have: nothing ever meets them."""

    ids: tuple[int, ...]
    source: str | None
    ignored: tuple[int, ...] = ()


def ends_of(path: Path | None, tokenizer: Tokenizer | None, vocab_size: int) -> Ends:
    """Return the ends of the model at `path`, of any format: what its files name, or those of the model that it came
    from. Where none does, it is the tokenizer's end of text, or that of GPT-2's own vocabulary. Raise UserError where a
    file names what is not an id."""
    found = [] if path is None else [form.ends(path) for form in formats()]
    source, named = next(filter(None, found), (None, []))
    ids = tuple(i for i in named if 0 <= i < vocab_size)
    ignored = tuple(i for i in named if i not in ids)
    if ids:
        return Ends(ids, source, ignored)
    if tokenizer is None and vocab_size == GPT2_124M.vocab_size:
        return Ends((vocab_size - 1,), "GPT-2's vocabulary", ignored)
    own = None if tokenizer is None or not tokenizer.spells else tokenizer.end_of_text
    return Ends((), None, ignored) if own is None else Ends((own,), "its tokenizer", ignored)
