"""What the ranks of tests of meshes and launching do: functions importable by name."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dtgpt.parallel.launch
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.launch import agree_on_run, open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.tensor import SequencePositions
from dtgpt.run.folder import values_of
from dtgpt.train.setup import read_dataset, read_on_every_node
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process
from tests.support.bodies_shards import settings_of

CPU = torch.device("cpu")


def refusal(work: Callable[[], Any]) -> str | None:
    """The sentence of the UserError that `work` raises, None where it raises none."""
    try:
        work()
    except UserError as error:
        return str(error)


def refusal_of_build(config: GPT2Config, plan: ResolvedPlan) -> str | None:
    return refusal(lambda: build_stages(settings_of(config, plan), Mesh(plan, CPU), root_key(1)))


def coordinates(plan: ResolvedPlan) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, list[int]]]:
    """(by RankCoordinates, by the device mesh, ranks of the groups)."""
    mesh = Mesh(plan, CPU)
    place = mesh.place
    groups = {"tp": mesh.tp_group, "pp": mesh.pp_group, "tied": mesh.tied_group}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
    replicate = place.dp // plan.shard
    return (place.pp, replicate, place.shard, place.tp), tuple(mesh.devices.get_coordinate()), ranks


def reductions(world: int) -> dict[str, Any]:
    mesh = Mesh(ResolvedPlan(dp=world), CPU)
    rank = mesh.rank
    return {
        "sum": mesh.sum(rank, torch.tensor(0.5), 2.0**40 + 1).tolist(),
        "dtype": mesh.sum(1).dtype,
        "max": mesh.max(rank * 1.5),
        "any": [mesh.any(False), mesh.any(rank == world - 1), mesh.any(True)],
        "vote": [mesh.vote(False, rank == mesh.world - 1), mesh.vote(rank == 0, False), mesh.vote(False, False)],
        "gather": mesh.gather({"rank": rank}),
        "turns": mesh.turns(lambda: rank * 10, lambda r: r % 2 == 1),
        "on_rank_0": mesh.on_rank_0(lambda: f"by {rank}"),
    }


def errors(world: int, failing: int, error: BaseException) -> tuple[str | None, list[float], list[int]]:
    """(what `turns` raised, a sum that shows that ranks are still in step, who worked)."""
    mesh, worked = Mesh(ResolvedPlan(dp=world), CPU), []

    def work() -> None:
        worked.append(mesh.rank)
        if mesh.rank == failing:
            raise error

    sentence = refusal(lambda: mesh.turns(work, lambda rank: rank <= failing))
    return sentence, mesh.sum(1).tolist(), worked


def agreement(recipe: Recipe, plan: ResolvedPlan, what: str) -> str | None:
    """The sentence of `agree_on_run` where rank 1 differs in `what`."""
    other, patch = dist.get_rank() == 1, nullcontext()
    if what == "recipe" and other:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=0.125))
    elif what == "plan" and other:
        plan = replace(plan, blocks_per_stage=(1, 3))
    elif what == "style":  # equal on all ranks, but made in each of them
        rest = [SequencePositions() for _ in range(1000 * dist.get_rank())]
        plan = replace(plan, table={"embedding.wpe": SequencePositions()})
        del rest
    elif what == "code" and other:
        digests = dtgpt.parallel.launch.code_digests() | {"ops/dropout.py": "0ther"}
        patch = mock.patch.object(dtgpt.parallel.launch, "code_digests", lambda: digests)
    elif what == "file" and other:
        digests = dtgpt.parallel.launch.code_digests() | {"mine.py": "0ther"}
        patch = mock.patch.object(dtgpt.parallel.launch, "code_digests", lambda: digests)
    elif what == "torch" and other:
        patch = mock.patch.object(torch, "__version__", "2.0.0")
    with patch:
        return refusal(lambda: agree_on_run(values_of(recipe), plan, CPU))


def open_and_close(recipe: Recipe, plan: ResolvedPlan) -> str | None:
    def work() -> None:
        with open_mesh(
            recipe.settings(plan, CPU), recipe.timeout, Process.from_environment(), values_of(recipe)
        ) as mesh:
            assert mesh.sum(1) == mesh.world
        assert dist.is_initialized()  # it ends the group only where it began it

    return refusal(work)


def agree_on(values: list[dict[str, Any]]) -> str | None:
    """`Mesh.agree` where each rank has its own of `values`."""
    mesh = Mesh(ResolvedPlan(dp=len(values)), CPU)
    return refusal(lambda: mesh.agree(values[mesh.rank], "make them equal"))


def read_texts(recipe: Recipe, paths: list[Path]) -> tuple[str | None, list[str]]:
    """Reading a text of its own on each rank: (sentence, in which order the files were read)."""
    mesh = Mesh(ResolvedPlan(dp=len(paths)), CPU)
    mine = replace(recipe, data=replace(recipe.data, path=str(paths[mesh.rank])))
    process = Process(rank=mesh.rank, world=mesh.world, local_rank=mesh.rank, local_world=mesh.world)
    return refusal(lambda: read_on_every_node(lambda: read_dataset(mine), mesh, process))


def timeouts(plan: ResolvedPlan, seconds: float) -> list[float]:
    """Of each group of a mesh that was told to wait so long."""
    mesh = Mesh(plan, CPU)
    mesh.set_timeout(seconds)
    groups = [mesh.devices.get_group(name) for name in mesh.devices.mesh_dim_names] + [mesh.tied_group]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def number_of_groups(plan: ResolvedPlan) -> int:
    """Groups that this rank is in, once a mesh is made: torch names those of the next mesh by it."""
    Mesh(plan, CPU)
    return len(dist.distributed_c10d._world.pg_names)
