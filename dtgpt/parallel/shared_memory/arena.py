"""Memory of each rank of a group that all of them can read and write, on GPUs of one host.

`share` decides, the same on all ranks, whether kernels and copy engines move tensors in such memory. Where it returns
None, NCCL or gloo does the same.
"""

import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel.shared_memory.torch_private import share_memory
from dtgpt.util.console import say
from dtgpt.util.shared.gpu_limits import TRITON

SWITCH = "DTGPT_EXCHANGE"  # an environment variable; "0": no rank of this process shares memory
ALIGNED = 512  # bytes to which areas are aligned, as memory that torch allocates
_first_group: weakref.ref[dist.ProcessGroup] | None = None  # of all ranks, when memory was shared first


class AllRanks(Protocol):
    """All ranks of a run: what `share` needs of `parallel.mesh.Mesh`, which documents it."""

    device: torch.device

    def gather(self, value: Any) -> list[Any]: ...
    def any(self, flag: bool) -> bool: ...


@dataclass(frozen=True)
class Area:
    """Equally many bytes in the memory of each rank of a group, all of them zero at first.

    of_ranks: uint8 `[size]` of each rank, at the address by which this rank's GPU reaches them. The memory of this rank
    lives as long as its own tensor or a view of it.
    """

    of_ranks: tuple[Tensor, ...]
    rank: int

    @property
    def own(self) -> Tensor:
        return self.of_ranks[self.rank]

    @property
    def ranks(self) -> int:
        return len(self.of_ranks)

    @property
    def others(self) -> list[int]:
        """The ranks of the group without this one, in ascending order."""
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def addresses(self) -> Tensor:
        """Return where the area of each rank begins, int64 `[ranks]`, in this rank's memory."""
        places = [memory.data_ptr() for memory in self.of_ranks]
        return torch.tensor(places, dtype=torch.int64, device=self.own.device)


class Device(NamedTuple):
    """A rank's GPU, as other ranks may know it."""

    host: str
    gpu: str  # its UUID
    usable: bool  # whether the rank could use shared memory


def may_share() -> bool:
    """Return whether this process may share memory: not where the environment says no, nor in another group of all
    ranks than that of the first call. torch knows symmetric memory by the names of groups, and groups that begin after
    others have ended get the same names."""
    global _first_group
    world = dist.group.WORLD
    if _first_group is None and world is not None:
        _first_group = weakref.ref(world)
    return os.environ.get(SWITCH) != "0" and _first_group is not None and _first_group() is world


def aligned(size: int, multiple: int = ALIGNED) -> int:
    """Return the next multiple of `multiple`."""
    return -(-size // multiple) * multiple


def share(
    everyone: AllRanks, group: dist.ProcessGroup | None, sizes: Sequence[int], usable: bool = True
) -> list[Area] | None:
    """Return areas of these `sizes` in bytes, shared by this rank's `group`, which is one dimension of the mesh.

    None where the ranks of any such group cannot reach each other's memory, where Triton is missing, or where any rank
    is not `usable`: all ranks get areas, or none does. All ranks of the mesh take part.
    """
    if group is None:
        return None
    places = [aligned(size) for size in sizes]
    memories = shared_memory(everyone, group, sum(places), usable)
    if memories is None:
        return None
    pieces = zip(*(memory.split(places) for memory in memories), strict=True)
    return [
        Area(tuple(piece[:size] for piece in of_ranks), group.rank())
        for size, of_ranks in zip(sizes, pieces, strict=True)
    ]


def shared_memory(everyone: AllRanks, group: dist.ProcessGroup, size: int, usable: bool) -> list[Tensor] | None:
    """Return `size` bytes of zeros of each rank of the group; None: as `share`."""
    if everyone.device.type != "cuda":
        return None
    own = Device(socket.gethostname(), _uuid(everyone.device.index or 0), usable and TRITON and may_share())
    devices = everyone.gather(tuple(own))
    mine = [Device(*devices[rank]) for rank in dist.get_process_group_ranks(group)]
    if everyone.any(not _reachable(mine, everyone.device)):
        return None
    memories, reason = None, ""
    try:
        memories = share_memory(size, everyone.device, group)
    except (RuntimeError, AttributeError, ImportError, OSError) as error:  # without it, NCCL does the same
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    if everyone.any(memories is None):
        if reason:
            say(f"GPUs cannot share memory ({reason}): NCCL runs instead, slower", warning=True)
        return None
    return memories


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _reachable(devices: list[Device], own: torch.device) -> bool:
    """Return whether all ranks have usable GPUs of this host, one each, whose memory this rank's GPU can reach."""
    seen = {_uuid(index): index for index in range(torch.cuda.device_count())}
    index = own.index or 0
    if len({device.gpu for device in devices}) < len(devices) or not all(device.usable for device in devices):
        return False
    return all(
        device.host == socket.gethostname()
        and device.gpu in seen
        and (seen[device.gpu] == index or torch.cuda.can_device_access_peer(index, seen[device.gpu]))
        for device in devices
    )
