"""Values of parameters as files of other programs have them."""

import torch
from torch import Tensor

from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Ranges


def cut(whole: Tensor, part: Ranges | None) -> Tensor:
    """Return the elements `part` of a whole tensor."""
    return whole if part is None else whole[tuple(slice(r.start, r.stop) for r in part)]


def has_vocabulary(name: str, config: ModelConfig) -> bool:
    """Return whether the parameter `name` has a row for each token, which files pad as they like."""
    return name in (config.table_name, config.output_name)


def without_padding(values: Tensor, name: str, config: ModelConfig, first: int = 0) -> Tensor:
    """Return the rows of a parameter, or of its part that begins at row `first`, that do not pad the vocabulary."""
    return values[: max(0, config.vocab_size - first)] if has_vocabulary(name, config) else values


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, without memory for an answer to each."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())
