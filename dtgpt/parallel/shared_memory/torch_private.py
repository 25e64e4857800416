"""What memory that GPUs share needs of PyTorch although it is private."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.util.hardware import beside_allocator

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # noqa: F401
    from torch.distributed.tensor import DTensor


def __getattr__(name: str) -> Any:
    """Return the classes of `fully_shard` for the collectives of a group, which take half a second to import."""
    if name not in ("AllGather", "ReduceScatter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    return getattr(_fsdp_api, name)


def gather_by_own_memory(parameter: nn.Parameter, weight: Tensor, inputs: Callable[[Any], tuple[Any, Any]]) -> None:
    """Let modules compute with `weight`, whose memory a custom all-gather fills, where `fully_shard` would copy what it
    has gathered. inputs: `fsdp_pre_all_gather` of torch's extension for weights that are gathered in another form,
    which `fully_shard` looks up on the local tensor of a parameter: here a plain tensor, not one of a subclass."""

    def use_weight(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (weight, ())

    local: Any = cast("DTensor", parameter)._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = inputs, use_weight


def share_memory(size: int, device: torch.device, group: dist.ProcessGroup) -> list[Tensor]:
    """Return `size` bytes of zeros of each rank of the group, uint8, as this rank's GPU reaches them. This rank's live
    as long as its own tensor or a view of it. All ranks take part. Raises an exception of any kind where torch has no
    symmetric memory, or where the GPUs cannot share theirs."""
    from torch.distributed import _symmetric_memory  # of torch with CUDA

    own = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(own, group)
    own.zero_()
    torch.cuda.synchronize(device)
    beside_allocator[id(own)] = own
    # What the handle returns is an address without an owner, also for this rank: the memory is freed with `own`.
    of_ranks = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
    of_ranks[group.rank()] = own
    return of_ranks
