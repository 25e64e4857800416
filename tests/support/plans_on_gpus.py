"""Records of several plans, one after the other in one process group, which is quicker than a start of each:

    torchrun --nproc-per-node 2 tests/support/plans_on_gpus.py JOBS.json FOLDER

JOBS.json is a list of {"name", "recipe", "steps", "options", "moved"}; FOLDER/NAME.safetensors is what `dtgpt compare`
would keep of a job. moved: begin with weights moved by their last bit. Used by tests only.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from dtgpt.compare.record import Record, move_weights, read_record, record, save_record
from dtgpt.config.execution import choose_device
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.util.peers import VARIABLES, Process
from dtgpt.util.shared.environment import child_environment


def work(job: dict, folder: Path) -> None:
    with open_trainer(load_recipe(Path(job["recipe"]), job["options"])) as trainer:
        if job.get("moved"):
            move_weights(trainer)
        save_record(record(trainer, job["steps"]), folder / f"{job['name']}.safetensors")


def main(jobs: list[dict], folder: Path) -> None:
    process = Process.from_environment()
    if process.world > 1:
        recipe = load_recipe(Path(jobs[0]["recipe"]), jobs[0]["options"])
        start_process_group(choose_device(recipe.device, process.local_rank), recipe.timeout)
    for job in jobs:
        try:
            work(job, folder)
        except BaseException:
            print(f"{job['name']} failed on rank {process.rank}", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)  # peers may wait in a collective for ever
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if process.world > 1:
        end_process_group()


def records(jobs: list[dict], folder: Path, world: int) -> dict[str, Record]:
    """Run the jobs on `world` processes and return their records by name."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    environment = {k: v for k, v in child_environment().items() if k not in VARIABLES.values()}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, str(file), str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return {job["name"]: read_record(folder / f"{job['name']}.safetensors") for job in jobs}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
