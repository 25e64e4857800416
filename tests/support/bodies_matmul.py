"""Steps of a plan on CPUs whose matrix products run by algorithms that only look searched."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.ops.matmul import searched
from dtgpt.ops.matmul.cublaslt import Algorithm, Operands, Problem
from dtgpt.ops.matmul.search import by_torch
from dtgpt.parallel import products
from dtgpt.parallel.products import Products
from dtgpt.train.startup import open_trainer

Problems = list[Problem]


class FakeProduct:
    """Computes as PyTorch does, and counts."""

    calls: ClassVar[Counter[tuple[Problem, Algorithm]]] = Counter()

    def __init__(self, problem: Problem, device: torch.device):
        self.problem = problem

    def prepare(self, algorithm: Algorithm):
        def run(operands: Operands) -> Tensor:
            self.calls[self.problem, algorithm] += 1
            return by_torch(operands)

        return run


@contextmanager
def fake_cublaslt(
    searches: Problems, refused: tuple[int, ...] = (), rank: int = 0, full: bool = False
) -> Iterator[Counter]:
    """Let products of fp32 on the CPU count as searchable. Each search adds to `searches` and finds an algorithm that
    names the rank, or runs out of memory; proposals whose first word is `refused` are wrong."""

    def search(problem: Problem, device: torch.device) -> Algorithm:
        searches.append(problem)
        if full:
            raise torch.OutOfMemoryError
        return Algorithm((rank, *range(7)), 0)

    FakeProduct.calls.clear()
    with (
        mock.patch.multiple(searched, DEVICES=("cpu",), DTYPES=(torch.float32,), FEWEST_FLOPS=0, Product=FakeProduct),
        mock.patch.multiple(
            products, search=search, identity=lambda device: "a CPU",
            verify=lambda problem, algorithm, device: algorithm is None or algorithm.words[0] not in refused,
        ),
    ):  # fmt: skip
        yield FakeProduct.calls


def steps_of(
    recipe: Recipe, steps: int, folder: Path | None, refused: tuple[int, ...] = (), full: bool = False
) -> tuple[list[float], Problems, Counter]:
    """Return the losses, the problems that this rank searched, and how often each product ran by which algorithm.
    folder: None leaves all products to PyTorch. refused, full: as of `fake_cublaslt`."""
    searches: Problems = []
    with open_trainer(recipe) as trainer, fake_cublaslt(searches, refused, trainer.mesh.rank, full) as calls:
        if folder is not None:
            trainer.products = Products(trainer.mesh, folder)
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(steps)]
        return losses, searches, Counter(calls)
