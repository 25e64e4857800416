"""Weights of a whole model on disk, whatever wrote them, read tensor by tensor.

Every format is a `Source`; whatever takes weights (training, inference, export to another format) takes a source. Names
and shapes are those of `unique_parameters`: matrices `[out, in]`, the fused QKV in the order `[N, 3, D]`, the token
table padded to `config.padded_vocab_size` rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.models.decoder import Decoder, build_model, unique_parameters
from dtgpt.models.gpt2 import GPT2Config

Part = Sequence[range]


class Source(ABC):
    """`config` is the shape of the model, without dropout; `notes` are sentences that its user should read."""

    config: GPT2Config
    notes: Sequence[str] = ()

    @abstractmethod
    def read(self, name: str, part: Part | None = None) -> Tensor:
        """Return the parameter `name`, or the elements of it with the global indices `part`: fp32 on the CPU."""


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter, by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in unique_parameters(Decoder(config)).items()}


def cut(whole: Tensor, part: Part | None) -> Tensor:
    """Return the elements `part` of a whole tensor."""
    return whole if part is None else whole[tuple(slice(r.start, r.stop) for r in part)]


def pad_rows(table: Tensor, config: GPT2Config) -> Tensor:
    """Return a token table with the rows of the model: the true vocabulary of `table`, then zeros, which never enter a
    softmax."""
    padded = table.new_zeros(config.padded_vocab_size, table.shape[1])
    padded[: config.vocab_size] = table[: config.vocab_size]
    return padded


@torch.no_grad()
def load_model(source: Source, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build a whole model on one device with the weights of `source`."""
    model = build_model(source.config, device, dtype, key=None).to(dtype)
    for name, parameter in unique_parameters(model).items():
        parameter.copy_(source.read(name))
    return model
