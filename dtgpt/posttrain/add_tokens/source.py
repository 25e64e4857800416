"""A model with more tokens, read from one with fewer and from new rows.

A new row is drawn from the normal distribution of the rows that are there, column by column, as a function of (key,
name, global index): every plan has the same rows, and new tokens are about as likely as others before they are trained
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"). Those of a run that trained adapters
are in its checkpoint."""

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dtgpt.checkpoint.load import read_part
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.roles import Role
from dtgpt.models.source import Ranges, Source
from dtgpt.ops.random.philox import fold, normal
from dtgpt.parallel.layout import slices
from dtgpt.posttrain.add_tokens.rows import ENTRY, name_of
from dtgpt.util.errors import shown_name

ROWS_AT_ONCE = 8192  # that are read for their mean


class WithRows(Source):
    """A model with more tokens: `base`, with rows for the tokens `ids` in all that has a row for each token. Rows that
    stand for no token are zero."""

    def __init__(self, base: Source, vocab_size: int, ids: range):
        """vocab_size: with the new tokens."""
        self.base, self.ids, self.notes = base, ids, base.notes
        self.iteration, self.consumed_samples = base.iteration, base.consumed_samples
        self.config = replace(base.config, vocab_size=max(vocab_size, base.config.vocab_size))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes in the base of what has a row for each token, by name."""
        rows = self.base.config.padded_vocab_size
        roles, parameters = (Role.VOCABULARY, Role.OUTPUT), inventory(self.base.config).parameters()
        return {p.name: p.shape for p in parameters if p.role in roles and p.shape[0] == rows}

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        if name not in self.shapes:
            return self.base.read(name, part)
        whole = (range(self.config.padded_vocab_size), *map(range, self.shapes[name][1:]))
        wanted, *inner = part or whole
        made = torch.zeros([len(wanted), *map(len, inner)])
        old, new = overlap(wanted, range(self.base.config.vocab_size)), overlap(wanted, self.ids)
        if old:
            made[old.start - wanted.start : old.stop - wanted.start] = self.base.read(name, (old, *inner))
        if new:
            made[new.start - wanted.start : new.stop - wanted.start] = self.new(name, new, inner)
        return made

    @abstractmethod
    def new(self, name: str, rows: range, inner: Ranges) -> Tensor:
        """Return new rows of a parameter, `[rows, ..]`, of its other elements those with the indices `inner`."""


def overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


class Drawn(WithRows):
    """A model whose new rows are drawn."""

    def __init__(self, base: Source, vocab_size: int, ids: range, key: Tensor):
        """key: of the weights of the run."""
        super().__init__(base, vocab_size, ids)
        self.key = key
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def new(self, name: str, rows: range, inner: Ranges) -> Tensor:
        mean, deviation = (each[slices(tuple(inner))] for each in self.moments(name))
        return mean + deviation * normal(fold(self.key, name, "added tokens"), (rows, *inner))

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the rows that are there, before those of `ids`: fp32 `[..]`."""
        if name not in self._moments:
            self._moments[name] = self._measure(name)
        return self._moments[name]

    def _measure(self, name: str) -> tuple[Tensor, Tensor]:
        _, *columns = self.shapes[name]
        total, squares = (torch.zeros(columns, dtype=torch.float64) for _ in range(2))
        last = min(self.base.config.vocab_size, self.ids.start)
        for first in range(0, last, ROWS_AT_ONCE):
            rows = range(first, min(first + ROWS_AT_ONCE, last))
            values = self.base.read(name, (rows, *map(range, columns))).double()
            total, squares = total + values.sum(0), squares + values.square().sum(0)
        mean = total / last
        return mean.float(), (squares / last - mean.square()).clamp_min(0).sqrt().float()


class Saved(WithRows):
    """A model with the new rows of a checkpoint of adapters."""

    def __init__(self, base: Source, checkpoint: Checkpoint):
        super().__init__(base, checkpoint.config.vocab_size, ids_of(checkpoint))
        self.checkpoint = checkpoint

    def new(self, name: str, rows: range, inner: Ranges) -> Tensor:
        rows = range(rows.start - self.ids.start, rows.stop - self.ids.start)
        return saved_rows(self.checkpoint, name)[slices((rows, *inner))]


def saved_rows(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the new rows of a parameter, `[count, H]`, that a checkpoint of adapters has."""
    shape = (len(ids_of(checkpoint)), checkpoint.config.hidden_size)
    made = torch.empty(shape)
    read_part(checkpoint, name_of(name), shape, tuple(map(range, shape)), made)
    return made


def ids_of(checkpoint: Checkpoint) -> range:
    """Return the ids of the tokens whose rows a checkpoint of adapters has; none where it has none. Raise Damaged."""
    facts: Any = checkpoint.state.get(ENTRY, {"first": 0, "count": 0})
    numbers: list[Any] = [facts.get(name) for name in ("first", "count")] if isinstance(facts, dict) else [None]
    if not all(type(each) is int and 0 <= each <= checkpoint.config.vocab_size for each in numbers):
        raise Damaged(checkpoint.folder, f"its {shown_name(ENTRY)} does not name the rows of new tokens")
    return range(numbers[0], sum(numbers))
