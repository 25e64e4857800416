"""All names of PyTorch that dtgpt uses although they are private, or public in newer versions only."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from dtgpt.util.hardware import count_memory

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # noqa: F401
    from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def __getattr__(name: str) -> Any:
    """Return the classes of `fully_shard` for the collectives of a group, which take half a second to import."""
    if name not in ("AllGather", "ReduceScatter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    return getattr(_fsdp_api, name)


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether this is a DTensor, without an import of its class."""
    return type(tensor).__name__ == "DTensor"


def constant_result(function: Function) -> Function:
    """Mark a function whose result torch.compile may take for a constant, as `torch.compiler.assume_constant_result`
    does. That imports the compiler, which takes a second that an eager run does not need."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module on the meta device its memory, as `to_empty` does. That makes an `empty_like` of each parameter,
    which on the meta device torch computes in Python, by modules that take half a second to import."""

    def memory(tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    module._apply(memory)


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default group met. Raises RuntimeError where there is none."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the process group whose `group_name` this is."""
    return distributed_c10d._resolve_process_group(cast(Any, name))  # a string subtype of torch, for types alone


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set how long a collective of the group may wait. Public from torch 2.14 on."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def all_gather_single(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the equal parts of all ranks into one tensor. `all_gather_into_tensor` before torch 2.13, which warns of
    that name on the user's terminal."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def reduce_scatter_single(
    output: Tensor, whole: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Put this rank's part of the sum over the ranks into `output`. `reduce_scatter_tensor` before torch 2.13. Return
    what waits for it, where it is asynchronous."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, whole, group=group, async_op=async_op)


def gather_by_own_memory(parameter: nn.Parameter, weight: Tensor, inputs: Callable[[Any], tuple[Any, Any]]) -> None:
    """Let modules compute with `weight`, whose memory a custom all-gather fills, where `fully_shard` would copy what it
    has gathered. inputs: `fsdp_pre_all_gather` of torch's extension for weights that are gathered in another form,
    which `fully_shard` looks up on the local tensor of a parameter: here a plain tensor, not one of a subclass."""

    def use_weight(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (weight, ())

    local: Any = cast("DTensor", parameter)._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = inputs, use_weight


def forget_meshes() -> None:
    """Clear the caches of DTensor, which take meshes of the same ranks for equal, also when the groups of the first are
    gone. To be called after the end of a process group, where the process goes on to another one."""
    from torch.distributed.tensor import _redistribute, debug  # slow to import

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
        clear()


def share_memory(size: int, device: torch.device, group: dist.ProcessGroup) -> list[Tensor]:
    """Return `size` bytes of zeros of each rank of the group, uint8, as this rank's GPU reaches them. This rank's live
    as long as its own tensor or a view of it. All ranks take part. Raises an exception of any kind where torch has no
    symmetric memory, or where the GPUs cannot share theirs."""
    from torch.distributed import _symmetric_memory  # of torch with CUDA

    own = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(own, group)
    own.zero_()
    torch.cuda.synchronize(device)
    count_memory(own)
    # What the handle returns is an address without an owner, also for this rank: the memory is freed with `own`.
    of_ranks = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
    of_ranks[group.rank()] = own
    return of_ranks


def backward_of_inputs(outputs: Any, gradients: Any, inputs: Any, weights: Any) -> list[dict[str, Any]]:
    """Run the half of a backward pass that pipeline schedules compute first. Returns the groups of weights that the
    other half, `backward_of_weights(weights, groups)`, is for."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, weights)[1]


def backward_of_weights(weights: Any, groups: list[dict[str, Any]]) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(weights, groups)


_HALVES = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def zero_bubble_order(ranks: int, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    """Return (F, I or W; stage) of what pipeline rank `rank` of torch's ZBV schedule computes in turn: the
    forward pass, and the halves of backward for inputs and for weights."""
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    shape = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks)
    found = ScheduleZBVZeroBubble._calculate_single_rank_operations(cast(Any, shape), rank)
    return [(_HALVES[action.computation_type.name], action.stage_index) for action in found if action is not None]
