"""One rank of a plan, built as training builds it but alone and on the meta device, compared with the plan."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtgpt.compare.torch_private import forget_meshes
from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.build import build_stages, make_engine
from dtgpt.parallel.collectives import FlatSum
from dtgpt.parallel.engine import Graphs
from dtgpt.parallel.exact_sums.buckets import ExactBucket, RoundedBucket, SummedBucket
from dtgpt.parallel.exact_sums.sums import ExactSums
from dtgpt.parallel.gradients import Bucket, Buckets
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.narrow_sums.sums import NarrowSum
from dtgpt.parallel.shards import Shard, Shards
from dtgpt.parallel.shared_memory.pieces import Pieces
from dtgpt.parallel.shared_memory.regions import region_of_tp
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.optimizer import OptimizerCosts
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.sums import costs_of

BYTES = "weights, fp32", "moments, fp32", "gradients", "16-bit weights"
Groups = dict[str, list[int]]  # of one rank: tp, dp, pp, and ends, the two ranks that may share a tied table


@dataclass(frozen=True)
class BuiltParameter:
    """A parameter as a rank holds it."""

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]  # what the optimizer works on
    by_tp: int  # elements after tensor parallelism, before ZeRO
    placement: str  # the cut dimension of each degree, such as `tp 0, dp 0`


@dataclass(frozen=True)
class BuiltRank:
    """What one rank holds before the first step; bytes without padding."""

    place: RankCoordinates
    groups: Groups
    blocks: list[list[int]]  # of each of its stages
    parameters: list[BuiltParameter]
    weights: int  # fp32 masters
    low_precision: int  # 16-bit copies that modules compute with
    gradients: int
    padding: int  # further bytes that the buckets of gradients hold
    moments: int

    def bytes(self) -> dict[str, int]:
        """Return what planning says, too, by the names of `planned_bytes`."""
        sizes = self.weights, self.moments, self.gradients, self.low_precision
        return dict(zip(BYTES, sizes, strict=True))


def build_rank(settings: Settings, optimizer: OptimizerConfig, rank: int) -> BuiltRank:
    """Return `rank` as `Trainer` builds it: mesh, stages, shards, buckets and optimizer, all without memory."""
    with open_one_rank(settings.plan, rank) as mesh:
        stages, shards = build_stages(settings, mesh, key=None)
        make_engine(stages, shards, settings, Graphs())
        return describe_built(stages, shards, optimizer.make(shards), settings)


def describe_built(stages: list[Decoder], shards: Shards, optimizer: Optimizer, settings: Settings) -> BuiltRank:
    """Return what a rank holds of a model, by `build_stages`, `make_engine` and `OptimizerConfig.make`."""
    place = shards.mesh.place
    gradients, padding = _gradients(shards, settings)
    return BuiltRank(
        place=place,
        groups=groups_of(shards.mesh),
        blocks=[[int(index) for index in stage.blocks] for stage in stages],
        parameters=[_parameter(shard, place) for shard in shards],
        weights=sum(shard.local.nbytes for shard in shards),
        low_precision=sum(shard.low_precision.nbytes for shard in shards if shard.low_precision is not None),
        gradients=gradients,
        padding=padding,
        moments=sum(t.nbytes for shard in shards for t in optimizer.state(shard.index).values()),
    )


def differences(built: BuiltRank, settings: Settings) -> list[str]:
    """Return a sentence for each way in which a rank is not as planning says; none where all is well."""
    plan, place = settings.plan, built.place
    held, ranges = parameters_of(settings.model, plan, place.rank), block_ranges(settings.model, plan)
    pairs: list[tuple[str, Any, Any]] = [
        ("process groups", built.groups, planned_groups(place)),
        ("blocks", built.blocks, [list(ranges[stage]) for stage in place.stages]),
    ]
    expected = planned_bytes(settings, place.rank)
    pairs += [(f"bytes of {what}", here, expected[what]) for what, here in built.bytes().items()]
    found = [f"{what}: built {here}, planned {there}" for what, here, there in pairs if here != there]
    have = Counter((p.name, math.prod(p.local), p.by_tp) for p in built.parameters)
    want = Counter((p.name, p.local, p.by_tp) for p in held)
    for how, some in (("built", have - want), ("planned", want - have)):
        found += [f"{name}: {how} with {n} elements, {m} before ZeRO" for name, n, m in some]
    return found


def planned_bytes(settings: Settings, rank: int) -> dict[str, int]:
    """Return what planning says of the bytes on `rank`, by the names BYTES."""
    held = parameters_of(settings.model, settings.plan, rank)
    local, by_tp = sum(p.local for p in held), sum(p.by_tp for p in held)
    narrow = settings.dtype.itemsize * by_tp if settings.low_precision else 0
    alone = replace(settings, device=torch.device("cpu"))  # a rank that is built shares no memory with others
    state = (
        sum(OptimizerCosts(settings.optimizer).state_bytes(p.shape, p.role) * p.local for p in held)
        if settings.optimizer
        else 0
    )
    sizes = 4 * local, state, costs_of(alone).bytes_of(held), narrow
    return dict(zip(BYTES, sizes, strict=True))


def _parameter(shard: Shard, place: RankCoordinates) -> BuiltParameter:
    parameter, cuts = shard.parameter, []
    if isinstance(parameter, DTensor):
        degrees = {"tp": "tp", "shard": "dp"}
        named = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        dims = [(degrees.get(name), getattr(cut, "dim", None)) for name, cut in named]  # None: replicated
        cuts = sorted((f"{degree} {dim}" for degree, dim in dims if degree and dim is not None), reverse=True)
    by_tp = _elements_of_tp(shard, place)
    return BuiltParameter(shard.name, tuple(parameter.shape), tuple(shard.local.shape), by_tp, ", ".join(cuts))


def _elements_of_tp(shard: Shard, place: RankCoordinates) -> int:
    return math.prod(map(len, region_of_tp(shard.parameter, place)))


def _gradients(shards: Shards, settings: Settings) -> tuple[int, int]:
    """Return (bytes of gradients at the end of a step, bytes of padding). Buckets have them from the start; without,
    autograd and `fully_shard` make them in backward: as the parameters are, in fp32 under ZeRO."""
    sums, place = shards.sums, shards.mesh.place
    if not isinstance(sums, Buckets):
        used = 0
        for shard in shards:
            width = 4 if settings.plan.zero else shard.parameter.element_size()
            used += width * (shard.local.numel() if sums.cuts else _elements_of_tp(shard, place))
        return used, 0
    used = sum(map(used_by_exact if isinstance(sums, ExactSums) else used_by, sums.all))
    whole = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(sums.all)}.values())
    padding = whole - used
    # Those that the optimizer gets, or that stay on the parameters until then.
    if (isinstance(sums, ExactSums) and not sums.rounds) or not sums.hooks:
        used += sum(shard.local.nbytes for shard in shards)
    return used, padding


def used_by(bucket: Bucket) -> int:
    """The bytes of gradients in a bucket: what is sent, what arrives in 16 bits, and the sum of several passes."""
    used, wire = sum(total.numel() for total in bucket.sums), bucket.wire.element_size()
    narrow = isinstance(bucket._over_replicas, NarrowSum)
    return used * (wire * (1 + narrow) + (0 if bucket.flat is bucket.wire else 4))


def used_by_exact(bucket: ExactBucket) -> int:
    """The bytes of sums in a bucket, and of what ZeRO cuts afterwards, or what travels to be rounded."""
    used, whole = sum(total.nbytes for total in bucket.sums), sum(map(math.prod, bucket.shapes))
    if isinstance(bucket, SummedBucket):
        return used + (8 * whole if bucket.ranks > 1 else 0)
    if isinstance(bucket, RoundedBucket):
        return used + bucket._sent[0].element_size() * (whole + bucket.tied * bucket.sums[-1].numel())
    return used


def tensors_of(found: Any) -> Iterator[Tensor]:
    """The tensors of at least one dimension that buckets hold, without parameters."""
    if isinstance(found, Tensor):
        if found.dim() and not isinstance(found, nn.Parameter):
            yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from tensors_of(one)
    elif isinstance(found, Bucket | ExactBucket | FlatSum | Pieces):
        yield from tensors_of(list(vars(found).values()))


@contextmanager
def open_one_rank(plan: ResolvedPlan, rank: int) -> Iterator[Mesh]:
    """Yield the mesh of `rank` on the meta device, in a process group whose other members do not exist. What is built
    on this mesh has shapes and placements, but no memory."""
    several = plan.world > 1
    if several:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world)
    try:
        yield Mesh(plan, torch.device("meta"))
    finally:
        if several:
            dist.destroy_process_group()
            forget_meshes()


def groups_of(mesh: Mesh) -> Groups:
    """Return the ranks of the groups that `mesh` has made, without groups of one rank."""
    if mesh.world == 1:
        return {}
    made = {"tp": mesh.tp_group, "dp": mesh.devices.get_group("shard" if mesh.plan.zero else "replicate")}
    made |= {"pp": mesh.pp_group, "ends": mesh.tied_group}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in made.items() if group is not None}
    return {name: members for name, members in ranks.items() if len(members) > 1}


def planned_groups(place: RankCoordinates) -> Groups:
    """Return what `groups_of` must be, by the order of the ranks alone."""
    plan, last = place.plan, place.plan.stage_rank(place.plan.num_stages - 1)
    first = place.rank - place.tp - place.data * plan.tp
    groups = {
        "tp": [first + place.data * plan.tp + tp for tp in range(plan.tp)],
        "dp": [first + data * plan.tp + place.tp for data in range(plan.data_ranks)],
        "pp": [place.neighbour(pp) for pp in range(plan.pp)],
    }
    if last and place.pp in (0, last):
        groups["ends"] = [place.neighbour(0), place.neighbour(last)]
    return {name: members for name, members in groups.items() if len(members) > 1}
