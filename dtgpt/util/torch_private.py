"""The names of PyTorch that the core uses although they are private, experimental, or public in newer versions only.

A new version of PyTorch may change each of them without a word: they stand in this file, and in the files of the same
name of capabilities, so that nobody has to look for them elsewhere."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether this is a DTensor, without an import of its class."""
    return type(tensor).__name__ == "DTensor"


def constant_result(function: Function) -> Function:
    """Mark a function whose result torch.compile may take for a constant. The public way to do that,
    `torch.compiler.assume_constant_result`, imports the compiler, a second that an eager run does not need."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module on the meta device its memory. The public `to_empty` makes an `empty_like` of each parameter, which
    on the meta device torch computes in Python, by modules that take half a second to import."""

    def memory(tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    module._apply(memory)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set how long a collective of the group may wait. Public from torch 2.14 on."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def all_gather_single(
    output: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Gather the equal parts of all ranks into one tensor. `all_gather_into_tensor` before torch 2.13, which warns of
    that name on the user's terminal. Return what waits for it, where it is asynchronous."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, whole: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Put this rank's part of the sum over the ranks into `output`. `reduce_scatter_tensor` before torch 2.13. Return
    what waits for it, where it is asynchronous."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, whole, group=group, async_op=async_op)
