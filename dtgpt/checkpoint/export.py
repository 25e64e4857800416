"""A checkpoint of weights alone, written from any source: to begin a run with, to generate from, to keep. The tokenizer
is in it where the source is a run."""

from dataclasses import asdict
from pathlib import Path

import torch

from dtgpt.checkpoint.manifest import file_name, write_state
from dtgpt.checkpoint.shard_file import Piece, Written, by_size, write_file
from dtgpt.checkpoint.staging import FILE_LIMIT
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.source import Source, iterate_shapes
from dtgpt.util.environment import package_versions
from dtgpt.util.errors import UserError
from dtgpt.util.storage import new_folder


def save_weights(source: Source, folder: Path, origin: str, tokenizer: Tokenizer | None = None) -> None:
    """Write the weights of `source` as the checkpoint `folder`, whose memory is that of one file at a time. `origin`:
    where they came from, for its reader. Raises UserError where the folder exists."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; give another path")
    with new_folder(folder) as partial:
        whole = (Piece.whole(name, shape) for name, shape in iterate_shapes(source.config))
        files: dict[str, Written] = {}
        for number, pieces in enumerate(by_size(whole, FILE_LIMIT)):
            name = file_name("weights", 0, number)
            data = torch.cat([source.read(piece.name).flatten() for piece in pieces])
            files[name] = write_file(partial / name, pieces, data)
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer.json")
        write_state(partial, _state(source, origin), files)


def _state(source: Source, origin: str) -> dict:
    config = source.config
    return {
        "step": 0, "updates": 0, "consumed_samples": 0, "tokens": 0, "data_digest": "", "origin": origin,
        "architecture": config.architecture, "model": asdict(config), "padded_vocab_size": config.padded_vocab_size,
        "versions": package_versions(),
    }  # fmt: skip
