"""A decoder-only transformer of any architecture: embedding, blocks, head. Nothing here knows of devices or training.

It is one class, so that a pipeline stage is a decoder with parts left out, names of parameters are the same in every
plan, and initial weights are a function of a key and a name.

Shapes: B samples, T positions, H hidden size, V padded vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dtgpt.models.binding import BoundModule
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Contents, inventory
from dtgpt.models.layers import Context, Seen
from dtgpt.ops.random.philox import fold, normal, row_chunks
from dtgpt.util import seams
from dtgpt.util.torch_private import allocate


class Decoder(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, V]`, or to the mean loss where targets `[B, T]` are given.

    Logits of the padding, `[..., config.vocab_size:]`, mean nothing: loss and sampling leave them out. Blocks are keyed
    by their global index, so that a parameter keeps its name in a part of the model: without the embedding a part takes
    activations `[B, T, H]`, without the head it returns them. `dtype` is that of activations; parameters may be fp32.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.inventory = config, inventory(config)
        self.embedding: BoundModule | None = config.make_embedding(dtype)
        self.blocks = nn.ModuleDict({str(i): config.make_block(i) for i in range(config.num_layers)})
        self.head: BoundModule | None = config.make_head()
        self._check_parts()
        self.tie_weights()

    def forward(
        self,
        x: Tensor,
        dropout_keys: Tensor | None = None,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_bounds: Tensor | None = None,
        loss_weights: Tensor | None = None,
        by_token: Tensor | None = None,
        by_sample: Tensor | None = None,
        copies: Tensor | None = None,
    ) -> Tensor:
        """Return logits, the loss, or a part's activations. The arguments have the fields of a `Batch`, `x` its tokens
        or the activations of the part before; dropout keys of None: evaluation."""
        seen: Seen = document_bounds
        if copies is not None:  # of a capability whose samples share tokens
            seen = seams.listed("sharings")[0](copies, x.shape[1])

        # Keys of dropout are those of all sites of the model: a stage takes its own by their global numbers.
        def context(sites: range) -> Context:
            keys = None if dropout_keys is None else dropout_keys[:, sites.start : sites.stop]
            return Context(keys, positions, seen)

        if self.embedding is not None:
            x = self.embedding(x, context(range(self.inventory.embedding.num_sites)))
        for index, block in self.blocks.items():
            x = block(x, context(self.inventory.sites(int(index))))
        if self.head is None:
            return x
        plain = by_token is None and by_sample is None
        return self.head(x, targets, loss_weights if plain else (loss_weights, by_token, by_sample))

    def _check_parts(self) -> None:
        """Raise TypeError where a plan could not wrap what a part computes, ValueError where a block differs from the
        first one of its kind, whose shapes and sites count."""
        for part in (self.embedding, *self.blocks.values(), self.head):
            if not isinstance(part, BoundModule):
                raise TypeError(
                    f"{type(part).__name__} of {self.config.architecture} is not a BoundModule; derive it from "
                    "dtgpt.models.binding.BoundModule, with compute in place of forward"
                )
        for index, block in self.blocks.items():
            if Contents(block) != self.inventory.block(int(index)):
                kind = self.config.block_kind(int(index))
                raise ValueError(
                    f"block {index} differs from block {self.inventory.examples[int(index)]} in parameters, dropout "
                    f"sites or rules of attention, but block_kind says that both are {kind!r}"
                )

    def tie_weights(self) -> None:
        """Make the output projection the token embedding, again after whatever replaced parameters."""
        if self.config.tied and self.embedding is not None and self.head is not None:
            output = self.get_submodule(self.config.output_name.rpartition(".")[0])
            output.weight = self.get_parameter(self.config.table_name)

    def keep(self, blocks: range, embedding: bool, head: bool) -> None:
        """Leave only these blocks, and the ends where wanted: the part of the model that one pipeline stage holds."""
        for index in [i for i in self.blocks if int(i) not in blocks]:
            del self.blocks[index]
        self.embedding = self.embedding if embedding else None
        self.head = self.head if head else None

    def allocate(self, device: torch.device) -> None:
        """Give a model on the meta device its memory, with whatever values are there."""
        allocate(self, device)
        self.tie_weights()


def unique_parameters(model: Decoder) -> dict[str, nn.Parameter]:
    """Return the parameters by name, each once. A tied table has the name of the token embedding, also in a part of the
    model that holds the head alone: initial weights and checkpoints know one name for it."""
    config, unique = model.config, {}
    for name, parameter in model.named_parameters():
        if config.tied and name == config.output_name:
            name = config.table_name
        if name in unique:
            raise ValueError(f"{name} is two parameters: the tie is broken; call tie_weights() first")
        unique[name] = parameter
    return unique


@torch.no_grad()
def fill_weight(part: Tensor, name: str, index: Sequence[range], config: ModelConfig, key: Tensor) -> None:
    """Fill `part`, the elements with the global `index` of parameter `name`, in place with initial weights: a function
    of (key, name, index) alone."""
    mean, std = config.initial_weight(name)
    if std == 0:
        part.fill_(mean)
        return
    weight_key = fold(key, name).to(part.device)
    for rows, piece in row_chunks(index):
        part[rows] = std * normal(weight_key, piece)
