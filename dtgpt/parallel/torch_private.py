"""All names of PyTorch that dtgpt uses although they are private, or public in newer versions only."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default group met. Raises RuntimeError where there is none."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set how long a collective of the group may wait. Public from torch 2.14 on."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def all_gather_single(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the equal parts of all ranks into one tensor. `all_gather_into_tensor` before torch 2.13, which warns of
    that name on the user's terminal."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def forget_meshes() -> None:
    """Clear the caches of DTensor, which take meshes of the same ranks for equal, also when the groups of the first are
    gone. To be called after the end of a process group, where the process goes on to another one."""
    from torch.distributed.tensor import _redistribute, debug  # slow to import

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
        clear()
