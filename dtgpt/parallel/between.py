"""What tensor-parallel ranks do between two pairs of matrices: activations that each rank has whole, or its part of the
sequence of, become the input of a matrix that is cut by columns, and so does the sum of a matrix that is cut by rows.

In eager execution on GPUs of one host, kernels that reach the other ranks' memory take the place of NCCL.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtgpt.comm.collectives import GroupCollectives, KernelCollectives, open_collectives
from dtgpt.config.execution import Settings
from dtgpt.parallel.mesh import Mesh

PROGRAMS = 64  # of a kernel, while nothing else runs


def make_peers(settings: Settings, mesh: Mesh) -> KernelCollectives | None:
    """Return the collectives of kernels for the activations of a micro-batch; None where NCCL or gloo runs them. All
    ranks take part."""
    config = settings.model
    whole = settings.micro_batch_size * settings.local_length * config.hidden_size * settings.dtype.itemsize
    return open_collectives(mesh, mesh.tp_group, whole, PROGRAMS)


def dim_of(placement: Placement) -> int | None:
    """Return the dimension along which a tensor is cut; None where each rank has it whole."""
    return placement.dim if isinstance(placement, Shard) else None


def sum_parts(part: Tensor, mesh: DeviceMesh, placement: Placement, peers: KernelCollectives | None) -> Tensor:
    """Return the sum of the ranks' `part`, laid out by `placement`: `Replicate` or `Shard`. The sum that all ranks keep
    may take the place of its addend."""
    if torch.compiler.is_compiling():
        return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(mesh, [placement]).to_local()
    dim = dim_of(placement)
    return _Sum.apply(part, dim, _collectives([*part.shape], dim, part.itemsize, mesh, peers))


def whole_input(x: Tensor, mesh: DeviceMesh, placement: Placement, peers: KernelCollectives | None) -> DTensor:
    """Return a local activation, laid out by `placement`, as a DTensor that each rank has whole."""
    if torch.compiler.is_compiling():
        part = DTensor.from_local(x, mesh, [placement], run_check=False)
        return part if placement.is_replicate() else part.redistribute(mesh, [Replicate()])
    shape, dim = [*x.shape], dim_of(placement)
    if dim is not None:
        shape[dim] *= mesh.size()
    return _Whole.apply(x, mesh, placement, _collectives(shape, dim, x.itemsize, mesh, peers))


def sum_rows(rows: DTensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the sum of what the ranks found of a table that is cut by rows, laid out by `placement`."""
    if torch.compiler.is_compiling():
        return rows.redistribute(mesh, [placement]).to_local()
    return _SumRows.apply(rows, mesh, placement)


def _collectives(
    whole: list[int], dim: int | None, itemsize: int, mesh: DeviceMesh, peers: KernelCollectives | None
) -> KernelCollectives | GroupCollectives:
    return peers if peers and peers.takes(whole, dim, itemsize) else GroupCollectives(mesh.get_group())


class _Sum(torch.autograd.Function):
    """All-reduce or reduce-scatter, forward; the identity or an all-gather, backward."""

    @staticmethod
    def forward(ctx, part: Tensor, dim: int | None, collectives: KernelCollectives | GroupCollectives) -> Tensor:
        ctx.dim, ctx.collectives = dim, collectives
        return collectives.sum(part, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad if ctx.dim is None else ctx.collectives.gather(grad, ctx.dim), None, None


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
    def forward(
        ctx, x: Tensor, mesh: DeviceMesh, placement: Placement, collectives: KernelCollectives | GroupCollectives
    ) -> DTensor:
        ctx.mesh, ctx.placement, ctx.collectives = mesh, placement, collectives
        return DTensor.from_local(collectives.gather(x, dim_of(placement)), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        if grad.placements[0].is_partial():
            return ctx.collectives.sum(grad.to_local(), dim_of(ctx.placement)), None, None, None
        return grad.redistribute(ctx.mesh, [ctx.placement]).to_local(), None, None, None
