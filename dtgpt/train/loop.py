"""Training, from recipe to samples. Read this file first.

recipe -> plan -> mesh -> data -> model in this rank's shards -> optimizer -> steps -> run folder
"""

import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from dtgpt.checkpoint.load import check_same_model, check_same_samples, find_checkpoint
from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints, step_of
from dtgpt.checkpoint.save import SaveClock, Saver
from dtgpt.config.recipe import Recipe
from dtgpt.data.dataset import Part
from dtgpt.liveness.losses import lost_peers_as_user_errors
from dtgpt.liveness.watch import Watch
from dtgpt.run.folder import AUTO, RunLock, check_runs, values_of, why_new_run
from dtgpt.run.report import NullReport, Report
from dtgpt.run.signals import StopRequest
from dtgpt.train import startup
from dtgpt.train.checkpoints import restore, state_of
from dtgpt.train.ending import (
    LEFT,
    due_after,
    folder_lost,
    is_due,
    is_over,
    left_to_do,
    resume_option,
    say_stopped,
    tell_other_end,
)
from dtgpt.train.interval_loss import IntervalLoss, check_finite, check_interval
from dtgpt.train.job import Job, find_resume_point, make_job
from dtgpt.train.objective import StepFailed
from dtgpt.train.processes import Group, join, run_watched, wait_for_others
from dtgpt.train.tasks import TaskEvaluation
from dtgpt.train.trainer import StepResult, Trainer
from dtgpt.util.console import say, say_error
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import peak_memory
from dtgpt.util.process import Process


def train(recipe: Recipe) -> int:
    """Train as the recipe says and return the exit code, as `run` does."""
    resume = find_resume_point(recipe.resume, recipe.runs, recipe.name, recipe.model.vocab_size)
    return run(make_job(recipe, resume, Process.from_environment().world))


def run(job: Job) -> int:
    """Train and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Every process calls it; those that the plan leaves over wait. Whatever is wrong with the recipe, the plan, the data
    or the machine raises UserError before a run folder is made or changed.
    """
    stop = StopRequest(job.recipe.exit_after)  # the time counts from here, reading of data included
    if Process.from_environment().rank >= job.choice.plan.world:
        return wait_for_others(job, stop)
    with ExitStack() as stack:
        group = join(job, stack)
        return run_watched(group, stop, lambda: _train(job, group, stop))


def _train(job: Job, group: Group, stop: StopRequest) -> int:
    recipe, mesh, resume = job.recipe, group.mesh, job.resume
    with ExitStack() as stack:
        lock = stack.enter_context(RunLock())
        former, checkpoint = resume.run, None
        if former is not None:
            mesh.on_rank_0(lambda: lock.take(former))
            own = type(recipe.model)
            checkpoint = find_checkpoint(mesh, former, resume.checkpoint, check=check_interval, own=own)
            check_same_model(checkpoint.folder, checkpoint.config, recipe.model)
            check_same_samples(checkpoint, recipe.sample_length)
            if is_over(former, checkpoint, recipe.num_steps, recipe.resume):
                return 0
        else:
            mesh.on_rank_0(lambda: check_runs(Path(recipe.runs)))
            if recipe.resume == AUTO:
                say(why_new_run(Path(recipe.runs), recipe.name))

        dataset = startup.read_on_every_node(lambda: startup.read_dataset(recipe), mesh, group.process)
        left: list[str] = []
        if former and checkpoint:
            done, steps, length = checkpoint.state["step"], recipe.num_steps, recipe.sample_length
            left = mesh.on_rank_0(lambda: left_to_do(former, done, steps, length, recipe.log, dataset))
            if done == steps and not left:
                return 0

        stack.enter_context(stop)
        trainer = startup.make_trainer(job, group, dataset, checkpoint)
        loop = Loop(recipe, trainer, lock, stop, group.watch)
        if checkpoint:
            loop.resume(checkpoint)
        elif resume.foreign:
            startup.take_over(resume.foreign, trainer, recipe.batch_sizes)
        if not trainer.objective.prepare(trainer.step, former, loop.interrupted) or loop.interrupted():
            return loop.stopped("before the first step")

        if former is None:
            begun = recipe.runs, recipe.name, lock, recipe.init_from, dataset.tokenizer, type(recipe.model)
            folder = mesh.on_rank_0(lambda: startup.new_run(*begun))
            mesh.on_rank_0(lambda: trainer.objective.save(folder))
            return loop.run_to_end(folder, left)
        values = values_of(recipe.resolved())
        mesh.on_rank_0(lambda: startup.continue_run(former, values, trainer.step))
        return loop.run_to_end(former, left)


