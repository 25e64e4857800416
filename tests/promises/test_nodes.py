"""Runs over several nodes that come late, leave and come back, and what a wrong network says."""

import re
import subprocess
import sys

import pytest

from tests.support.node_runs import OUTSIDE, STORE, NodeRun, reference
from tests.support.nodes import ROOT, Nodes, why_no_nodes

pytestmark = pytest.mark.slow(58)

FAILURES = ("worker", "agent", "node", "link", "partition")
FLAGS = re.MULTILINE | re.DOTALL
TOLERANCE = 1e-5  # between plans, in fp32


@pytest.fixture(autouse=True)
def needs_nodes():
    if why := why_no_nodes():
        pytest.skip(why)


def assert_same_curve(found: dict[int, float], expected: dict[int, float]) -> None:
    assert list(found) == list(expected)
    for step, loss in expected.items():
        assert abs(found[step] - loss) < TOLERANCE * loss, step


def test_a_run_survives_the_loss_of_a_node(tmp_path):
    options = "--steps", "40", "--lost_after", "5"
    with Nodes(2, tmp_path) as nodes:
        run = NodeRun(nodes, "1:2", *options, step_seconds=0.3, forks=True)
        run.start(*nodes)
        run.wait_for_step(12, 400)
        lost_at = run.step()
        nodes[1].kill()
        nodes.wait_until(lambda: "plan    single" in nodes[0].output(), 400, "one node")
        run.hurry()
        nodes.wait_until(lambda: nodes[0].commands[-1].poll() == 0, 400, "the end")
        found, again = run.losses(), run.resumed()
    assert_same_curve(found, reference(tmp_path, *options))
    assert len(again) == 1 and again[0] >= lost_at - 10, again


@pytest.mark.long
def test_a_node_that_comes_late_joins_the_run_and_its_loss_is_survived(tmp_path):
    options = "--steps", "400", "--lost_after", "8"
    with Nodes(2, tmp_path) as nodes:
        run = NodeRun(nodes, "1:2", *options, step_seconds=0.5)
        run.start(nodes[0])
        run.wait_for_step(2, 400)
        run.start(nodes[1])
        nodes.wait_until(lambda: re.search("^plan +dp2$.*^step", nodes[0].output(), FLAGS), 400, "two nodes")
        joined = run.step()
        run.wait_for_step(joined + 10, 400)
        nodes[1].kill()
        nodes.wait_until(lambda: nodes[0].output().count("plan    single") == 2, 400, "one node again")
        run.hurry()
        nodes.wait_until(lambda: nodes[0].commands[-1].poll() == 0, 400, "the end")
        found, again = run.losses(), run.resumed()
    assert_same_curve(found, reference(tmp_path, *options))
    assert len(again) == 2 and again[0] > 1 and again[1] > joined - 10, again


@pytest.mark.long
@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("eth9", "GLOO_SOCKET_IFNAME=eth9: node0 has no network interface eth9; name one of"),
        ("lo", "GLOO_SOCKET_IFNAME"),  # which connects to no other node
    ],
)
def test_a_wrong_interface_is_one_sentence(tmp_path, interface, words):
    with Nodes(2, tmp_path, GLOO_SOCKET_IFNAME=interface) as nodes:
        run = NodeRun(nodes, "2")
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node0"}
        for node in nodes:  # as torchrun starts it, without the time that torchrun takes
            more = place | {"MASTER_PORT": "29500", "RANK": str(node.index)}
            node.start(sys.executable, *run.words, cwd=nodes.shared, **run.environment, **more)
        nodes.wait_until(lambda: all(node.commands[-1].poll() is not None for node in nodes), 90, "the end")
        assert [node.commands[-1].returncode for node in nodes] == [2, 2], nodes.outputs()
        last = nodes[0].output().splitlines()[-1]
        assert last.startswith("dtgpt: ") and words in last, nodes.outputs()
        assert "Traceback" not in nodes.outputs()


@pytest.mark.long
def test_a_rendezvous_outside_of_the_nodes_survives_each_of_them(tmp_path):
    options = "--steps", "40"
    with Nodes(2, tmp_path) as nodes:
        nodes.start_on_login(sys.executable, "-c", STORE)
        run = NodeRun(nodes, "1:2", *options, host="login", settings=OUTSIDE, step_seconds=0.4)
        run.start()
        run.wait_for_step(12, 400)
        nodes[0].kill()
        nodes.wait_until(lambda: nodes[1].commands[-1].poll() == 0, 200, "the end on node1")
        assert "plan    single" in nodes[1].output(), nodes.outputs()
        found = run.losses()
    assert_same_curve(found, reference(tmp_path, *options))


@pytest.mark.long
def test_a_slow_link_slows_a_run_down_and_is_taken_for_no_loss(tmp_path):
    options = "--steps", "12"
    with Nodes(2, tmp_path) as nodes:
        nodes[1].slow(0.3)  # the gradients of a step take longer than the heartbeats' interval
        run = NodeRun(nodes, "2", *options)
        run.start()
        run.wait_for_end(300)
        assert not run.resumed() and "dtgpt: rank" not in nodes.outputs(), nodes.outputs()
        found = run.losses()
    assert_same_curve(found, reference(tmp_path, *options))


@pytest.mark.long
@pytest.mark.parametrize("kind", FAILURES)
def test_a_run_ends_at_its_last_step_whatever_fails(tmp_path, kind):
    """Ten failures at random moments, of two runs. The table of docs/cluster.md is what this prints."""
    words = [sys.executable, str(ROOT / "benchmarks" / "failures.py"), "--failures", kind, "--times", "10"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
