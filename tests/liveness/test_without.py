"""Without the watch over processes, runs of several train all the same: torch brings them together."""

import os
from pathlib import Path

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.util import peers, seams
from dtgpt.util.peers import Process
from tests.support.fresh import run_fresh
from tests.support.ports import held_port
from tests.support.runs import losses

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
rank = os.environ["LOCAL_RANK"] = os.environ["RANK"] = "1" if (other := os.fork()) else "0"
from dtgpt.capabilities import CAPABILITIES
from dtgpt.util import seams
seams.use(module for module, _ in CAPABILITIES if module != "dtgpt.liveness")
from dtgpt.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
assert not [name for name in sys.modules if name.startswith("dtgpt.liveness.")]
assert not other or os.waitpid(other, 0)[1] == 0
"""


@pytest.fixture
def alone():
    modules = [module for module, _ in CAPABILITIES]
    seams.use(module for module in modules if module != "dtgpt.liveness")
    yield
    seams.use(modules)


def test_nobody_watches_over_one_process_or_without_the_capability(alone):
    for world in (1, 2):
        with peers.peers(world).watch(Process(rank=0, world=world), 1.0, 1.0) as watch:
            assert type(watch) is peers.Watch and watch.store is None
            watch.tell(ValueError("lost"))
            watch.end_run(3)
        assert peers.peers(world).wait_if_left_over(Process(rank=0, world=world), 1, None, 1, 1, "", False) is None


def test_one_process_asks_nobody_where_the_capability_is_there():
    assert type(peers.peers(1)) is peers.Peers and type(peers.peers(2)) is not peers.Peers


@pytest.mark.slow(5)
def test_two_processes_train_without_it(tmp_path):
    words = ["train", "recipes/gpt2_tiny.py", "--steps", "2", "--device", "cpu", "--plan", "tp2", "--log.interval", "1"]
    words += ["--log.eval_interval", "0", "--log.sample_tokens", "0", "--runs", str(tmp_path / "runs")]
    words += ["--model.hidden_size", "32", "--model.num_heads", "2", "--data.tokenizer", "bytes"]
    several = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    with held_port() as port:
        done = run_fresh(["-c", PROGRAM, *words], ROOT, {**os.environ, **several, "MASTER_PORT": str(port)})
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert list(losses(run)) == [1, 2]
