"""Tensors of which the ranks of a plan hold parts, whole on rank 0."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel import mesh as mesh_module
from dtgpt.parallel.layout import Region, slices
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard, Shards


def gather_whole(
    shards: Shards, value: Callable[[Shard], Tensor], chosen: Callable[[Shard], bool] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, whole tensor on the CPU) of every parameter, by name, on rank 0; (name, None) on the others, which
    must run through it likewise. `value` returns a tensor of the shape of `shard.local`. chosen: which parameters these
    are, if not all."""
    mesh, mine = shards.mesh, [shard for shard in shards if shard.replica == 0 and not shard.is_tied_copy]
    owned = {shard.name: shard for shard in mine if chosen is None or chosen(shard)}
    regions: dict[str, list[tuple[int, Region]]] = {}
    for rank, held in enumerate(mesh.gather({name: shard.region for name, shard in owned.items()})):
        for name, region in held.items():
            regions.setdefault(name, []).append((rank, region))
    for name in sorted(regions):
        own = value(owned[name]).detach().float().cpu().contiguous() if name in owned else torch.empty(0)
        if mesh.rank == 0:
            yield name, _assemble(mesh, regions[name], own)
            continue
        if own.numel():
            dist.send(own, 0, group=mesh_module.messages)
        yield name, None


def _assemble(mesh: Mesh, regions: list[tuple[int, Region]], own: Tensor) -> Tensor:
    whole = torch.empty([max(r.stop for r in dims) for dims in zip(*(r for _, r in regions), strict=True)])
    for rank, region in regions:
        if all(map(len, region)):
            piece = own if rank == 0 else torch.empty([len(r) for r in region])
            if rank != 0:
                dist.recv(piece, rank, group=mesh_module.messages)
            whole[slices(region)] = piece
    return whole
