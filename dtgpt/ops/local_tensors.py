"""Linear maps of a weight that tensor parallelism has cut, for what capabilities compute in place of a plain product.

A `DTensor` of a cut weight is taken apart here once, so that no product behind it knows of ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Parts(Protocol):
    """Activations of which each rank has its part, or which each has whole. Neither method is differentiable."""

    @property
    def cut(self) -> bool:
        """Whether each rank has its part."""

    def gather(self, part: Tensor) -> Tensor:
        """Return the activations `[B, T, H]` that each rank has whole, from each rank's own; of any type."""

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum of the ranks' `whole` `[B, T, H]`, of which each rank gets its own; maybe in place."""


def on_local_tensors(function: Function, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `function(x, weight, bias)`, a linear map x w^T + bias: of DTensors a DTensor, from what the function
    makes of this rank's part of each.

    x: `[.., in]`; weight: `[out, in]`, whole or cut along one mesh dimension; bias: `[out]` or None. Of a weight that
    is cut by its outputs, each rank has its features of the result, and an addend of the gradient of x; of one cut by
    its inputs, an addend of the result. The function sees plain tensors, and so does its backward. For a plain x the
    result is plain: what the function makes of this rank's parts.
    """
    if not (is_dtensor(x) and is_dtensor(weight)):
        return function(x, local(weight), None if bias is None else local(bias))
    (cut,) = weight.placements
    mesh, rows = weight.device_mesh, cut.is_shard(1)
    given, given_gradient, made = _layouts(cut, x.ndim)
    x = _redistributed(x, given).to_local(grad_placements=[given_gradient])
    local_bias = None if bias is None or rows else local(bias)
    y = function(x, local(weight), local_bias)
    whole = type(weight).from_local(y, mesh, [made], run_check=False)
    return whole + bias if rows and bias is not None else whole


def _layouts(cut: "Placement", ndim: int) -> "tuple[Placement, Placement, Placement]":
    """Return the layouts of the input, of its gradient and of the output, for a weight that is laid out by `cut`."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not cut.is_shard():
        return Replicate(), Replicate(), Replicate()
    if cut.is_shard(0):
        return Replicate(), Partial(), Shard(ndim - 1)
    return Shard(ndim - 1), Shard(ndim - 1), Partial()


def _redistributed(x: "DTensor", placement: "Placement") -> "DTensor":
    return x if x.placements == (placement,) else x.redistribute(placements=[placement])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, whose gradient is that of the part; a plain tensor as it is."""
    return tensor.to_local(grad_placements=tensor.placements) if is_dtensor(tensor) else tensor
