"""The beginning of a run with more tokens: its tokenizer, the size of its vocabulary, and the rows of new tokens. Those
of a model with new weights are drawn with all others."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import run_of
from dtgpt.config.overrides import replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import DataConfig, Section
from dtgpt.data.open import format_of, with_tokenizer
from dtgpt.data.tokenizers.open import load_tokenizer, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Source
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.posttrain.add_tokens.config import AddTokensConfig
from dtgpt.posttrain.add_tokens.format import AND
from dtgpt.posttrain.add_tokens.rows import ENTRY, fill_rows
from dtgpt.posttrain.add_tokens.source import Drawn
from dtgpt.posttrain.add_tokens.tokens import added_to, read_tokens
from dtgpt.train.init_from.begin import Frozen, OwnRun
from dtgpt.train.start import Beginning
from dtgpt.util.console import say
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer


class Grown(Beginning):
    """What a run begins with, `inner`, and the tokens in a file beside it."""

    base: Tokenizer | None = None  # that of the model, without the new tokens, once it is known to be that of the run

    def __init__(self, inner: Beginning, file: Path, count: int, resume: str | Path | None):
        """count: of the tokens, where it is known; 0: it is not."""
        self.inner, self.file, self.path, self.count = inner, file, inner.path, count
        self.resume = run_of(Path(resume)) if resume else None  # `auto` may find none
        if resume and inner.path == Path(resume):
            raise UserError(
                f"add_tokens.file={file} adds to a model, and resume={resume}, a run of another library, goes on with "
                f"its own tokens; leave it out, or begin a new run: --init_from {resume}"
            )
        if isinstance(inner, OwnRun):
            inner.change = self.grown
        if self.resume:
            check_same_tokens(file, count, self.resume)

    def settle(self, asked: Recipe, given: Collection[str]) -> Recipe:
        recipe = self.inner.settle(asked, given)
        data, held = self.with_tokenizer(recipe.data, recipe.model), recipe.model.vocab_size
        tokenizer = open_tokenizer(str(data.tokenizer_file))
        new, needed = self._new_ids(tokenizer), tokenizer.vocab_size
        recipe = replace_values(recipe, {"add_tokens.first": new.start, "add_tokens.count": len(new)})
        if needed <= held:
            return recipe
        if "model.vocab_size" in given and self.path is None:
            raise UserError(
                f"model.vocab_size={held} is smaller than the tokenizer's {needed} tokens, with those of {self.file}; "
                f"use --model.vocab_size {needed} or more, or leave it out"
            )
        say(f"model.vocab_size: {held} -> {needed}, for the tokens of {self.file}")
        return replace(recipe, model=replace(recipe.model, vocab_size=needed))

    def with_tokenizer(self, data: DataConfig, model: ModelConfig) -> DataConfig:
        if self.resume or (data.tokenizer_file or "").endswith(f"{AND}{self.file}"):  # a run carries its tokenizer
            return self.inner.with_tokenizer(data, model)
        if format_of(data.path) is not None and data.tokenizer == "auto" and data.tokenizer_file is None:
            data = self._of_model(data, model)
        data = with_tokenizer(self.inner.with_tokenizer(data, model), model.vocab_size)
        base = data.tokenizer_file or data.tokenizer
        if base in ("auto", "bpe", "char", "ids"):
            raise UserError(
                f"add_tokens.file={self.file} adds to a tokenizer that is there, and nothing names one "
                f"(data.tokenizer={base}); give --data.tokenizer_file FILE, or --data.tokenizer gpt2"
            )
        return replace(data, tokenizer="auto", tokenizer_file=f"{base}{AND}{self.file}")

    def _of_model(self, data: DataConfig, model: ModelConfig) -> DataConfig:
        """Return prepared data, which have a tokenizer, with that of the model: both have to be the same with the new
        tokens."""
        named = self.inner.with_tokenizer(replace(data, path=None), model)
        return replace(named, path=data.path)

    def check(self, sections: Collection[Section], model: ModelConfig, steps: int) -> None:
        self.inner.check(sections, model, steps)

    def beside(self, checkpoint: Checkpoint, freezes: bool) -> Beginning:
        return Grown(self.inner.beside(checkpoint, freezes), self.file, self.count, self.resume)

    def model_of_ends(self, data: DataConfig, tokenizer: Tokenizer) -> Path | None:
        base, named, _ = (data.tokenizer_file or "").rpartition(AND)
        if self.resume or not named:  # a run that goes on has its own
            return None
        plain = open_tokenizer(base)
        found = self.inner.model_of_ends(replace(data, tokenizer_file=base), plain)
        self.base = None if found is None else plain
        return found

    def _new_ids(self, tokenizer: Tokenizer) -> range:
        """Return the ids of the tokens in a tokenizer that has them last."""
        last = added_to(tokenizer)[-1]["id"] + 1
        return range(last - (self.count or len(read_tokens(self.file))), last)

    def give_weights(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        self.inner.give_weights(trainer, sizes)

    def save(self, own: type[ModelConfig], tokenizer: Tokenizer, run: Path) -> None:
        """Keep what the model has of another library's folder, whose ends of texts are still those."""
        self.inner.save(own, self.base or tokenizer, run)

    def grown(self, trainer: "Trainer", source: Source) -> Source:
        """Return the weights of the other model with rows for the new tokens. Where the model's own weights are frozen,
        give the rows that are trained in their place their values, too."""
        key, vocab_size = fold(root_key(trainer.seed), "weights"), trainer.settings.model.vocab_size
        made = Drawn(source, vocab_size, self._new_ids(trainer.dataset.tokenizer), key)
        if trainer.settings.freezes_weights:
            section = trainer.settings.section(AddTokensConfig)
            if section.new_ids != made.ids:
                raise UserError(
                    f"add_tokens.first={section.first} and add_tokens.count={section.count} are not those of "
                    f"{self.file}; let dtgpt set them: dtgpt.train.start.settle(recipe, {{}})"
                )
            fill_rows(trainer.shards, made, section.first)
            trainer.states.append(Frozen(ENTRY, {"first": section.first, "count": section.count}))
        return made


def check_same_tokens(file: Path, count: int, run: Path) -> None:
    """Raise UserError where a file of tokens, which may be gone, is not as it was when `run` began, with `count` of
    them."""
    if not file.exists() or not (run / "tokenizer.json").is_file():
        return
    there = [(entry["content"], entry["special"]) for entry in added_to(load_tokenizer(run))[-count:]]
    if there != [tuple(token) for token in read_tokens(file)]:
        raise UserError(
            f"{file} has changed since {run} began, whose tokens stay as they were; put it back, or remove it: the run "
            "keeps its tokenizer"
        )
