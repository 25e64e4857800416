"""What the gate uses of PyTorch although it is private."""

from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> AbstractContextManager[object]:
    """Return a context whose operations no mode of dispatch sees, such as that of recomputation that keeps results: it
    counts operations, and wants the same ones in backward."""
    return _disable_current_modes()


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def forget_meshes() -> None:
    """Clear the caches of DTensor, which take meshes of the same ranks for equal, also when the groups of the first are
    gone. To be called after the end of a process group, where the process goes on to another one."""
    from torch.distributed.tensor import _redistribute, debug  # slow to import

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
        clear()
