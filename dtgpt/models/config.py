"""The shape of a decoder-only transformer, and what follows from it: parameters, FLOPs, dropout sites."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dtgpt.models.roles import Role, Roles, patterns_of, role_of
from dtgpt.ops.random.dropout import Dropout
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, check_fields

LARGEST_SIZE = 1_000_000  # of any one dimension
SIZE = Bounds(1, LARGEST_SIZE)
VOCAB_MULTIPLE = 128  # padding that does not depend on the plan, so that every plan has the same global shapes
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Fields of every architecture. A subclass names its modules in `roles` and makes them in `make_*`."""

    architecture: ClassVar[str]  # as checkpoints name it
    roles: ClassVar[Roles]

    num_layers: Annotated[int, "number of transformer blocks", SIZE]
    hidden_size: Annotated[int, "width of the residual stream", SIZE]
    num_heads: Annotated[int, "number of attention heads", SIZE]
    seq_length: Annotated[int, "number of positions, and tokens of a training sample", SIZE] = 1024
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 50257
    dropout: Annotated[float, "dropout of embeddings, attention and residual branches", Bounds(0, below=1)] = 0.0
    init_std: Annotated[
        float, "standard deviation of initial weights; residual outputs: / sqrt(2 num_layers)", Bounds(0, LARGEST_SIZE)
    ] = 0.02

    def validate(self) -> None:
        """Raise UserError, one sentence, if no model has this shape."""
        check_fields(self, "model.")
        self.check_heads()

    def check_heads(self) -> None:
        """Raise UserError, one sentence, if the heads do not have the same size."""
        if self.hidden_size % self.num_heads:
            heads = [n for n in range(1, 2 * self.num_heads + 1) if self.hidden_size % n == 0]
            near = sorted(sorted(heads, key=lambda n: abs(n - self.num_heads))[:4])
            raise UserError(
                f"model.hidden_size={self.hidden_size} cannot be split over model.num_heads={self.num_heads}; "
                f"use a divisor such as {', '.join(map(str, near))}"
            )

    @property
    @abstractmethod
    def tied(self) -> bool:
        """Whether the output projection is the token embedding."""

    @property
    def learns_positions(self) -> bool:
        """Whether `seq_length` is a dimension of the weights."""
        return bool(patterns_of(Role.POSITIONS, self.roles))

    @property
    def cut_by_tp(self) -> dict[str, int]:
        """The sizes, by the fields' names, that a tensor parallel degree has to divide."""
        return {"num_heads": self.num_heads}

    @abstractmethod
    def make_embedding(self, dtype: torch.dtype) -> nn.Module:
        """Return the module from tokens `[B, T]` to activations `[B, T, H]` of `dtype`."""

    @abstractmethod
    def make_block(self) -> nn.Module:
        """Return a transformer block, activations `[B, T, H]` to `[B, T, H]`."""

    @abstractmethod
    def make_head(self) -> nn.Module:
        """Return the module from activations `[B, T, H]` to logits `[B, T, V]`, or to a loss with targets."""

    def comparable(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of parameter `name`, or of its gradient, that is more than rounding."""
        return tensor

    def initial_weight(self, name: str) -> tuple[float, float]:
        """Return (mean, standard deviation) of the initial weights of parameter `name`: zero biases, unit norms, and
        N(0, init_std), with the outputs of residual branches scaled by 1 / sqrt(2 num_layers) (Radford et al. 2019,
        section 2.3)."""
        module, _, kind = name.rpartition(".")
        role = role_of(module, self.roles)
        if kind == "bias":
            return 0.0, 0.0
        if role in (Role.NORM, Role.HEAD_NORM):
            return 1.0, 0.0
        return 0.0, self.init_std / (math.sqrt(2 * self.num_layers) if role is Role.ROW else 1)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def table_name(self) -> str:
        """The name of the token embedding's weight, which a tied output projection shares."""
        return f"{patterns_of(Role.VOCABULARY, self.roles)[0]}.weight"

    @property
    def output_name(self) -> str:
        """The name of the output projection's weight."""
        return f"{patterns_of(Role.OUTPUT, self.roles)[0]}.weight"

    @property
    def layout(self) -> "Layout":
        """The parameters of the parts, by names within the whole model."""
        return _layout(replace(self, num_layers=1))

    @property
    def num_sites(self) -> int:
        """Dropout sites: those of the embedding, then those of each block."""
        return self.layout.embedding_sites + self.num_layers * self.layout.block_sites

    @property
    def num_parameters(self) -> int:
        layout = self.layout
        head = [shape for name, shape in layout.head if not (self.tied and name == self.output_name)]
        ends = [shape for _, shape in layout.embedding] + head
        return sum(map(math.prod, ends)) + self.num_layers * sum(math.prod(shape) for _, shape in layout.block)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 N + 12 L H T, where N leaves out weights that are looked up and not multiplied
        (Chowdhery et al. 2022, PaLM, appendix B)."""
        looked_up = [Role.POSITIONS] if self.tied else [Role.POSITIONS, Role.VOCABULARY]
        weights = self.num_parameters - sum(
            math.prod(shape)
            for name, shape in self.layout.embedding
            if role_of(name.rpartition(".")[0], self.roles) in looked_up
        )
        return 6 * weights + 12 * self.num_layers * self.num_heads * self.head_dim * self.seq_length

    @property
    def flops_per_block(self) -> int:
        """FLOPs of a token in one block, forward and backward: matrices and attention scores."""
        matrices = sum(math.prod(shape) for _, shape in self.layout.block if len(shape) > 1)
        return 6 * matrices + 12 * self.num_heads * self.head_dim * self.seq_length


class Layout(NamedTuple):
    """(name, shape) of each parameter of the embedding, of block 0 and of the head; numbers of dropout sites."""

    embedding: list[tuple[str, Shape]]
    block: list[tuple[str, Shape]]
    head: list[tuple[str, Shape]]
    embedding_sites: int
    block_sites: int

    def of_block(self, index: int) -> list[tuple[str, Shape]]:
        """Return (name, shape) of each parameter of block `index`."""
        return [(name.replace("blocks.0.", f"blocks.{index}.", 1), shape) for name, shape in self.block]


@lru_cache(maxsize=8)
def _layout(config: ModelConfig) -> Layout:
    with torch.device("meta"):
        embedding, block, head = config.make_embedding(torch.float32), config.make_block(), config.make_head()

    def shapes(at: str, part: nn.Module) -> list[tuple[str, Shape]]:
        return [(f"{at}.{name}", tuple(p.shape)) for name, p in part.named_parameters()]

    def sites(part: nn.Module) -> int:
        return sum(isinstance(module, Dropout) for module in part.modules())

    parts = shapes("embedding", embedding), shapes("blocks.0", block), shapes("head", head)
    return Layout(*parts, sites(embedding), sites(block))
