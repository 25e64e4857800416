"""What a task is: samples from a file, and figures from their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.files import DataFile
from dtgpt.evaluation.scoring import TokenScores
from dtgpt.util.errors import UserError

ERROR = "_stderr"  # ending of the name of a metric's standard error


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """How a task is measured; a value of None is the task's own."""

    strict: bool = False  # LAMBADA: the whole last word instead of its last token
    overlapping_eval: int | None = None  # WikiText-103: tokens from one window to the next
    limit: int | None = None  # measure the first items alone


class Result(NamedTuple):
    """The figures of a task."""

    task: str
    procedure: str  # in words
    metrics: dict[str, float]  # by name, the main one first
    samples: int  # number of items measured
    unit: str  # plural noun for the items
    line: str | None = None  # as Megatron-LM prints it
    details: dict[str, Any] = {}  # noqa: RUF012  # what else the figures depend on

    @property
    def figures(self) -> dict[str, float]:
        """The metrics without standard errors."""
        return {name: value for name, value in self.metrics.items() if not name.endswith(ERROR)}


class Prepared(NamedTuple):
    """Samples of a task, and what makes a result of their scores."""

    samples: list[Sample]
    measure: Callable[[list[TokenScores]], Result]


class Prepare(Protocol):
    def __call__(self, file: DataFile, tokenizer: Tokenizer, positions: int, options: TaskOptions) -> Prepared:
        """Return the samples of a file for a model of so many positions. Raise UserError where the file does not hold
        the task's data."""


class Task(NamedTuple):
    """A task by its name."""

    name: str
    source: str  # a sentence that says where the data come from
    prepare: Prepare


def opened(context: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return a context; in place of an empty one what the tokenizer puts before every text, else the token that begins
    a document. Raise UserError where the tokenizer has neither."""
    if begun := context or tokenizer.encode(""):
        return begun
    if tokenizer.opening is None:
        raise UserError(f"the tokenizer {tokenizer.name} has no end of text to begin a document with; give another one")
    return [tokenizer.opening]


def mean_and_error(values: list[bool]) -> tuple[float, float]:
    """Return the fraction of true values, and its standard error, as lm-evaluation-harness estimates it."""
    mean = float(np.mean(values))
    return mean, (mean * (1 - mean) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0
