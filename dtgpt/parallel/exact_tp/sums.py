"""The sums of `--reduce exact` where products are computed in pieces: the squares of the norm are, too."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.decoder import Decoder
from dtgpt.models.roles import ROWS, Role, role_of
from dtgpt.ops.optim.fixed_point import exact_sum, squares_of_rows
from dtgpt.parallel.exact_sums.sums import ExactSums
from dtgpt.parallel.exact_tp.config import pieces_of_size, values_of
from dtgpt.parallel.mesh import Mesh


class PiecewiseSums(ExactSums):
    """`ExactSums` of gradients that tensor-parallel ranks have computed in pieces."""

    spans_tp = True

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._count = dict[nn.Parameter, int]()  # pieces of this rank, of those whose rows tensor parallelism may cut
        self._pieces = dict[int, int]()  # of the rows of gradients, by the identity of these

    def open(self, stages: list[Decoder], mesh: Mesh) -> None:
        super().open(stages, mesh)
        for stage in stages:
            for name, parameter in stage.named_parameters():
                role = role_of(name.rpartition(".")[0], stage.config.roles)
                if parameter.dim() > 1 and (
                    (role in ROWS and name.endswith("weight")) or (role is Role.COLUMN_STACK and name.endswith("bias"))
                ):
                    whole = pieces_of_size(parameter.shape[-1], values_of(self.settings).pieces)
                    self._count[parameter] = whole // mesh.plan.tp

    def gradients(self, parameters: Sequence[nn.Parameter], totals: list[Tensor]) -> list[Tensor]:
        made = super().gradients(parameters, totals)
        pairs = zip(parameters, made, strict=True)
        self._pieces = {id(gradient): self._count[p] for p, gradient in pairs if p in self._count}
        return made

    def squares(self, gradients: list[Tensor], shares: Tensor, alone: list[Tensor]) -> Tensor:
        vectors = torch.cat([g for g in alone if g.dim() == 1] or [shares.new_zeros(0)])
        matrices = [squares_of_rows(self._in_pieces(g)) for g in alone if g.dim() > 1]
        return exact_sum(torch.cat([*matrices, squares_of_rows(vectors)]))

    def _in_pieces(self, gradient: Tensor) -> Tensor:
        """Return the pieces of the rows of a gradient `[.., R, C]` as rows."""
        pieces = self._pieces.get(id(gradient), 1)
        return gradient.contiguous().view(-1, gradient.shape[-1] // pieces)
