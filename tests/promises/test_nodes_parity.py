"""Plans whose processes are on several nodes, against one process."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtgpt.compare.verdict import difference
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from tests.promises.test_parity import DATA, PIPELINE, PRODUCTS, SEED, STEPS, TENSOR, TOLERANCE, reference, sized_for
from tests.support.nodes import ROOT, Nodes, why_no_nodes

PLANS = {name: parse_plan(name) for name in (*DATA, *TENSOR, *PIPELINE, *PRODUCTS)}
LAYOUTS = [(4, 1), (2, 2), (4, 2)]  # nodes, and processes of each


@pytest.fixture
def recipe(recipe) -> Recipe:
    return replace(recipe, optimizer=OptimizerConfig(lr=3e-3, warmup=2), steps=STEPS, micro_batch_size=2, seed=SEED)


@pytest.mark.long
@pytest.mark.parametrize(("count", "per_node"), LAYOUTS)
def test_plans_over_nodes_follow_one_process(recipe, tmp_path, count, per_node):
    if why := why_no_nodes():
        pytest.skip(why)
    world = count * per_node
    plans = {name: plan for name, plan in PLANS.items() if plan.world == world}
    assert len(plans) >= (1 if world == 8 else 18)
    jobs = [(str(tmp_path / f"{name}.record"), under(recipe, plan)) for name, plan in plans.items()]
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    with Nodes(count, tmp_path / "nodes") as nodes:
        for rank in range(world):
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
            more = {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
            more |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
            words = sys.executable, "-m", "tests.support.records_over_nodes", tmp_path / "jobs"
            nodes[rank // per_node].start(*words, cwd=ROOT, **more)
        nodes.wait_until(
            lambda: all(command.poll() is not None for node in nodes for command in node.commands), 900, "the end"
        )
        assert all(command.returncode == 0 for node in nodes for command in node.commands), nodes.outputs()
    differences = {}
    for (file, job), name in zip(jobs, plans, strict=True):
        found = difference(pickle.loads(Path(file).read_bytes()), reference(job))
        differences[name] = found.loss
        assert found.within(TOLERANCE, TOLERANCE), (name, found)
    print(f"{len(plans)} plans over {count} nodes of {per_node}: largest difference {max(differences.values()):.1e}")


def under(recipe: Recipe, plan: Plan) -> Recipe:
    return replace(sized_for(recipe, plan), plan="under test", plans={"under test": plan})
