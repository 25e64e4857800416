"""What a model consists of: parameters, dropout sites and attention cores, from its configuration alone.

Plans, checkpoints, caches, FLOPs and `dtgpt plan` need names, shapes and roles before there is memory for a model, or
without ever making it. They are read off the modules themselves, so that no formula has to repeat an architecture.

Blocks may differ. Those of one kind (`ModelConfig.block_kind`) have the same modules and shapes, so that one of each
kind is laid out on the meta device, whatever the number of blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import nn

from dtgpt.models.binding import BoundModule, on_meta
from dtgpt.models.layers import AttentionCore, Dropout
from dtgpt.models.roles import Role, Roles, role_of
from dtgpt.util import seams

Shape = tuple[int, ...]


class Shaped(Hashable, Protocol):
    """What is read of a `ModelConfig`, which counts by its inventory and imports this file."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def roles(self) -> Roles: ...

    @property
    def tied(self) -> bool: ...

    @property
    def output_name(self) -> str: ...

    def make_embedding(self, dtype: torch.dtype) -> BoundModule: ...

    def make_block(self, index: int) -> BoundModule: ...

    def make_head(self) -> BoundModule: ...

    def block_kind(self, index: int) -> Hashable: ...

    def used_elements(self, shape: Shape, role: Role | None) -> int: ...


class Parameter(NamedTuple):
    """One parameter of the whole model."""

    name: str
    shape: Shape
    role: Role | None  # of its module
    block: int | None  # its index; None: of the embedding or the head


class Core(NamedTuple):
    """The sizes and the rule of an attention core, whose heads of queries are `num_heads` of the model."""

    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees; None: all up to its own
    softcap: bool = False  # whether scores are bounded softly
    sinks: bool = False  # whether heads have sinks
    scaled: bool = False  # whether scores have another factor than 1 / sqrt(D)


class Contents:
    """The embedding, a kind of block or the head: shapes of parameters by name, the number of dropout sites, and the
    rules of attention cores."""

    def __init__(self, module: nn.Module):
        self.shapes: dict[str, Shape] = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.num_sites = sum(isinstance(each, Dropout) for each in module.modules())
        self.rules = [(core.window, core.softcap, core.scale) for core in attention_cores(module)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and vars(self) == vars(other)


class Inventory:
    """The parts of a model. `embedding` and `head` are those of the whole model; names in a `Contents` are its own."""

    def __init__(self, config: Shaped):
        """Lay out the ends and one block of each kind."""
        kinds = [config.block_kind(index) for index in range(config.num_layers)]
        first: dict[object, int] = {}
        for index, kind in enumerate(kinds):
            first.setdefault(kind, index)
        self.config = config
        self.examples = [first[kind] for kind in kinds]  # for each block, the first one of its kind
        with on_meta():
            self.embedding, self.head = Contents(config.make_embedding(torch.float32)), Contents(config.make_head())
            self._blocks = {index: Contents(config.make_block(index)) for index in first.values()}
        whole = {"embedding": self.embedding, "head": self.head}
        whole |= {f"blocks.{index}": part for index, part in self._blocks.items()}
        self._roles = {at: self._roles_in(at, part) for at, part in whole.items()}

    def _roles_in(self, at: str, part: Contents) -> list[Role | None]:
        return [role_of(f"{at}.{name}".rpartition(".")[0], self.config.roles) for name in part.shapes]

    def block(self, index: int) -> Contents:
        """Return the parts of block `index`."""
        return self._blocks[self.examples[index]]

    def has(self, role: Role) -> bool:
        """Return whether a parameter of the model has this role."""
        return any(role in found for found in self._roles.values())

    @cached_property
    def counts(self) -> dict[int, int]:
        """The number of blocks of each kind, by the index of the first."""
        return dict(Counter(self.examples))

    @cached_property
    def _first_sites(self) -> list[int]:
        sizes = (self.block(index).num_sites for index in range(self.config.num_layers))
        return list(accumulate(sizes, initial=self.embedding.num_sites))

    @property
    def num_sites(self) -> int:
        """The number of dropout sites: those of the embedding, then those of each block."""
        return self._first_sites[-1]

    def sites(self, block: int) -> range:
        """Return the dropout sites of block `block` among those of the model."""
        return range(*self._first_sites[block : block + 2])

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter in the order of the modules, one that is tied once. Nothing is made before it is asked
        for: a file may claim any number of blocks."""
        yield from self.of_embedding()
        for index in range(self.config.num_layers):
            yield from self.of_block(index)
        yield from self._of_own_head()

    def of_embedding(self) -> Iterator[Parameter]:
        """Yield the parameters of the embedding."""
        return self._parameters("embedding", "embedding", self.embedding, None)

    def of_block(self, index: int) -> Iterator[Parameter]:
        """Yield the parameters of block `index`."""
        return self._parameters(f"blocks.{index}", f"blocks.{self.examples[index]}", self.block(index), index)

    def of_head(self) -> Iterator[Parameter]:
        """Yield the parameters of the head, with a tied output projection."""
        return self._parameters("head", "head", self.head, None)

    def _of_own_head(self) -> Iterator[Parameter]:
        """Yield the parameters of the head that are not those of the embedding."""
        return (p for p in self.of_head() if not (self.config.tied and p.name == self.config.output_name))

    def _parameters(self, at: str, example: str, part: Contents, block: int | None) -> Iterator[Parameter]:
        for (name, shape), role in zip(part.shapes.items(), self._roles[example], strict=True):
            yield Parameter(f"{at}.{name}", shape, role, block)

    @cached_property
    def num_parameters(self) -> int:
        """The number of parameters, one that is tied counted once."""
        return self.counted(lambda parameter: math.prod(parameter.shape))

    def counted(self, elements: Callable[[Parameter], int]) -> int:
        """Return the sum of the `elements` of each parameter, one that is tied once."""
        total = sum(map(elements, (*self.of_embedding(), *self._of_own_head())))
        return total + sum(count * sum(map(elements, self.of_block(i))) for i, count in self.counts.items())

    def cores(self, block: int) -> tuple[Core, ...]:
        """Return the sizes of each attention core of block `block`."""
        return _cores(self.config, self.examples[block])

    def kinds_of_cores(self) -> set[Core]:
        """Return the attention cores of the model, each kind once."""
        return {core for block in self.counts for core in self.cores(block)}


@lru_cache(maxsize=16)
def inventory(config: Shaped) -> Inventory:
    """Return the inventory of the model of this configuration."""
    return Inventory(config)


def attention_cores(block: nn.Module) -> list[AttentionCore]:
    """Return the attention cores of a block, in the order of its modules."""
    return [module for module in block.modules() if isinstance(module, AttentionCore)]


@lru_cache(maxsize=64)
def _cores(config: Shaped, index: int) -> tuple[Core, ...]:
    """Return what the cores of a block say that they are given. Measure it where one does not say it: a configuration
    does not know how its blocks share heads."""
    with on_meta():
        block = config.make_block(index)
    cores = attention_cores(block)
    known = tuple(_known(core, *core.heads) for core in cores if core.heads is not None)
    if len(known) == len(cores):
        return known
    missing = f"an attention core of block {index} does not say the heads that it gets; give it heads=(N_kv, D)"
    return seams.first("core_sizes", missing)(config, index, block)


def _known(core: AttentionCore, kv_heads: int, head_dim: int) -> Core:
    has = (core.softcap is not None, core.sinks is not None, core.scale is not None)
    return Core(kv_heads, head_dim, core.window, *has)
