"""What a path holds: its weights as a `Source`, the tokenizer of the model, and the ids at which its texts end.

dtgpt's own runs and checkpoints are read here. Whatever else there may be is asked of the formats that capabilities
list as `sources`, in their order, so that none of their modules is loaded for a run that needs none of them.

Weights mean the ids of the tokenizer with which they were trained, and not those of another one. Ends come from files
that name them, in a format which a capability reads; the tokenizer's end of text is that of all other models.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from dtgpt.checkpoint.load import Saved, find_checkpoint
from dtgpt.checkpoint.manifest import STATE, Checkpoint
from dtgpt.config.plan import ResolvedPlan
from dtgpt.data.tokenizers.open import load_tokenizer, open_tokenizer, tokenizer_file
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.storage import did_you_mean

Own = type[ModelConfig] | None  # class of the model of a recipe, for a checkpoint of a class that is not dtgpt's


class SourceFormat:
    """A format of models that is not dtgpt's own, or an addition to that. Each method is asked of every format, and
    says that a path is none of its own unless a class says otherwise. The class is imported at once, hence what reads
    files is to be imported by the methods."""

    known = ""  # what a user may give, for messages

    def takes(self, path: Path) -> bool:
        """Return whether `path`, which exists, holds a model of this format."""
        return False

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        """Return the model at `path`, of which `takes` is true. Raise UserError where it is damaged."""
        raise NotImplementedError

    def completed(self, path: Path, checkpoint: Checkpoint, mesh: Mesh | None, own: Own) -> Source | None:
        """Return the model of a checkpoint of dtgpt, found at `path`, that does not hold all of its weights; None where
        it does, or this format does not know what is missing."""
        return None

    def explain(self, path: Path) -> str | None:
        """Return what `path` holds that is no model, and what to give instead; None where this format does not know."""
        return None

    def tokenizer_folder(self, path: Path) -> Path | None:
        """Return another folder than the model's own in which its tokenizer may be."""
        return None

    def ends(self, path: Path) -> tuple[str | None, list[int]] | None:
        """Return what names the ids at which texts of the model at `path`, of any format, end, and these; None where
        this format knows nothing of the model. Raise UserError where a file names what is not an id."""
        return None

    def keep(self, path: Path, config: ModelConfig, tokenizer: Tokenizer | None, folder: Path) -> None:
        """Write into `folder`, of a run or a checkpoint, what a model with this `tokenizer` keeps of the one at `path`,
        whose weights and shape (`config`) it has. Raise UserError where that cannot be read."""


def formats() -> list[SourceFormat]:
    """Return the formats of capabilities."""
    return seams.listed("sources")


def open_source(
    path: Path, mesh: Mesh | None = None, true_vocab_size: int | None = None, own: type[ModelConfig] | None = None
) -> Source:
    """Open the weights at `path`, in any known format. The processes of a `mesh` share the work of checking a
    checkpoint. `true_vocab_size`: without the padding that a file may have. `own`: class of the model of a recipe, for
    a checkpoint of a class that is not dtgpt's. Raise UserError where no format is recognized, or the model is
    damaged."""
    if not path.exists():
        if path.is_symlink():
            raise UserError(f"{path} leads to {os.readlink(path)}, which does not exist; give {list_known()}")
        raise UserError(f"{path} does not exist; {did_you_mean(path, f'give {list_known()}')}")
    if is_of_dtgpt(path):
        checkpoint = open_checkpoint(path, mesh, own)
        found = (form.completed(path, checkpoint, mesh, own) for form in formats())
        return next((source for source in found if source is not None), None) or Saved(checkpoint)
    if (form := next((form for form in formats() if form.takes(path)), None)) is not None:
        return form.open(path, true_vocab_size)
    explained = seams.ask("sources", lambda form: form.explain(path))
    raise UserError(explained or f"{path} holds no model that dtgpt knows; give {list_known()}")


def list_known() -> str:
    """Return what a user may give as a model, for messages."""
    theirs = [form.known for form in formats() if form.known]
    *others, last = ["a run folder of dtgpt", "one of its checkpoints/step_...", *theirs]
    return f"{', '.join(others)} or {last}"


def is_of_dtgpt(path: Path) -> bool:
    """Return whether `path` is a run folder or a checkpoint of dtgpt."""
    return (path / STATE).is_file() or (path / "recipe.json").is_file()


def open_checkpoint(path: Path, mesh: Mesh | None, own: Own) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest of the run that is there."""
    mesh = mesh or Mesh(ResolvedPlan(), torch.device("cpu"))
    return find_checkpoint(mesh, path, path if (path / STATE).is_file() else None, weights_alone=True, own=own)


def check_recipe(path: Path, config: ModelConfig, own: Own) -> None:
    """Raise UserError where a recipe is given, of whose class `own` the model at `path` is not."""
    if own is not None and type(config) is not own:
        raise UserError(
            f"{path} has a {type(config).__name__}, and the model of the recipe given is a {own.__name__}; give the "
            "recipe that it was trained with, or leave it out: only a class that is not dtgpt's needs it"
        )


def run_of(path: Path) -> Path | None:
    """Return the run folder to which a path, or what a link there leads to, belongs, as itself or as one of its
    checkpoints; None for anything else."""
    owners = [path, *path.absolute().parents[1:2], *path.resolve().parents[1:2]]
    return next((folder for folder in owners if (folder / "recipe.json").is_file()), None)


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
