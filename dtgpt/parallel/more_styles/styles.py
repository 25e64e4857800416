"""Styles of the roles that GPT-2 and LLaMA do not have."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dtgpt.models.binding import bind
from dtgpt.parallel.collectives import Collectives
from dtgpt.parallel.tensor import ActivationLayout, Partition, sum_parts, whole_input


class LocalPart(Partition):
    """A style for a module that computes with local tensors, such as a stack of matrices: its input, laid out by
    `into`, becomes whole, or what it makes is summed and laid out by `out`."""

    def __init__(
        self, peers: Collectives | None, into: Placement | None = None, out: Placement | None = None, **dims: int
    ):
        super().__init__(**dims)
        self.peers, self.into, self.out = peers, into, out

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if self.into is not None:
            given = ActivationLayout(device_mesh, self.into, self.peers)
            module.register_forward_pre_hook(
                lambda module, inputs: (
                    whole_input(inputs[0], given).to_local(grad_placements=[Partial()]),
                    *inputs[1:],
                )
            )
        if self.out is not None:
            made = ActivationLayout(device_mesh, self.out, self.peers)
            module.register_forward_hook(lambda module, inputs, addend: sum_parts(addend, made))
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


def column_stack(between: Placement, peers: Collectives | None) -> LocalPart:
    """Return the style of a stack of matrices that are cut by their outputs."""
    return LocalPart(peers, into=between, weight=1, bias=1)


def row_stack(between: Placement, peers: Collectives | None) -> LocalPart:
    """Return the style of a stack of matrices that are cut by their inputs."""
    return LocalPart(peers, out=between, weight=2)


def sinks(*_: object) -> Partition:
    """Return the style of a core whose heads have sinks."""
    return Partition(sinks=0)


def joint_norm(*_: object) -> JointNormShard:
    """Return the style of a norm of all heads."""
    return JointNormShard()
