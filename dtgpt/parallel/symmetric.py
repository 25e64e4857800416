"""Memory of each rank of a group that all of them can read and write, on GPUs of one host."""

import os
import socket
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtgpt.ops.collectives.peers import WORD, Peers, bytes_for
from dtgpt.ops.fast import TRITON
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.torch_private import SharedMemory, share_memory
from dtgpt.util.console import say

SWITCH = "DTGPT_EXCHANGE"  # an environment variable; "0": no rank of this process shares memory
_first_group: weakref.ref[dist.ProcessGroup] | None = None  # of all ranks, when memory was shared first


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


def symmetric_memory(mesh: Mesh, group: dist.ProcessGroup | None, size: int, usable: bool) -> SharedMemory | None:
    """Return `size` bytes of zeros on each rank of this rank's `group`, which is one dimension of the mesh; None where
    the ranks of any such group cannot reach each other's memory, or where any rank is not `usable`. All ranks of the
    mesh take part, and get memory or not together."""
    if group is None or mesh.device.type != "cuda":
        return None
    devices = mesh.gather(tuple(_device(mesh.device, usable and may_share())))
    mine = [Device(*devices[rank]) for rank in dist.get_process_group_ranks(group)]
    if mesh.any(not _reachable(mine, mesh.device)):
        return None
    shared, reason = None, ""
    try:
        shared = share_memory(size, mesh.device, group)
    except (RuntimeError, AttributeError, ImportError, OSError) as error:  # without it, NCCL does the same
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    if mesh.any(shared is None):
        if reason:
            say(f"GPUs cannot share memory ({reason}): NCCL runs instead, slower", warning=True)
        return None
    return shared


def share_peers(mesh: Mesh, group: dist.ProcessGroup | None, whole: int, programs: int) -> Peers | None:
    """Return collectives of the ranks of `group` for tensors of `whole` bytes in all, by kernels of so many programs;
    None where NCCL or gloo runs them instead. All ranks of the mesh take part."""
    if group is None:
        return None
    ranks = group.size()
    part = -(-whole // (ranks * WORD)) * WORD
    shared = symmetric_memory(mesh, group, bytes_for(part, ranks, programs), usable=TRITON)
    return Peers(shared.addresses, group.rank(), shared.own, part, programs) if shared else None


def _device(device: torch.device, usable: bool) -> Device:
    return Device(socket.gethostname(), _uuid(device.index or 0), usable)


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
