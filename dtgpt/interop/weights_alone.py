"""A checkpoint of weights alone, written from any source: to begin a run with, to generate from, to keep."""

from collections.abc import Callable
from pathlib import Path

import torch

from dtgpt.checkpoint.manifest import describe_model, write_state
from dtgpt.checkpoint.shard_file import FILE_LIMIT, Piece, Written, by_size, file_name, write_file
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.source import Source, iterate_shapes


def save_weights(
    source: Source,
    folder: Path,
    origin: str,
    tokenizer: Tokenizer | None = None,
    save_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the weights of `source` as the checkpoint `folder`, one file in memory at a time, with the tokenizer and
    what `save_more` writes. `origin`: where they came from, for its reader. Raise UserError where the folder exists."""
    with new_folder(folder) as partial:
        whole = (Piece.whole(name, shape) for name, shape in iterate_shapes(source.config))
        files: dict[str, Written] = {}
        for number, pieces in enumerate(by_size(whole, FILE_LIMIT)):
            name = file_name("weights", 0, number)
            data = torch.cat([source.read(piece.name).flatten() for piece in pieces])
            files[name] = write_file(partial / name, pieces, data)
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer.json")
        save_more(partial)
        counts = dict.fromkeys(("step", "updates", "consumed_samples", "tokens"), 0)
        write_state(partial, {**counts, "data_digest": "", "origin": origin, **describe_model(source.config)}, files)
