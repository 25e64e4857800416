"""How a run ends: what is left to do after its last step, and why it ends before."""

import signal
from importlib.util import find_spec
from pathlib import Path

from dtgpt.checkpoint.folder import Checkpoint
from dtgpt.console import counted, say
from dtgpt.data.dataset import Dataset
from dtgpt.errors import UserError
from dtgpt.metrics import read_records
from dtgpt.parallel.mesh import Mesh
from dtgpt.recipe import Recipe
from dtgpt.report import sample_path
from dtgpt.run import AUTO
from dtgpt.signals import StopRequest

LEFT = {"valid": "held-out loss", "test": "test loss", "sample": "last sample", "plot": "loss plot"}
OVER = "{} has done its {}; nothing is left to do"


def is_over(run: Path, checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Return whether the run has done more steps than the recipe has, and say so. Raises UserError where the user named
    the run."""
    done = checkpoint.state["step"]
    if done > recipe.steps and recipe.resume != AUTO:
        raise UserError(f"{run} has already done {counted(done, 'step')}; raise --steps to go on")
    if done > recipe.steps:
        say(OVER.format(run, counted(done, "step")))
    return done > recipe.steps


def left_to_do(run: Path | None, checkpoint: Checkpoint | None, recipe: Recipe, data: Dataset) -> list[str] | None:
    """Return None where steps are to be done, else what the run does not hold of the last one: names of LEFT. Says so
    where that is nothing."""
    if checkpoint is None or checkpoint.state["step"] < recipe.steps:
        return None
    metrics, picture = run / "metrics.jsonl", run / "loss.png"
    records = [record for record in read_records(metrics) if record["step"] == recipe.steps]
    left = []
    for part in ("valid", "test"):
        wanted = next(data.held_out(part, recipe.model.seq_length, 1, 1), None) is not None
        if wanted and not any(f"{part}_loss" in record for record in records):
            left.append(part)
    if recipe.log.sample_tokens and not sample_path(run, recipe.steps).is_file():
        left.append("sample")
    drawn = picture.is_file() and metrics.is_file() and picture.stat().st_mtime >= metrics.stat().st_mtime
    if left or (records and not drawn and find_spec("matplotlib")):
        left.append("plot")
    if not left:
        say(OVER.format(run, counted(recipe.steps, "step")))
    return left


def stopped(where: str, stop: StopRequest, leaving: bool, recipe: Recipe, mesh: Mesh, hint: str = "") -> int:
    """Say where and why a run ends early, and return its exit code: 0 where an option asked for it, else 128 + the
    signal, agreed across ranks. `leaving`: because of `exit_interval`."""
    number, minutes = int(mesh.max(stop.requested or 0)), recipe.exit_after
    code, reason = 128 + (number or signal.SIGTERM), ""
    if number == 0 and leaving:
        code, reason = 0, f" (exit_interval {recipe.exit_interval})"
    elif number == 0 and minutes is not None:
        code, reason = 0, f" after {minutes:g} minute{'' if minutes == 1 else 's'} (exit_after)"
    say(f"stopped {where}{reason}{hint}")
    return code


def folder_lost(run: Path, step: int) -> UserError:
    return UserError(
        f"the run folder {run} was moved, removed or replaced while the run was at step {step}; nothing more is "
        "written: put the folder back and go on with --resume, or begin again"
    )
