"""recipes/skypilot.yaml: the fields of a task of SkyPilot, and the command that a node of a cloud executes."""

import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dtgpt.train.start import load_recipe

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FIELDS = {
    "name": str, "workdir": str, "num_nodes": int, "resources": dict, "file_mounts": dict, "envs": dict, "setup": str,
    "run": str,
}  # fmt: skip


def test_torchrun_starts_the_recipe_on_each_node_that_is_rented(tmp_path):
    task = yaml.safe_load((ROOT / "recipes" / "skypilot.yaml").read_text())
    assert all(isinstance(value, FIELDS[name]) for name, value in task.items())
    assert task["resources"] == {"accelerators": "H100:8"} and set(task["envs"]) == {"DTGPT"}
    told = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    shell = 'torchrun() { printf "%q " "$@"; }\n' + task["run"]
    variables = {f"SKYPILOT_{name}": value for name, value in told.items()}
    done = subprocess.run(["bash", "-euc", shell], env=variables, capture_output=True, text=True, check=True)
    started = get_args_parser().parse_args(shlex.split(done.stdout))
    assert (started.nnodes, started.nproc_per_node, started.node_rank) == ("2", "8", 1)
    assert (started.master_addr, started.master_port, started.training_script) == ("10.0.0.1", 29500, "mine.py")
    recipe = load_recipe(ROOT / "recipes" / "gpt2_124m.py", started.training_script_args)
    assert (recipe.resume, recipe.checkpoint.minutes, recipe.data.path) == ("auto", 10, "text.jsonl")
