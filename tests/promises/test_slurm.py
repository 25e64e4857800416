"""recipes/slurm.sbatch as it is, on nodes of one process each, with scripts in place of Slurm's commands."""

import os
import signal

import pytest

from tests.support.node_runs import RECIPE, losses, reference, write_text
from tests.support.nodes import ROOT, Nodes, why_no_nodes
from tests.support.slurm import JOB, Slurm

SCRIPT = ROOT / "recipes" / "slurm.sbatch"


@pytest.fixture(autouse=True)
def needs_nodes():
    if why := why_no_nodes():
        pytest.skip(why)


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert list(found) == list(expected)
    assert all(abs(found[step] - loss) < 1e-5 * loss for step, loss in expected.items())


@pytest.mark.long
def test_a_job_survives_a_killed_process_and_a_preemption(tmp_path):
    options = "--steps", "40", "--checkpoint.interval", "5"
    with Nodes(2, tmp_path) as nodes, Slurm(nodes, PYTHONPATH=str(ROOT), STEP_SECONDS="0.3") as slurm:
        write_text(nodes.shared)
        runs = nodes.shared / "runs" / JOB
        slurm.sbatch(SCRIPT, RECIPE, *options)
        slurm.wait_until(lambda: max(losses(runs), default=0) >= 7, 120, "step 7")
        os.kill(nodes[1].workers()[0], signal.SIGKILL)
        slurm.wait_until(lambda: "run " in nodes[0].output().partition("starting again")[2], 120, "the next start")
        step = max(losses(runs))
        slurm.wait_until(lambda: max(losses(runs)) >= step + 3, 120, "three more steps")
        slurm.signal_tasks(signal.SIGTERM)
        assert slurm.wait(400) == 0, nodes.outputs()
        assert slurm.starts == 2
        found = losses(runs)
    assert_same(found, reference(tmp_path, *options))


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_job_that_lost_a_node_is_requeued_and_goes_on(tmp_path, index):
    with Nodes(2, tmp_path) as nodes, Slurm(nodes, PYTHONPATH=str(ROOT), STEP_SECONDS="0.3") as slurm:
        write_text(nodes.shared)
        runs = nodes.shared / "runs" / JOB
        slurm.sbatch(SCRIPT, RECIPE, "--checkpoint.interval", "5")
        slurm.wait_until(lambda: max(losses(runs), default=0) >= 7, 120, "step 7")
        slurm.lose(nodes[index])
        assert slurm.wait(200) == 0, nodes.outputs()
        assert slurm.starts == 2
        found = losses(runs)
    assert_same(found, reference(tmp_path))


@pytest.mark.long
def test_a_job_that_cannot_go_on_ends_with_its_error(tmp_path):
    with Nodes(2, tmp_path) as nodes, Slurm(nodes, PYTHONPATH=str(ROOT)) as slurm:
        slurm.sbatch(SCRIPT, RECIPE)  # there is no text.txt
        assert slurm.wait(400) == 1 and slurm.starts == 1, nodes.outputs()
        assert "data.path=text.txt does not exist" in nodes[0].output()
        assert "starting again" not in nodes[0].output()
