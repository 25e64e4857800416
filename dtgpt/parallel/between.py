"""What tensor-parallel ranks do between two pairs of matrices: activations that each rank has whole, or its part of the
sequence of, become the input of a matrix that is cut by columns, and so does the sum of a matrix that is cut by rows.

In eager execution on GPUs of one host, kernels that reach the other ranks' memory take the place of NCCL.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtgpt.comm.collectives import KernelCollectives, open_collectives
from dtgpt.config.execution import Settings
from dtgpt.parallel.mesh import Mesh

PROGRAMS = 64  # of a kernel, while nothing else runs


def make_peers(settings: Settings, mesh: Mesh) -> KernelCollectives | None:
    """Return the collectives of kernels for the activations of a micro-batch; None where NCCL or gloo runs them. All
    ranks take part."""
    config = settings.model
    whole = settings.micro_batch_size * settings.seq_length * config.hidden_size * settings.dtype.itemsize
    return open_collectives(mesh, mesh.tp_group, whole, PROGRAMS)


def dim_of(placement: Placement) -> int | None:
    """Return the dimension along which a tensor is cut; None where each rank has it whole."""
    return placement.dim if isinstance(placement, Shard) else None


def sum_parts(part: Tensor, mesh: DeviceMesh, placement: Placement, peers: KernelCollectives | None) -> Tensor:
    """Return the sum of the ranks' `part`, laid out by `placement`: `Replicate` or `Shard`. The sum that all ranks keep
    may take the place of its addend."""
    eager, dim = not torch.compiler.is_compiling(), dim_of(placement)
    if eager and peers and peers.takes(part.shape, dim, part.itemsize):
        return _SumByPeers.apply(part, dim, peers)
    if eager and dim is None:
        return _SumInPlace.apply(part, mesh.get_group())
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(mesh, [placement]).to_local()


class _SumInPlace(torch.autograd.Function):
    """All-reduce in place, forward, where DTensor would copy its addend first; the identity backward, since the
    gradient is whole on every rank."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(part, group=group)
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _SumByPeers(torch.autograd.Function):
    """All-reduce or reduce-scatter, forward; the identity or an all-gather, backward."""

    @staticmethod
    def forward(ctx, part: Tensor, dim: int | None, peers: KernelCollectives) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        return peers.sum(part, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad if ctx.dim is None else ctx.peers.gather(grad, ctx.dim), None, None


class _WholeByPeers(torch.autograd.Function):
    """A local activation as a DTensor that each rank has whole, by an all-gather where it is a part; backward, the sum
    of the gradients of the ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: DeviceMesh, placement: Placement, peers: KernelCollectives) -> DTensor:
        ctx.mesh, ctx.placement, ctx.peers = mesh, placement, peers
        return DTensor.from_local(peers.gather(x, dim_of(placement)), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        if grad.placements[0].is_partial():
            return ctx.peers.sum(grad.to_local(), dim_of(ctx.placement)), None, None, None
        return grad.redistribute(ctx.mesh, [ctx.placement]).to_local(), None, None, None


def whole_input(x: Tensor, mesh: DeviceMesh, placement: Placement, peers: KernelCollectives | None) -> DTensor:
    """Return a local activation, laid out by `placement`, as a DTensor that each rank has whole."""
    shape, dim = [*x.shape], dim_of(placement)
    if dim is not None:
        shape[dim] *= mesh.size()
    if not torch.compiler.is_compiling() and peers and peers.takes(shape, dim, x.itemsize):
        return _WholeByPeers.apply(x, mesh, placement, peers)
    part = DTensor.from_local(x, mesh, [placement], run_check=False)
    return part if placement.is_replicate() else part.redistribute(mesh, [Replicate()])
