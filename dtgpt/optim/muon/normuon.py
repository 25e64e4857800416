"""NorMuon: Muon whose orthogonalised rows are divided by their own size over time, as neurons of an MLP or of a head
differ in it (Li et al. 2025, https://arxiv.org/abs/2510.05491, algorithm 1). The config class and the rule.

The norm of a matrix stays that of Muon's, so that Muon's learning rates fit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dtgpt.optim.muon.muon import Muon, MuonConfig
from dtgpt.parallel.shards import Shards
from dtgpt.util.field_types import Bounds, Pattern

EPS = 1e-8  # as in the code of the authors (microsoft/dion); rows have a mean square of about 1 / max(R, C)


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(MuonConfig):
    """NorMuon for the matrices of blocks; everything else as in Muon."""

    takes: ClassVar[Mapping[str, Mapping[str, str | None]]] = {
        "adamw": {"momentum": "exp_avg", "row_square": None},
        "muon": {"row_square": None},
    }

    kind: Annotated[str, "optimizer", Pattern("normuon", "is another optimizer; use normuon")] = "normuon"
    row_beta: Annotated[float, "decay rate of the mean square of each row", Bounds(0, below=1)] = 0.95

    def make(self, shards: Shards) -> "NorMuon":
        return NorMuon(self, shards)


class NorMuon(Muon):
    """An `Optimizer`. The state of a matrix `[R, C]` is `momentum` and, on its owner, `row_square [R]`, fp32."""

    kind, takes = NorMuonConfig.kind, NorMuonConfig.takes

    def __init__(self, config: NorMuonConfig, shards: Shards):
        super().__init__(config, shards)
        self.row_beta = config.row_beta
        owned = set(self.matrices.owned(list(self.momentum)))
        self.row_square = {
            index: torch.zeros(self._rows(index) if index in owned else 0, device=self.device)
            for index in self.momentum
        }

    def _rows(self, index: int) -> int:
        return math.prod(self.shards[index].parameter.shape[:-1])

    def state(self, index: int) -> dict[str, Tensor]:
        found = super().state(index)
        return found if index not in self.row_square else {**found, "row_square": self.row_square[index]}

    def _orthogonalize(self, wholes: Mapping[int, Tensor], skip: Tensor | None) -> dict[int, Tensor]:
        made = super()._orthogonalize(wholes, skip)
        for index, whole in made.items():
            means = whole.float().square().mean(dim=-1).flatten()
            old = self.row_square[index]
            new = torch.lerp(old, means, 1 - self.row_beta)
            old.copy_(new if skip is None else torch.where(skip, old, new))
            divisors = new.sqrt() + EPS
            factors = torch.empty_like(means)
            for rows in self.pieces[index]:
                squares, divisor = means[rows], divisors[rows]
                changed = (squares / divisor.square()).sum()  # squared norm of the divided matrix, over C
                factors[rows] = (squares.sum() / changed.clamp(min=EPS)).sqrt() / divisor
            whole.copy_(whole * factors.view(*whole.shape[:-1], 1))
        return made
