"""Which part of every parameter this rank holds, in global indices.

Whatever a plan did to the model, what is left on a rank is a rectangle of each global tensor. Initial weights, the
optimizer, the gradient norm and checkpoints work on these rectangles, and need to know nothing else of the plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtgpt.model import GPT, TABLE, GPTConfig, fill_weight, unique_parameters
from dtgpt.parallel.mesh import Mesh, Place, chunk

Part = tuple[range, ...]


@dataclass(frozen=True)
class Shard:
    """One parameter's share on this rank."""

    name: str  # of the whole parameter: the same under every plan
    parameter: nn.Parameter  # what the module holds
    local: nn.Parameter  # this rank's memory of it, a plain tensor: what the optimizer works on
    part: Part  # global indices of `local`
    copies: int  # ranks that hold this same part, each counted in the norm by 1 / copies
    second: bool  # the token table once more, where the head is on another stage: trained like the first, never counted
    keeper: bool  # of all ranks that hold this part, this one speaks for it


class Shards:
    """All that this rank holds of the model, as shards."""

    def __init__(self, stages: list[GPT], mesh: Mesh):
        self.mesh = mesh
        self.all = [
            _shard(name, parameter, mesh.place, second=stage.embedding is None and name == TABLE)
            for stage in stages
            for name, parameter in unique_parameters(stage).items()
        ]
        self._counted = [s for s in self.all if not s.second]
        self._shares = torch.tensor([1 / s.copies for s in self._counted], device=mesh.device)
        self._tables = [s for s in self.all if s.name == TABLE]

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.all)

    @torch.no_grad()
    def initialize(self, config: GPTConfig, key: Tensor) -> None:
        """Draw this rank's part of the initial weights, straight into its memory."""
        for shard in self.all:
            fill_weight(shard.local, shard.name, shard.part, config, key)

    def take_gradients(self) -> None:
        """Hand the gradients that the passes left on the modules to the local tensors, those of the tied table summed
        over the stages that hold it."""
        for shard in self.all:
            gradient = shard.parameter.grad
            shard.local.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if self.mesh.tied_group is not None:
            for shard in self._tables:
                dist.all_reduce(shard.local.grad, group=self.mesh.tied_group)
        elif len(self._tables) == 2:  # first and last stage are both here
            first, second = self._tables
            first.local.grad += second.local.grad
            second.local.grad.copy_(first.local.grad)

    def drop_gradients(self) -> None:
        for shard in self.all:
            shard.parameter.grad = shard.local.grad = None

    def norm(self) -> Tensor:
        """The global norm of the gradient, fp32 on the device and equal on all ranks: what several ranks hold counts
        once, and so does the tied table."""
        norms = torch.stack(torch._foreach_norm([s.local.grad for s in self._counted]))
        squares = (norms.square() * self._shares).sum()
        if self.mesh.world > 1:
            dist.all_reduce(squares)
        return squares.sqrt()

    def gather(self, value: Callable[[Shard], Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        """(name, whole tensor on the CPU) of every parameter, by name, on rank 0; (name, None) on the others, which
        must run through it likewise. `value` gives a tensor of the shape of `shard.local`."""
        keepers = {s.name: s for s in self.all if s.keeper}
        parts: dict[str, list[tuple[int, Part]]] = {}
        for rank, held in enumerate(self.mesh.gather({name: s.part for name, s in keepers.items()})):
            for name, part in held.items():
                parts.setdefault(name, []).append((rank, part))
        for name in sorted(parts):
            mine = value(keepers[name]).detach().cpu().contiguous() if name in keepers else None
            yield name, self._assemble(parts[name], mine)

    def _assemble(self, parts: list[tuple[int, Part]], mine: Tensor | None) -> Tensor | None:
        if self.mesh.rank != 0:
            if mine is not None and mine.numel():
                dist.send(mine, 0)
            return None
        whole = torch.empty([max(r.stop for r in dims) for dims in zip(*(p for _, p in parts), strict=True)])
        for rank, part in parts:
            if all(map(len, part)):
                piece = mine if rank == 0 else torch.empty([len(r) for r in part])
                if rank != 0:
                    dist.recv(piece, rank)
                whole[slices(part)] = piece
        return whole


def _shard(name: str, parameter: nn.Parameter, place: Place, second: bool) -> Shard:
    part, tp_cut = _part(parameter, place)
    local = nn.Parameter(parameter.to_local()) if isinstance(parameter, DTensor) else parameter
    if tuple(local.shape) != tuple(map(len, part)):
        raise ValueError(f"{name}: this rank holds {tuple(local.shape)}, but its part is {tuple(map(len, part))}")
    return Shard(
        name=name,
        parameter=parameter,
        local=local,
        part=part,
        copies=place.plan.replicate * (1 if tp_cut else place.plan.tp),
        second=second,
        keeper=not second and place.dp == place.shard and (tp_cut or place.tp == 0),
    )


def _part(parameter: nn.Parameter, place: Place) -> tuple[Part, bool]:
    """(global indices of this rank's part, whether tp cuts it). Tensor parallelism cuts first, then ZeRO cuts the first
    dimension of what is left."""
    part = [range(size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(part), False
    names = parameter.device_mesh.mesh_dim_names
    tp = parameter.placements[names.index("tp")] if "tp" in names else None
    tp_cut = tp is not None and tp.is_shard()
    if tp_cut:
        part[tp.dim] = chunk(part[tp.dim], place.plan.tp, place.tp)
    part[0] = chunk(part[0], place.plan.shard, place.shard)
    return tuple(part), tp_cut


def slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(r.start, r.stop) for r in part)
