"""The end of a run, and of an interval: what is left to do after the last step, and why a run ends before."""

import signal
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import PART_NAMES, Dataset, Part
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import AUTO
from dtgpt.run.report import sample_path
from dtgpt.run.signals import StopRequest
from dtgpt.run.sinks import read_records
from dtgpt.train.tasks import tasks_of
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

HELD_OUT: tuple[Part, ...] = ("valid", "test")
LEFT = {"valid": "validation loss", "tasks": "tasks", "test": "test loss", "sample": "sample", "plot": "loss plot"}
OVER = "{} has done its {}; nothing is left to do"


def is_due(step: int, interval: int) -> bool:
    """Return whether the interval, 0: never, divides the step, which is not 0: nothing is due before the first."""
    return interval > 0 and step > 0 and step % interval == 0


def due_after(step: int, steps: int, log: LogConfig) -> set[str]:
    """Return what `log` wants after the step `step` of `steps`, beside its record: names of LEFT."""
    between_tasks = log.eval_interval if log.eval_tasks_interval is None else log.eval_tasks_interval
    intervals = {"valid": log.eval_interval, "tasks": between_tasks, "sample": log.sample_interval}
    return set(LEFT) if step == steps else {name for name, interval in intervals.items() if is_due(step, interval)}


def is_over(run: Path, checkpoint: Checkpoint, steps: int, resume: str | None) -> bool:
    """Return whether the run has done more than `steps`, and say so. Raises UserError where the user named the run."""
    done = checkpoint.state["step"]
    if done > steps and resume != AUTO:
        raise UserError(f"{run} has already done {counted(done, 'step')}; raise --steps to go on")
    if done > steps:
        say(OVER.format(run, counted(done, "step")))
    return done > steps


def left_to_do(run: Path, step: int, steps: int, seq_length: int, log: LogConfig, data: Dataset) -> list[str]:
    """Return what the run does not hold of what was due after `step`, its newest of `steps`: names of LEFT. Says so
    where all steps are done and that is nothing."""
    due = due_after(step, steps, log)
    if not due:
        return []
    metrics, picture = run / "metrics.jsonl", run / "loss.png"
    records = [record for record in read_records(metrics) if record["step"] == step]
    left: list[str] = []
    for part in HELD_OUT:
        wanted = part in due and next(data.held_out(part, seq_length, 1, 1), None) is not None
        if wanted and not any(record.get(f"{PART_NAMES[part]}_loss") is not None for record in records):
            left.append(part)
    measured = {name.partition("/")[0] for record in records for name in record if "/" in name}
    if "tasks" in due and not measured.issuperset(asked.task.name for asked in tasks_of(log)):
        left.append("tasks")
    if "sample" in due and log.sample_tokens and data.tokenizer.spells and not sample_path(run, step).is_file():
        left.append("sample")
    drawn = picture.is_file() and metrics.is_file() and picture.stat().st_mtime >= metrics.stat().st_mtime
    if "plot" in due and (left or (records and not drawn and find_spec("matplotlib"))):
        left.append("plot")
    if not left and step == steps:
        say(OVER.format(run, counted(steps, "step")))
    return left


def say_stopped(
    where: str, hint: str, stop: StopRequest, minutes: float | None, interval: int | None, mesh: Mesh
) -> int:
    """Say why a run ends early. Return its exit code: 0 after `exit_after` minutes or by `exit_interval`, else 128 +
    the signal, agreed across ranks."""
    number = int(mesh.max(stop.requested or 0))
    code, reason = 128 + (number or signal.SIGTERM), ""
    if number == 0 and interval is not None:
        code, reason = 0, f" (exit_interval {interval})"
    elif number == 0 and minutes is not None:
        code, reason = 0, f" after {minutes:g} minute{'' if minutes == 1 else 's'} (exit_after)"
    say(f"stopped {where}{reason}{hint}")
    return code


def folder_lost(run: Path, step: int) -> UserError:
    return UserError(
        f"the run folder {run} was moved, removed or replaced while the run was at step {step}; nothing more is "
        "written: put the folder back and go on with --resume, or begin again"
    )


def resume_option(run: Path) -> str:
    """Return the option by which a run goes on, as a shell reads it."""
    return f"--resume {quote(str(run))}"


def tell_other_end(former: dict[str, Any], recipe: dict[str, Any], trainer: Trainer) -> None:
    """Warn where another batch size than that of the `former` recipe lets the steps of a run end elsewhere than its
    schedule in samples, beyond which the learning rate may be 0."""
    end, steps, sizes = trainer.schedule.end, trainer.steps, ("global_batch_size", "rampup_batch_size")
    seen, next_step = trainer.samples_before(steps), trainer.samples_before(steps + 1)
    same_sizes = all(former.get(name) == recipe[name] for name in sizes)
    if trainer.schedule.counts_samples and not same_sizes and not seen <= end < next_step:
        say(
            f"with another batch size, {counted(steps, 'step')} end after {counted(seen, 'sample')}, the schedule "
            f"after {end}; to end there, give --train_samples {end}",
            warning=True,
        )
