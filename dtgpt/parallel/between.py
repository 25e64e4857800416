"""What tensor-parallel ranks do between two pairs of matrices: activations that each rank has whole, or its part of the
sequence of, become the input of a matrix that is cut by columns, and so does the sum of a matrix that is cut by rows.

In eager execution a faster transport may take the place of NCCL.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtgpt.parallel.collectives import Collectives, GroupCollectives


def dim_of(placement: Placement) -> int | None:
    """Return the dimension along which a tensor is cut; None where each rank has it whole."""
    return placement.dim if isinstance(placement, Shard) else None


@dataclass(frozen=True)
class Between:
    """How activations lie on the tp ranks between two pairs of matrices: each rank has them whole (`Replicate`), or its
    part (`Shard`). `peers`: what gathers and sums them faster, where it takes them."""

    mesh: DeviceMesh
    placement: Placement
    peers: Collectives | None

    @property
    def cut(self) -> bool:
        """Whether each rank has its part."""
        return dim_of(self.placement) is not None

    def gather(self, part: Tensor) -> Tensor:
        """Return the activations that each rank has whole, from each rank's own; without a gradient."""
        dim, shape = dim_of(self.placement), [*part.shape]
        if dim is not None:
            shape[dim] *= self.mesh.size()
        return self._collectives(shape, part.itemsize).gather(part, dim)

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum of the ranks' `whole`, of which each rank gets its own; without a gradient. The sum that all
        ranks keep may take the place of its addend."""
        return self._collectives([*whole.shape], whole.itemsize).sum(whole, dim_of(self.placement))

    def _collectives(self, whole: list[int], itemsize: int) -> Collectives | GroupCollectives:
        fits = self.peers and self.peers.takes(whole, dim_of(self.placement), itemsize)
        return self.peers if self.peers and fits else GroupCollectives(self.mesh.get_group())


def sum_parts(part: Tensor, layout: Between) -> Tensor:
    """Return `layout.sum(part)`; backward, the gradient that each rank has whole."""
    if torch.compiler.is_compiling():
        addend = DTensor.from_local(part, layout.mesh, [Partial()], run_check=False)
        return addend.redistribute(layout.mesh, [layout.placement]).to_local()
    return _Sum.apply(part, layout)


def whole_input(x: Tensor, layout: Between) -> DTensor:
    """Return a local activation as a DTensor that each rank has whole."""
    if torch.compiler.is_compiling():
        part = DTensor.from_local(x, layout.mesh, [layout.placement], run_check=False)
        return part if layout.placement.is_replicate() else part.redistribute(layout.mesh, [Replicate()])
    return _Whole.apply(x, layout)


def sum_rows(rows: DTensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the sum of what the ranks found of a table that is cut by rows, laid out by `placement`."""
    if torch.compiler.is_compiling():
        return rows.redistribute(mesh, [placement]).to_local()
    return _SumRows.apply(rows, mesh, placement)


class _Sum(torch.autograd.Function):
    """All-reduce or reduce-scatter, forward; the identity or an all-gather, backward."""

    @staticmethod
    def forward(ctx, part: Tensor, layout: Between) -> Tensor:
        ctx.layout = layout
        return layout.sum(part)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.layout.gather(grad), None


class _SumRows(torch.autograd.Function):
    """The sum over the ranks of embeddings that each looked up in its rows of the table, a DTensor; an all-gather of
    their gradient, backward."""

    @staticmethod
    def forward(ctx, rows: DTensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim_of(placement)
        return rows.redistribute(mesh, [placement]).to_local()

    @staticmethod
    def backward(ctx, grad: Tensor):
        whole = GroupCollectives(ctx.mesh.get_group()).gather(grad, ctx.dim)
        return DTensor.from_local(whole, ctx.mesh, [Replicate()], run_check=False), None, None


class _Whole(torch.autograd.Function):
    """A local activation as a DTensor that each rank has whole, by an all-gather where it is a part; backward, the sum
    of the gradients of the ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, layout: Between) -> DTensor:
        ctx.layout = layout
        return DTensor.from_local(layout.gather(x), layout.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        layout = ctx.layout
        if grad.placements[0].is_partial():
            return layout.sum(grad.to_local()), None
        return grad.redistribute(layout.mesh, [layout.placement]).to_local(), None
