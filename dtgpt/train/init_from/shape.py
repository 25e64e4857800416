"""The shape of a model at a path, without its weights."""

from contextlib import suppress
from pathlib import Path

from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.open import Own, open_source
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.models.config import ModelConfig


def open_config(path: Path, own: Own = None) -> ModelConfig:
    """Return the shape of the model at `path`; of dtgpt's own, without a look at its weights. `own`: class of the
    model of a recipe. Raise UserError where no format is recognized, or the model is damaged."""
    folders = [path] if (path / STATE).is_file() else []
    if not folders and (path / "recipe.json").is_file():
        folders = list_checkpoints(path / "checkpoints")[::-1]
    for folder in folders:
        with suppress(Damaged):  # all checkpoints of a run have one model
            return Checkpoint(folder, own=own).config
    return open_source(path, own=own).config
