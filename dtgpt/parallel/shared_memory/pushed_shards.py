"""What `fully_shard` gathers and scatters, sent by the GPUs' copy engines where the ranks share memory."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from dtgpt.models.decoder import Decoder
from dtgpt.parallel.gradients import parameter_groups
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory.arena import Area, aligned, share
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.parallel.shared_memory.gather import PLACES, CopyGather
from dtgpt.parallel.shared_memory.regions import region_of_tp
from dtgpt.parallel.shared_memory.scatter import CopyScatter
from dtgpt.parallel.shared_memory.torch_private import AllGather, ReduceScatter, gather_by_own_memory


class GroupGather(AllGather):
    """The all-gather of a parameter group, from shards in the type of the weights to the memory that the modules of all
    ranks compute with. `fully_shard`, which says when, gathers and copies a single number itself."""

    def __init__(self, copies: CopyGather, device: torch.device):
        self._copies = copies
        self._number = torch.zeros(1, dtype=torch.uint8, device=device)
        self._given = False

    def inputs(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return what `fully_shard` gathers of a parameter: for the first one of the group the number."""
        given, self._given = self._given, True
        return () if given else (self._number,), None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the number of each rank."""
        self._given = False
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the weights of the group on all ranks."""
        self._copies.run()


class GroupScatter(ReduceScatter):
    """Reduce-scatters of the gradients of parameter groups, which are sent as backward made them: their fp32 sums have
    the bits of sums of fp32 copies."""

    def __init__(self, copies: CopyScatter, wire: torch.dtype):
        """wire: of what is sent."""
        self._copies, self._wire = copies, wire
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
        self._copies.run(input_tensor, output_tensor)


def push_shards(part: Decoder, mesh: Mesh, dtype: torch.dtype, wire: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Let copy engines gather the weights, in `dtype`, and scatter gradients, of the type `wire`, of a part that
    `shard_over_data` wrapped, where the ranks share memory. All ranks of the mesh take part. Returns the shards in
    16 bits that lie among these weights: the optimizer writes them, too."""
    group, ranks = mesh.devices.get_group("shard"), mesh.plan.shard
    modules, groups = zip(*parameter_groups(part), strict=True)
    sizes, places = _layout(groups, len(part.blocks), mesh, dtype)
    largest = max(sum(_padded(p, mesh) for p in parameters) for parameters in groups)
    room = CopyScatter.bytes(largest // ranks * wire.itemsize, ranks)
    areas = share(mesh, group, [*sizes, room, Barrier.bytes(ranks), Barrier.bytes(ranks)])
    if areas is None:
        return {}
    *weights, gradients, first, second = areas
    gate = Barrier(first)  # of the stream of all-gathers
    scatter = GroupScatter(CopyScatter(gradients, Barrier(second)), wire)
    shards: dict[nn.Parameter, Tensor] = {}
    for module, parameters, place in zip(modules, groups, places, strict=True):
        made, gather = _gather(parameters, weights[place], gate, places.count(place) == 1, mesh, dtype)
        shards.update((p, shard) for p, shard in zip(parameters, made, strict=True) if shard.dtype != torch.float32)
        sharded = cast(FSDPModule, module)
        sharded.set_custom_all_gather(gather)
        sharded.set_custom_reduce_scatter(scatter)
    return shards


def _layout(
    groups: Sequence[list[nn.Parameter]], blocks: int, mesh: Mesh, dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """Return the bytes of areas for weights, and which of these each group uses. Blocks whose weights are freed after
    forward use PLACES areas in turn."""
    sizes = [sum(_weight_bytes(p, mesh, dtype) for p in parameters) for parameters in groups]
    places = min(PLACES, blocks) if mesh.plan.reshards else blocks
    largest = [max(sizes[place:blocks:places]) for place in range(places)]
    return [*largest, *sizes[blocks:]], [i % places if i < blocks else i - blocks + places for i in range(len(groups))]


def _weight_bytes(parameter: nn.Parameter, mesh: Mesh, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter's place in shared memory."""
    return aligned(math.prod(map(len, region_of_tp(parameter, mesh.place))) * dtype.itemsize)


def _gather(
    parameters: list[nn.Parameter], area: Area, barrier: Barrier, alone: bool, mesh: Mesh, dtype: torch.dtype
) -> tuple[list[Tensor], GroupGather]:
    """Return the shards of a group's parameters, and what gathers them into the beginning of the area of all ranks.
    alone: no other group uses this memory; shards in the type of the weights then lie in their places there,
    else each gather rounds fp32 shards into them."""
    shards: list[Tensor] = []
    places, weights, start = [], [], 0
    for parameter in parameters:
        rows, *rest = map(len, region_of_tp(parameter, mesh.place))
        size = math.prod([rows, *rest]) * dtype.itemsize
        mine = chunk(range(rows), mesh.plan.shard, barrier.rank)
        wholes = [memory[start : start + size].view(dtype).view(rows, *rest) for memory in area.of_ranks]
        places.append([whole[mine.start : mine.stop] for whole in wholes])
        weights.append(_alias(wholes[barrier.rank]))
        in_place = alone and dtype != torch.float32
        shards.append(places[-1][barrier.rank] if in_place else cast(DTensor, parameter).to_local().detach())
        start += aligned(size)
    gather = GroupGather(CopyGather(shards, places, barrier), area.own.device)
    for parameter, weight in zip(parameters, weights, strict=True):
        gather_by_own_memory(parameter, weight, gather.inputs)
    return shards, gather


def _alias(weight: Tensor) -> Tensor:
    """Return a tensor of the same memory with a storage of its own, which begins there, as `fully_shard` assumes, and
    with its own count of writes: autograd must not take another gather into it for a change of what it has saved."""
    return from_dlpack(to_dlpack(weight))


def _padded(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Return the elements of a parameter's gradient as `fully_shard` scatters it, with equal parts of all ranks."""
    rows, *rest = map(len, region_of_tp(parameter, mesh.place))
    return math.prod([-(-rows // mesh.plan.shard) * mesh.plan.shard, *rest])
