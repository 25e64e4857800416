"""Styles of the roles that GPT-2 and LLaMA do not have."""

from functools import partial
from operator import mul
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from dtgpt.models.binding import bind
from dtgpt.ops.linear import linear
from dtgpt.ops.local_tensors import on_local_tensors
from dtgpt.parallel.collectives import Collectives
from dtgpt.parallel.tensor import ActivationLayout, Partition, SequencePart, sum_parts, whole_input


class BranchEnd(ParallelStyle):
    """A style for where a branch begins or ends that is cut within: its input, laid out by `into`, becomes whole, or
    what the ranks have made is summed and laid out by `out`. All within computes with local tensors."""

    def __init__(self, peers: Collectives | None, into: Placement | None = None, out: Placement | None = None):
        super().__init__()
        self.peers, self.into, self.out = peers, into, out

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if self.into is not None:
            given = ActivationLayout(device_mesh, self.into, self.peers)
            module.register_forward_pre_hook(
                lambda module, inputs: whole_input(inputs[0], given).to_local(grad_placements=[Partial()])
            )
        if self.out is not None:
            made = ActivationLayout(device_mesh, self.out, self.peers)
            module.register_forward_hook(lambda module, inputs, addend: sum_parts(addend, made))
        return module


class InnerPart(Partition):
    """A style for a matrix within such a branch."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, product=partial(on_local_tensors, linear))
        return super()._apply(module, device_mesh)


class RowStack(Partition):
    """A style for a stack of matrices that are cut by their inputs. One rank adds the biases, or the sum over the ranks
    would have them several times."""

    sums_over_tp = ("bias",)

    def __init__(self) -> None:
        super().__init__(weight=2)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, sums_over_tp=self.sums_over_tp, through=partial(mul, float(device_mesh.get_local_rank() == 0)))
        return super()._apply(module, device_mesh)


class JointNormShard(Partition):
    """A style for a norm of all heads: its weight is cut between heads, and its mean is over those of all ranks."""

    def __init__(self) -> None:
        super().__init__(weight=0)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, sum_of_heads=partial(sum_addends, mesh=device_mesh))
        return super()._apply(module, device_mesh)


def sum_addends(addend: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks. Each rank goes on with its own heads, so that gradients are addends, too."""
    whole = DTensor.from_local(addend, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def branch_entry(between: Placement, peers: Collectives | None) -> BranchEnd:
    """Return the style of where a branch begins."""
    return BranchEnd(peers, into=between)


def branch_exit(between: Placement, peers: Collectives | None) -> BranchEnd:
    """Return the style of where a branch ends."""
    return BranchEnd(peers, out=between)


def inner_column(*_: object) -> InnerPart:
    """Return the style of a matrix within a branch that is cut by its outputs."""
    return InnerPart(weight=0, bias=0)


def inner_row(*_: object) -> InnerPart:
    """Return the style of a matrix within a branch that is cut by its inputs."""
    return InnerPart(weight=1)


def column_stack(*_: object) -> Partition:
    """Return the style of a stack of matrices that are cut by their outputs."""
    return Partition(weight=1, bias=1)


def row_stack(*_: object) -> RowStack:
    """Return the style of a stack of matrices that are cut by their inputs."""
    return RowStack()


def router(*_: object) -> SequencePart:
    """Return the style of a router: each rank has the addend of the gradient that comes from its part of experts."""
    return SequencePart("weight", "bias")


def sinks(*_: object) -> Partition:
    """Return the style of a core whose heads have sinks."""
    return Partition(sinks=0)


def joint_norm(*_: object) -> JointNormShard:
    """Return the style of a norm of all heads."""
    return JointNormShard()
