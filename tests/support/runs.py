"""Runs of a recipe in this process, for tests. Used by tests only."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.sinks import read_records
from dtgpt.train.objective import objective_of
from dtgpt.train.setup import open_trainer, read_dataset
from dtgpt.train.trainer import Trainer

if TYPE_CHECKING:
    from dtgpt.compare.record import Record, Tracing


def newest_run(recipe) -> Path:
    return max(Path(recipe.runs).iterdir())


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(run / "metrics.jsonl") if "loss" in r}


def training(recipe) -> Trainer:
    """As one process on the recipe's device."""
    plan, device = ResolvedPlan(dp=1), torch.device(recipe.device)
    return Trainer(
        recipe, recipe.settings(plan, device), Mesh(plan, device), objective_of(recipe).make(read_dataset(recipe))
    )


def on_cuda(recipe, **changes):
    """With a model that fills a warp, and a learning rate that does not change."""
    model = {"hidden_size": 128, "seq_length": 64}
    return change(recipe, **{"device": "cuda", "steps": 40, "model": model, "optimizer": constant(1e-3), **changes})


def constant(lr: float) -> dict:
    """Of an optimizer, for `change`: this learning rate in every step."""
    return {"lr": lr, "schedule": "constant", "warmup": 0}


def change(recipe, **groups):
    """`change(recipe, steps=3, log={"interval": 2})`."""
    return replace(
        recipe, **{k: replace(getattr(recipe, k), **v) if isinstance(v, dict) else v for k, v in groups.items()}
    )


def rate_of(step: int, recipe) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0."""
    return recipe.schedule.rates(step + 1, recipe.batch_sizes())[step]


def record(recipe, steps: int, moved: bool = False) -> "Record | None":
    """Return what `dtgpt compare` records of a plan, on rank 0. moved: from weights moved by their last bit."""
    from dtgpt.compare import record as recording

    with open_trainer(recipe) as trainer:
        if moved:
            recording.move_weights(trainer)
        return recording.record(trainer, steps)


def traced_record(recipe, tracing: "Tracing", change: str = "", steps: int = 1) -> "Record | None":
    """Return the record of traced steps, on rank 0. change: a statement that plants a fault in the `trainer`."""
    from dtgpt.compare import record as recording

    with open_trainer(recipe) as trainer:
        exec(change, {"trainer": trainer, "torch": torch})
        return recording.record(trainer, steps, tracing=tracing)