class Due(NamedTuple):
    """What a step calls for."""

    report: bool  # a progress line
    record: bool  # which goes into the metrics, too
    evaluate: bool
    save: bool
    tasks: bool
    sample: bool
    last: bool  # the last step of the recipe


class Loop:
    """The steps of a run, with what happens between them: reports, evaluations, checkpoints, the end."""

    def __init__(self, recipe: Recipe, trainer: Trainer, lock: RunLock, stop: StopRequest, watch: Watch | None = None):
        self.recipe, self.trainer, self.lock, self.stop = recipe, trainer, lock, stop
        self.watch, self.mesh, self.interval = watch, trainer.mesh, IntervalLoss(trainer.mesh, trainer.objective.totals)
        trainer.states.append(self.interval)
        self.tasks, self.clock = TaskEvaluation(trainer), SaveClock(recipe.checkpoint.minutes)
        self.leaving = False  # because of `exit_interval`
        self.cautioned = False  # once in a start
        self.report: Report | NullReport = NullReport()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of any plan."""
        run, trainer = checkpoint.folder.parents[1], self.trainer
        startup.check_tokenizer(run, trainer.dataset.tokenizer)
        restore(checkpoint, trainer, self.recipe.batch_sizes)
        if checkpoint.state["data_digest"] not in (trainer.dataset.digest, trainer.dataset.former_digest):
            say(f"the text, or the order of its samples, is not the one that {run} began with", warning=True)
        tell_other_end(checkpoint.state["recipe"], asdict(self.recipe), trainer)

    def run_to_end(self, run: Path, left: list[str]) -> int:
        """Train, report into the folder `run`, which rank 0 has as its `lock`, and return the exit code of `train`.
        `left`: what of the step from which a run goes on is still to be reported."""
        recipe, options, trainer, checkpoints = self.recipe, self.recipe.checkpoint, self.trainer, run / "checkpoints"
        with ExitStack() as stack:

            def open_report() -> None:
                report = Report(
                    recipe, trainer.settings, self.mesh, trainer.dataset, run, trainer.step, trainer.samples_before
                )
                self.report = stack.enter_context(report)

            self.mesh.on_rank_0(open_report)

            def remedy() -> str:
                return f"go on with {resume_option(run)}" if list_checkpoints(checkpoints) else "start the run again"

            if self.watch:
                self.watch.step, self.watch.remedy = trainer.step, remedy
            stack.enter_context(lost_peers_as_user_errors(recipe.timeout, remedy))
            saver = Saver(
                checkpoints,
                trainer.shards,
                trainer.optimizer.rule,
                options.keep_last,
                options.keep_every,
                background=options.background,
                timeout=recipe.timeout,
                completed=lambda step, size: say(f"step {step}: checkpoint complete, {size / 2**20:,.0f} MiB"),
            )
            self.saver = stack.enter_context(saver)
            trainer.before_update = self.saver.before_update
            early = bool(left) and self.report_left(left)
            if not early and trainer.step < trainer.steps:
                early = self.take_steps()
            self._check_folder()
            self.report.finish(not early)
        hint = f"; to go on, add {resume_option(run)}" if trainer.step else ""
        return self.stopped(f"at step {trainer.step}/{trainer.steps}", hint) if early else 0

    def take_steps(self) -> bool:
        """Train to the end of the recipe; return whether the run was asked to end before."""
        trainer, first, stopping = self.trainer, self.trainer.step, self.interrupted()
        while trainer.step < trainer.steps and not stopping:
            result = self._train_step()
            self.interval.add(result.loss, trainer.empty)
            if self.watch:
                self.watch.step = trainer.step
            # Read once, so that a signal from here on is met by the next step: the last step always saves.
            stopping, asked = self.mesh.vote(self._must_end(), self.mesh.rank == 0 and self.clock.asks())
            self.leaving = trainer.step < trainer.steps and is_due(trainer.step, self.recipe.exit_interval or 0)
            stopping = stopping or self.leaving
            due = self._due(first, stopping or asked)
            if due.report or due.evaluate or due.save or due.tasks or due.sample:
                stopping = self._between_steps(result, due, stopping)
                if due.save:
                    self.clock.restart()
        return stopping or self.interrupted()

    def _train_step(self) -> StepResult:
        """Take a step. Where its batch cannot be made, save what was done before, print the traceback of the recipe's
        error, and raise UserError from it."""
        try:
            return self.trainer.train_step()
        except StepFailed as failure:
            self._save_unless_saved()
            run = self.saver.checkpoints.parent
            again = f"step {self.trainer.step + 1}: {failure}; go on with {resume_option(run)}"
            if failure.__cause__ is not None:  # told here, since a MemoryError or OSError means other things elsewhere
                say_error("".join(traceback.format_exception(failure.__cause__)).rstrip())
            raise UserError(again) from failure.__cause__

    def _due(self, first: int, save: bool) -> Due:
        """Return what the step just taken calls for; `first`: where this process began; `save`: at any rate."""
        step, log, last = self.trainer.step, self.recipe.log, self.trainer.step == self.trainer.steps
        record = last or is_due(step, log.interval) or step == 1  # as without a resume
        due = due_after(step, self.trainer.steps, log)
        return Due(
            report=record or step == first + 1,
            record=record,
            evaluate="valid" in due,
            save=last or is_due(step, self.recipe.checkpoint.interval) or save,
            tasks=bool(self.tasks.names) and "tasks" in due,
            sample="sample" in due,
            last=last,
        )

    def _between_steps(self, result: StepResult, due: Due, stopping: bool) -> bool:
        """Do what is due after a step; `stopping`: it is the last of this process. Return whether it is, which what
        arrives in the meantime may decide: a resume makes up for what was cut short, with the weights of this step."""
        step = self.trainer.step
        loss, mean, norm = self._read(result)
        if due.report:
            self._report_step(loss, mean, norm, due.record)
        if is_due(step, self.recipe.log.interval):
            self.interval.restart()
        with self.report.paused():
            if due.evaluate:
                self._report_held_out("valid")
            if due.save:
                self._save(must=due.last or stopping)
            if due.tasks:
                self._report_tasks()
            if due.last:
                self._report_held_out("test")
            if due.sample:
                self._report_sample()
            if stopping or due.last or not (due.evaluate or due.tasks or due.sample) or not self.interrupted():
                return stopping
            self._save_unless_saved()
            return True

    def _read(self, result: StepResult) -> tuple[float | None, float | None, float]:
        """Wait for the device, and return the loss of the step, the mean loss of the interval, each None where no token
        counted, and the norm of the gradient. Raises UserError, on all ranks, where the run has diverged or lost its
        folder."""
        step, optimizer = self.trainer.step, self.trainer.optimizer
        loss, mean, lost = self.interval.read(result.loss, self.lock.lost(at_once=True), self.trainer.empty)
        if lost:
            raise folder_lost(self.saver.checkpoints.parent, step)
        norm = result.norm.item()
        if optimizer.scaler is None:
            check_finite(step, "loss and gradient norm", loss or 0.0, norm)
        else:  # an overflow is a skipped step
            check_finite(step, "loss", loss or 0.0)
        optimizer.check(norm)
        check_finite(step, f"mean loss of {self.interval.steps} steps", mean or 0.0)
        return loss, mean, norm

    def _report_step(self, loss: float | None, mean: float | None, norm: float, record: bool) -> None:
        trainer = self.trainer
        metrics = {
            **({} if mean is None else {"loss": mean}),
            **({} if loss is None else {"step_loss": loss}),
            "grad_norm": norm,
            "lr": trainer.optimizer.lr.item(),
            "tokens": trainer.samples_before(trainer.step) * self.recipe.sample_length,
            "memory_gib": self.mesh.max(peak_memory(self.mesh.device)),
            "batch_size": trainer.sizes.at(trainer.step - 1),
            **trainer.objective.figures(self.interval.totals()),
            **trainer.optimizer.metrics(),
            **trainer.times(),
        }
        self.report.step(trainer.step, metrics, record)
        if not self.cautioned and (caution := trainer.objective.caution(metrics)):
            say(caution, warning=True)
            self.cautioned = True
        if record and (examples := trainer.objective.examples()):
            self.report.answers(trainer.step, examples)

    def _report_held_out(self, part: Part) -> None:
        if (found := self.trainer.held_out(part, self.interrupted)) is not None:
            check_finite(self.trainer.step, " and ".join(found.finite), *found.finite.values())
            self.report.held_out(self.trainer.step, part, found.figures, found.shown)

    def _report_tasks(self) -> None:
        if (results := self.tasks.measure(self.interrupted)) is not None:
            self.report.tasks(self.trainer.step, {result.task: result.figures for result in results})

    def _report_sample(self) -> None:
        if (text := self.trainer.sample(self._must_end)) is not None:
            self.report.sample(self.trainer.step, text)

    def report_left(self, left: list[str]) -> bool:
        """Report what is `left` of the newest step; return whether the run was asked to end before all of it was
        done."""
        say(f"{self.trainer.step} steps are done; left to do: {', '.join(LEFT[name] for name in left)}")
        with self.report.paused():
            if "valid" in left:
                self._report_held_out("valid")
            if "test" in left:
                self._report_held_out("test")
            if "tasks" in left:
                self._report_tasks()
            if "sample" in left:
                self._report_sample()
        if not (early := self.interrupted()) and self.trainer.step == self.trainer.steps:
            say("all is done")
        return early

    def _save_unless_saved(self) -> None:
        """Save a checkpoint of this step, unless there is one."""
        step, folder = self.trainer.step, self.saver.checkpoints
        self.saver.wait()
        if not self.mesh.on_rank_0(lambda: step in map(step_of, list_checkpoints(folder))):
            self._save(must=True)

    def _save(self, must: bool) -> None:
        """Begin to save a checkpoint. Where that fails (disk full) the run goes on with a warning, unless it `must`
        save: then this waits until it is written."""
        self._check_folder()
        trainer, checkpoints = self.trainer, self.saver.checkpoints
        state = state_of(trainer, asdict(self.recipe))
        begin = time.perf_counter()
        try:
            self.saver.save(trainer.step, state, must)
        except (OSError, UserError) as error:
            self._check_folder()  # which would explain it
            if must:
                again = f"to go on, add {resume_option(checkpoints.parent)}"
                raise UserError(f"{error}; {again if list_checkpoints(checkpoints) else 'then start again'}") from None
            say(f"{error}; training goes on", warning=True)
        else:
            if trainer.timers.enabled:
                self.report.saved(trainer.step, self.mesh.max(time.perf_counter() - begin))

    def _check_folder(self) -> None:
        """Raise UserError, on all ranks, where the run folder is gone."""
        if self.mesh.any(self.lock.lost(at_once=True)):
            raise folder_lost(self.saver.checkpoints.parent, self.trainer.step)

    def _must_end(self) -> bool:
        """Return whether this process has a reason to end after the step."""
        return bool(self.stop) or self.lock.lost()

    def interrupted(self) -> bool:
        """Return whether any process has a reason to end, the same on all."""
        return self.mesh.any(self._must_end())

    def stopped(self, where: str, hint: str = "") -> int:
        """Say where and why the run ends early, and return its exit code."""
        interval = self.recipe.exit_interval if self.leaving else None
        return say_stopped(where, hint, self.stop, self.recipe.exit_after, interval, self.mesh)
