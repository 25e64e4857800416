"""Where branches begin and end whose matrices sum over the ranks themselves: all else in them is whole on each rank."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from dtgpt.parallel.collectives import Collectives
from dtgpt.parallel.tensor import ActivationLayout, dim_of


class WholeBranchEnd(ParallelStyle):
    """A style for where such a branch begins or ends: an input that ranks have parts of becomes whole, or each goes on
    with its part of the output. The gradients do the reverse; none is added up."""

    def __init__(self, between: Placement, peers: Collectives | None, begins: bool):
        super().__init__()
        self.between, self.peers, self.begins = between, peers, begins

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = ActivationLayout(device_mesh, self.between, self.peers)
        if not layout.cut:
            return module
        if self.begins:
            module.register_forward_pre_hook(lambda module, inputs: _Whole.apply(inputs[0], layout))
        else:
            module.register_forward_hook(lambda module, inputs, whole: _Part.apply(whole, layout))
        return module


def own_part(whole: Tensor, layout: ActivationLayout) -> Tensor:
    """Return this rank's part of activations."""
    dim = dim_of(layout.placement)
    assert dim is not None
    return whole.chunk(layout.mesh.size(), dim)[layout.mesh.get_local_rank()].contiguous()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: ActivationLayout) -> Tensor:
        ctx.layout = layout
        return layout.gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return own_part(grads[0], ctx.layout), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: ActivationLayout) -> Tensor:
        ctx.layout = layout
        return own_part(whole, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.layout.gather(grads[0]), None
