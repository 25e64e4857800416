"""A checkpoint of Megatron-LM in either of its formats."""

from pathlib import Path

from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.megatron.torch_dist import TorchDist
from dtgpt.interop.megatron.tree import distributed_folder
from dtgpt.models.source import Source


def open_megatron(folder: Path, true_vocab_size: int | None = None) -> Source:
    """Open the weights of a checkpoint in the format `torch` or `torch_dist`. Raises UserError as these do."""
    distributed = distributed_folder(folder)
    if distributed is not None:
        return TorchDist(distributed, true_vocab_size)
    return Megatron(folder, true_vocab_size)
