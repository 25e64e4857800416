"""Weights of a whole model on disk, whatever wrote them, read tensor by tensor.

A dict of tensors, as `torch.load` returns it, would be simpler, and larger than the memory of a rank that needs a part
of it: so a rank asks for the parameters, and the ranges of them, that it holds.

Every format is a `Source`; whatever takes weights (training, inference, export to another format) takes a source. Names
and shapes are those of `unique_parameters`: matrices `[out, in]`, the fused QKV as its architecture stores it, the
token table padded to `config.padded_vocab_size` rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape, inventory

Ranges = Sequence[range]  # global indices of a part of a tensor


class Source(ABC):
    """`config` is the shape of the model, without dropout; `notes` are sentences that its user should read; `iteration`
    and `consumed_samples` are those of the training that wrote it, 0 where unknown; `recipe` is what is saved of the
    training's."""

    config: ModelConfig
    notes: Sequence[str] = ()
    iteration: int = 0
    consumed_samples: int = 0
    recipe: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        """Return the parameter `name`, or the elements of it with the global indices `part`: fp32 on the CPU."""


def iterate_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Return name and global shape of every parameter, one after the other: a file may claim any number of blocks."""
    return ((p.name, p.shape) for p in inventory(config).parameters())


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the global shape of every parameter, by name."""
    return dict(iterate_shapes(config))
