"""What `fully_shard` gathers and scatters, sent by the GPUs' copy engines where the ranks share memory."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtgpt.models.decoder import Decoder
from dtgpt.ops.collectives.layout import aligned
from dtgpt.ops.collectives.pushes import ALIGNED, Meeting, PushedGather, PushedScatter, meeting_bytes
from dtgpt.ops.fast import TRITON
from dtgpt.parallel.gradients import parameter_groups
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import region_of_tp
from dtgpt.parallel.symmetric import symmetric_memory
from dtgpt.parallel.torch_private import AllGather, ReduceScatter, all_gather_single

PLACES = 2  # for the weights of blocks: one is copied out while the next one arrives
ROOM = 1 << 26  # bytes of gradients that arrive from the other ranks at once, at most


class Gather(AllGather):
    """All-gathers of parameter groups into places of shared memory, which the groups use in turn. NCCL gathers what is
    larger than a place: the weights around the blocks, for which the first block waits in any case."""

    def __init__(self, pushed: PushedGather, places: int):
        """places: of equal size, into which the memory is divided."""
        self._pushed = pushed
        self._places = list(pushed.memory.chunk(places))
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor in the next place, the same on all ranks. Raises RuntimeError where it is still in use."""
        count = math.prod(map(int, size)) * dtype.itemsize
        if count > len(self._places[0]):
            return torch.empty(*size, dtype=dtype, device=device)
        memory = self._places.pop(0)
        self._places.append(memory)
        before = self._given.get(memory.data_ptr())
        if before is not None and before() is not None:
            raise RuntimeError(
                f"fully_shard holds all-gathered weights of more than {len(self._places)} groups at once"
            )
        whole = memory[:count].view(dtype)
        self._given[memory.data_ptr()] = weakref.ref(whole)
        return whole

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor`, of which `input_tensor` is this rank's part, with the parts of the others."""
        if output_tensor.nbytes > len(self._places[0]):
            all_gather_single(output_tensor, input_tensor, group)
        else:
            self._pushed.run(output_tensor)


class Scatter(ReduceScatter):
    """Reduce-scatters of the gradients of parameter groups, which are sent as backward made them: their fp32 sums have
    the bits of sums of fp32 copies."""

    def __init__(self, pushed: PushedScatter, wire: torch.dtype):
        """wire: of what is sent."""
        self._pushed, self._wire = pushed, wire
        self._input_is_next = True

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients of a group, then, in a second call, for this rank's part of the sum."""
        chosen = self._wire if self._input_is_next else dtype
        self._input_is_next = not self._input_is_next
        return torch.empty(*size, dtype=chosen, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum over the ranks, in fp32 and in their order."""
        self._input_is_next = True
        self._pushed.run(input_tensor, output_tensor)


def push_shards(part: Decoder, mesh: Mesh, dtype: torch.dtype, wire: torch.dtype) -> None:
    """Let copy engines gather the weights of blocks, in `dtype`, and scatter gradients, of the type `wire`, of a part
    that `shard_over_data` wrapped, where the ranks share memory. All ranks of the mesh take part."""
    group, ranks = mesh.devices.get_group("shard"), mesh.plan.shard
    counts = [sum(_padded(p, mesh) for p in parameters) for parameters in parameter_groups(part)]
    place = aligned(max(counts[: len(part.blocks)], default=0) * dtype.itemsize, ALIGNED)
    room = min(ROOM, aligned(max(counts) // ranks * wire.itemsize, ALIGNED)) * (ranks - 1)
    sizes = [PLACES * place, room, meeting_bytes(ranks), meeting_bytes(ranks)]
    shared = symmetric_memory(mesh, group, sum(sizes), usable=TRITON)
    if shared is None:
        return
    weights, gradients, *flags = zip(*(memory.split(sizes) for memory in shared.of_ranks), strict=True)
    first, second = (Meeting(flag, group.rank()) for flag in flags)  # of two streams
    gather, scatter = Gather(PushedGather(weights, first), PLACES), Scatter(PushedScatter(gradients, second), wire)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)


def _padded(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Return the elements of a parameter as `fully_shard` gathers it, with equal parts of all ranks."""
    rows, *rest = map(len, region_of_tp(parameter, mesh.place))
    return math.prod([-(-rows // mesh.plan.shard) * mesh.plan.shard, *rest])
