"""One rank of a job of any size, in this process alone: its groups are real in all but their members."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.coordinates import RankCoordinates
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.torch_private import forget_meshes, join_fake_group

Groups = dict[str, list[int]]  # of one rank: tp, dp, pp, and ends, the two ranks that may share a tied table


@contextmanager
def open_one_rank(plan: ResolvedPlan, rank: int) -> Iterator[Mesh]:
    """Yield the mesh of `rank` on the meta device, in a process group whose other members do not exist. What is built
    on this mesh has shapes and placements, but no memory."""
    several = plan.world > 1
    if several:
        join_fake_group(rank, plan.world)
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
    first = place.rank - place.tp - place.dp * plan.tp
    groups = {
        "tp": [first + place.dp * plan.tp + tp for tp in range(plan.tp)],
        "dp": [first + dp * plan.tp + place.tp for dp in range(plan.dp)],
        "pp": [place.neighbour(pp) for pp in range(plan.pp)],
    }
    if last and place.pp in (0, last):
        groups["ends"] = [place.neighbour(0), place.neighbour(last)]
    return {name: members for name, members in groups.items() if len(members) > 1}
