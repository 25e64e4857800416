"""Runs of a recipe in this process, for tests. Used by tests only."""

from dataclasses import replace
from pathlib import Path

import torch

from dtgpt.metrics import read_records
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.plan import Plan
from dtgpt.signals import StopRequest
from dtgpt.train import Training, read_dataset


def newest_run(recipe) -> Path:
    return max(Path(recipe.runs).iterdir())


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(run / "metrics.jsonl") if "loss" in r}


def training(recipe) -> Training:
    """As one process on the CPU."""
    mesh = Mesh(Plan(dp=1), torch.device("cpu"))
    return Training(recipe, mesh, read_dataset(recipe), None, StopRequest())


def change(recipe, **groups):
    """`change(recipe, steps=3, log={"interval": 2})`."""
    return replace(
        recipe, **{k: replace(getattr(recipe, k), **v) if isinstance(v, dict) else v for k, v in groups.items()}
    )
