"""Checks of a recipe's data options against the files that they name, before any of the files is read."""

from dataclasses import replace
from pathlib import Path

import torch

from dtgpt.config.checks import changed
from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset
from dtgpt.data.open import format_of, formats
from dtgpt.data.tokenizers.open import check_named_once
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.errors import UserError

LOOKED_AT = 64  # samples that are read at a time


def with_tokenizer(data: DataConfig, vocab_size: int) -> DataConfig:
    """Return the same data with the tokenizer that `auto` means for them and a model of this vocabulary."""
    if data.tokenizer != "auto" or data.tokenizer_file is not None:
        return data
    if format_of(data.path) is not None:  # otherwise the one that is saved with the files, once they are opened
        return replace(data, tokenizer="gpt2") if data.vocab_file else data
    return replace(data, tokenizer="gpt2" if data.path and vocab_size >= GPT2_124M.vocab_size else "bpe")


def check_data(data: DataConfig, vocab_size: int, model: Path | None = None) -> None:
    """Raise UserError, one sentence, on the first data option that does not go with the others or with its files.
    model: where the weights, and so the vocabulary, are from."""
    _check_tokenizer(data, vocab_size, model)
    for form in formats():
        form.check_options(data)
    if (own := format_of(data.path)) is not None:
        own.check(data)
        return
    if data.path is not None:  # a text, or what only looks like one
        for form in formats():
            form.check_text(data, data.path, model)
    prepared_only = ("valid_path", "test_path", "train_samples")
    unused = [name for name in prepared_only if getattr(data, name) is not None]
    if unused:
        raise UserError(
            f"data.{unused[0]} needs prepared data, which data.path={data.path} is not; use dtgpt prepare, "
            f"or leave data.{unused[0]} out"
        )


def without_effect(data: DataConfig) -> list[str]:
    """Return a sentence for each option, other than its default, that these data do not use."""
    if (form := format_of(data.path)) is not None:
        unused = form.unused(data)
    else:
        unused = {"split": "of a text, data.held_out is kept for validation"}
        if data.path is None:
            unused["json_key"] = "no file is read: give its data.path"
        elif data.path.endswith(".txt"):
            unused["json_key"] = "a .txt has no keys"
        if data.tokenizer != "bpe":
            unused["bpe_vocab_size"] = (
                f"the tokenizer {data.tokenizer_file or data.tokenizer} is not trained on the text"
            )
    given = {field.name: value for field, value in changed(data)}
    return [f"data.{name}={given[name]} has no effect: {why}" for name, why in unused.items() if name in given]


def _check_tokenizer(data: DataConfig, vocab_size: int, model: Path | None) -> None:
    tokenizer = with_tokenizer(data, vocab_size).tokenizer
    check_named_once("gpt2", data.vocab_file, data.merge_file)
    if data.vocab_file is not None and data.tokenizer_file is None and tokenizer != "gpt2":
        raise UserError("data.vocab_file belongs to the tokenizer gpt2; add --data.tokenizer gpt2, or leave it out")
    if data.tokenizer_file is not None and (data.tokenizer != "auto" or data.vocab_file):
        other = f"data.vocab_file={data.vocab_file}" if data.vocab_file else f"data.tokenizer={data.tokenizer}"
        raise UserError(f"data.tokenizer_file={data.tokenizer_file} and {other} both name a tokenizer; leave one out")
    if data.tokenizer == "ids" and (data.vocab_file or format_of(data.path) is None):
        given = f"data.vocab_file={data.vocab_file}" if data.vocab_file else f"data.path={data.path}, a text"
        raise UserError(
            f"data.tokenizer=ids takes token files as they are, and cannot be combined with {given}; leave it out"
        )
    if tokenizer == "bpe" and data.bpe_vocab_size > vocab_size:
        given = f"the {vocab_size} tokens of {model}" if model else f"model.vocab_size={vocab_size}"
        other = "leave data.tokenizer out for the tokenizer of the model" if model else "a larger model.vocab_size"
        raise UserError(
            f"data.bpe_vocab_size={data.bpe_vocab_size} is more than {given}; use --data.bpe_vocab_size {vocab_size}, "
            f"or {other}"
        )


def check_ends(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError for an option about documents where the tokenizer has no end of text between them."""
    asked = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, n)]
    if asked and tokenizer.end_of_text is None:
        raise UserError(
            f"data.{asked[0]}=on needs an end of text between documents, which the tokenizer {tokenizer.name} does not "
            "have; leave it out"
        )


def check_counted(dataset: Dataset, samples: int, seq_length: int, seed: int) -> None:
    """Raise UserError where all tokens of so many samples are ends of text, after which nothing counts."""
    end = dataset.tokenizer.end_of_text
    assert end is not None  # as `check_ends` found
    key = fold(root_key(seed), "data")
    for first in range(0, samples, LOOKED_AT):  # of which the first ones say so for nearly all texts
        windows = dataset.windows(torch.arange(first, min(first + LOOKED_AT, samples)), seq_length, key)
        if windows[:, :-1].ne(end).any():
            return
    raise UserError(
        f"all tokens of {dataset.source} are ends of text, after which data.eod_mask_loss lets nothing count; leave it "
        "out, or give another text"
    )
