"""Searched algorithms of matrix products, the same on all ranks.

The first step of a process runs PyTorch's choice and records the problems. Before the next ones, until steps are
captured, the ranks search together, each for its share; all GPUs of one kind then use the same algorithms. The result
of a product has the same bits either way (`dtgpt.ops.matmul.search`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from dtgpt.ops.matmul.choices import file_for, identity, key_of, read_choices, write_choices
from dtgpt.ops.matmul.cublaslt import Algorithm, CublasLtError, Problem
from dtgpt.ops.matmul.search import search, verify
from dtgpt.ops.matmul.searched import SearchedProducts
from dtgpt.parallel.graphs import WARM_UP
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import counted, say


class Settled(NamedTuple):
    """What is known of a problem. is_certain: False where memory or cuBLASLt did not allow a search."""

    problem: Problem
    algorithm: Algorithm | None
    is_certain: bool


class Products:
    """The matrix products of a run's steps. `folder`: as of `settle`."""

    def __init__(self, mesh: Mesh, folder: Path):
        self._mesh, self._folder = mesh, folder
        self._products, self._steps = SearchedProducts(mesh.device), 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the products of a step inside of the context. All ranks take part in what comes before the second step of
        a process and those after it that may bring other products: in fp8 the second step does."""
        self._steps += 1
        if 1 < self._steps <= WARM_UP + 1:
            settle(self._products, self._mesh, self._folder)
        with self._products:
            yield


def settle(products: SearchedProducts, mesh: Mesh, folder: Path) -> None:
    """Choose an algorithm for each problem that any rank has recorded. All ranks take part, between two steps.
    folder: of the file that keeps the choices of earlier processes."""
    name = identity(products.device)
    file = file_for(folder, name)
    kept = read_choices(file, name)
    asked = mesh.gather((name, products.unknown, kept))
    peers = [rank for rank, (other, _, _) in enumerate(asked) if other == name]
    problems = sorted({problem for rank in peers for problem in asked[rank][1]}, key=key_of)
    proposals = first_of([asked[rank][2] for rank in peers])
    if missing := sum(key_of(problem) not in proposals for problem in problems):
        say(f"timing algorithms for {counted(missing, 'matrix product')}, once: the choices are kept in {file}")
    share = problems[peers.index(mesh.rank) :: len(peers)]
    everyone = mesh.gather([settled(problem, proposals, products.device) for problem in share])
    found: list[Settled] = [one for rank in peers for one in everyone[rank]]
    products.use({one.problem: one.algorithm for one in found})
    certain = {key_of(one.problem): one.algorithm for one in found if one.is_certain}
    if any(key not in kept or kept[key] != algorithm for key, algorithm in certain.items()):
        write_choices(file, name, certain)


def first_of(files: list[dict[str, Algorithm | None]]) -> dict[str, Algorithm | None]:
    """Return the entries of all files; of several entries for one key, that of the first file."""
    return {key: value for entries in reversed(files) for key, value in entries.items()}


def settled(problem: Problem, proposals: Mapping[str, Algorithm | None], device: torch.device) -> Settled:
    """Return the proposed algorithm where it proves right on this device, else one that a search finds."""
    key = key_of(problem)
    try:
        if key in proposals and verify(problem, proposals[key], device):
            return Settled(problem, proposals[key], True)
        return Settled(problem, search(problem, device), True)
    except (CublasLtError, torch.OutOfMemoryError):
        return Settled(problem, None, False)
