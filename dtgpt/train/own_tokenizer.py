"""The tokenizer of the model that a run begins with: the weights were trained on its ids, and not on another one's."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dtgpt.checkpoint.open import training_format
from dtgpt.checkpoint.tokenizer import check_size, tokenizer_beside, tokenizer_place
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig
from dtgpt.data.open import format_of
from dtgpt.data.text import EMBEDDED
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError

OPTIONS = {"data.tokenizer": "auto", "data.tokenizer_file": None, "data.vocab_file": None}  # that may name a tokenizer


def model_to_begin_with(init_from: str | None, resume: str | None) -> Path | None:
    """Return the run, folder or file whose weights a new run takes; None where it begins with random ones. Arguments as
    of a recipe."""
    if init_from:
        return Path(init_from)
    return Path(resume) if resume and training_format(resume) else None


def named_by_option(recipe: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe to work on, where an option among those `given` names a tokenizer that another model than that
    of `init_from` was trained with: a recipe file does not decide that."""
    named = not set(named_in(recipe.data)).isdisjoint(given)
    return replace(recipe, data=replace(recipe.data, other_tokenizer=True)) if named else recipe


def named_in(data: DataConfig) -> list[str]:
    """Return the options that name a tokenizer in these data."""
    return [name for name, default in OPTIONS.items() if getattr(data, name.removeprefix("data.")) != default]


def with_own_tokenizer(recipe: Recipe) -> Recipe:
    """Return the recipe with the tokenizer of the model that it begins with, where nothing names that of its data.
    Raises UserError where a text would need it and there is none."""
    path, data = model_to_begin_with(recipe.init_from, recipe.resume), recipe.data
    if path is None or not path.exists() or named_in(data):
        return recipe
    prepared = format_of(data.path)
    if prepared and prepared.has_tokenizer(data):
        return recipe
    place, own = tokenizer_place(path), tokenizer_beside(path)
    if place is not None and own is not None:
        if own.spells or not prepared:
            check_size(own, recipe.model)
            return replace(recipe, data=replace(data, tokenizer_file=str(place)))
    elif not prepared:
        raise UserError(
            f"{path} has no tokenizer by which {_name(data)} becomes tokens; copy its tokenizer's files there, or name "
            "the one that it was trained with: --data.tokenizer_file FILE, or --data.tokenizer gpt2"
        )
    return recipe


def check_own_tokenizer(path: Path, data: DataConfig, ours: Tokenizer) -> bool:
    """Return whether nothing is known of the model at `path` by which it was trained with another tokenizer than
    `ours`, that of the data. Raise UserError where it was; warn where that was asked for."""
    own = tokenizer_beside(path)
    if own is None or not ours.spells or own.is_same(ours):
        return True
    told = f"{path} was trained with another tokenizer ({_told(own)}) than {_name(data)} has ({_told(ours)})"
    if data.other_tokenizer:
        say(f"{told}: its embeddings mean other tokens", warning=True)
        return False
    options = " ".join(f"--{name} {OPTIONS[name] or 'none'}" for name in named_in(data))
    take = f"give {options} to take that one, " if options and format_of(data.path) is None else ""
    raise UserError(
        f"{told}; {take}prepare a text with it (dtgpt prepare TEXT --tokenizer {tokenizer_place(path)} "
        "--output-prefix PREFIX), or name the tokenizer of the data with --data.tokenizer or --data.tokenizer_file to "
        "train on other tokens"
    )


def _name(data: DataConfig) -> str:
    return f"data.path={data.path}" if data.path else EMBEDDED


def _told(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name}, {tokenizer.vocab_size} tokens"
