"""Tests of two ranks on two GPUs."""

import subprocess
import sys
from pathlib import Path

import torch

from dtgpt.parallel.mesh import Mesh


def run_on_two_gpus(folder: Path, program: str) -> None:
    """Run a program in two ranks under torchrun."""
    (folder / "program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(torchrun, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def delay(mesh: Mesh, turn: int) -> None:
    """Keep the GPU of one rank busy for up to a millisecond, now and then."""
    if mesh.device.type == "cuda" and turn % 5 == mesh.rank:
        torch.cuda._sleep(turn * 7919 % 10 * 150_000)
