"""Training, from a recipe to the end of its run.

recipe -> plan -> mesh -> data -> model in this rank's shards -> optimizer -> steps -> run folder

Every process of a run executes these lines, in this order: each has its part of the model and of the batch, and they
meet where sums are taken and where all must agree. So two rules hold in all of `train/`. What one rank asks of the
others, all ask together, since a collective that one of them does not call hangs the run. And rank 0 alone writes
files; `mesh.on_rank_0` lets the others wait for it, and share its error.

`run` starts and ends, `_train` makes what a run needs, and `Loop.take_steps` is the loop. What a step computes stands
in `trainer.py`. What happens between two steps, a line of progress or a checkpoint, is done by observers
(`observer.py`).
"""

import signal
import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import check_same_model, check_same_samples, find_checkpoint
from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints
from dtgpt.checkpoint.open import check_tokenizer
from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.run.folder import AUTO, RunLock, check_runs, create_run, values_of
from dtgpt.run.report import Report, RunReport
from dtgpt.run.saved_recipe import continue_run
from dtgpt.run.stop_request import StopRequest
from dtgpt.train.checkpoints import Saving, folder_lost, restore, resume_option
from dtgpt.train.interval_loss import check_finite
from dtgpt.train.objective import StepFailed
from dtgpt.train.observer import AfterStep, HeldOutLoss, Observer, Progress, Unfinished
from dtgpt.train.setup import Setup
from dtgpt.train.start import Job, find_resume_point, make_job
from dtgpt.train.trainer import StepResult, Trainer
from dtgpt.util import seams
from dtgpt.util.console import counted, say, say_error
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process, Watch, peers

OVER = "{} has done its {}; nothing is left to do"


def train(recipe: Recipe) -> int:
    """Train the recipe in the processes that torchrun started, this one alone if none, and return the exit code: 0, or
    128 + the number of the signal that ended the run. Raises UserError for whatever is wrong with the recipe."""
    resume = find_resume_point(recipe.resume, recipe.runs, recipe.name, recipe.model.vocab_size)
    return run(make_job(recipe, resume, Process.from_environment().world))


def run(job: Job) -> int:
    """Train and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Every process calls it; those that the plan leaves over wait. Whatever is wrong with the recipe, the plan, the data
    or the machine raises UserError before a run folder is made or changed.
    """
    stop = StopRequest(job.recipe)  # whose time counts from here, reading of data included
    setup, recipe, choice, everyone = Setup(job), job.recipe, job.choice, Process.from_environment()
    ended = peers(everyone.world).wait_if_left_over(
        process=everyone,
        active=choice.plan.world,
        stop=stop,
        seconds=recipe.timeout,
        lost_after=recipe.lost_after,
        plan=choice.plan.name,
        chosen=len(choice.fits) > 1,
    )
    if ended is not None:
        return ended
    with ExitStack() as stack:
        setup.join(stack)
        setup.watch.on_stop = stop.ask  # a signal that a waiting process gets reaches rank 0
        code = _train(setup, stop)
        setup.watch.end_run(code)
        return code


def _train(setup: Setup, stop: StopRequest) -> int:
    recipe, mesh, resume = setup.recipe, setup.mesh, setup.resume
    with ExitStack() as stack:
        # First of all, what can be refused without reading data: that takes minutes, and a user waits for the sentence.
        # A run that goes on is locked before it is read, so that nobody else trains it from here on.
        lock = stack.enter_context(RunLock())
        former, checkpoint = resume.run, None
        if former is not None:
            mesh.on_rank_0(lambda: lock.take(former))
            own = type(recipe.model)
            checkpoint = find_checkpoint(mesh, former, resume.checkpoint, own=own)
            check_same_model(checkpoint.folder, checkpoint.config, recipe.model)
            check_same_samples(checkpoint, recipe.sample_length)
            if _is_over(former, checkpoint, recipe.num_steps, recipe.resume):
                return 0
        else:
            mesh.on_rank_0(lambda: check_runs(Path(recipe.runs)))
            for newest in seams.listed("newest_runs") if recipe.resume == AUTO else ():
                say(newest.why_new(Path(recipe.runs), recipe.name))

        # Then the data. They tell whether the last step of a run that goes on has left anything to do.
        dataset = setup.read_dataset()
        steps, left, unfinished = recipe.num_steps, list[str](), next(iter(seams.listed("unfinished")), Unfinished)()
        # Those whose work a run that goes on may find undone; `Loop` adds the two that need more than a recipe.
        held_out = [HeldOutLoss("valid", recipe.log.eval_interval, steps), HeldOutLoss("test", 0, steps)]
        observers: list[Observer] = [*held_out, *setup.observers]
        if former and checkpoint:
            done = checkpoint.state["step"]
            left = unfinished.find(mesh, former, done, observers, (dataset, recipe.sample_length))
            if done == steps and not left:
                say(OVER.format(former, counted(steps, "step")))
                return 0

        # Then the model, with the weights of a checkpoint of any plan, of another library, or new ones. From here on a
        # signal no longer ends the process: the loop meets it, and saves.
        stack.enter_context(stop)
        trainer = setup.make_trainer(dataset, checkpoint)
        loop = Loop(recipe, trainer, lock, stop, observers, setup.watch, unfinished)
        if checkpoint:
            loop.resume(checkpoint)
        if not trainer.objective.prepare(trainer.step, former, loop.interrupted) or loop.interrupted():
            return loop.stopped("before the first step")

        # Nothing was written so far. Now that all is known to be right, the run gets its folder.
        if former is None:
            folder = mesh.on_rank_0(lambda: lock.take(create_run(Path(recipe.runs), recipe.name)))
            mesh.on_rank_0(lambda: setup.begin.save(type(recipe.model), dataset.tokenizer, folder))
            mesh.on_rank_0(lambda: trainer.objective.save(folder))
            return loop.run_to_end(folder, left)
        values = values_of(recipe.resolved())
        mesh.on_rank_0(lambda: continue_run(former, values, trainer.step))
        return loop.run_to_end(former, left)


class Loop:
    """The steps of a run, what observers do between them, and its end."""

    def __init__(
        self,
        recipe: Recipe,
        trainer: Trainer,
        lock: RunLock,
        stop: StopRequest,
        observers: Iterable[Observer],
        watch: Watch,
        unfinished: Unfinished,
    ):
        """observers: beside those of the progress line and of checkpoints."""
        self.recipe, self.trainer, self.lock, self.stop = recipe, trainer, lock, stop
        self.watch, self.mesh, self.unfinished = watch, trainer.mesh, unfinished
        self.interval = trainer.objective.open_interval(trainer.mesh)
        trainer.states.append(self.interval)  # so that a checkpoint has the losses since the last record
        self.saving = Saving(trainer, lock, asdict(recipe), recipe.checkpoint)
        progress = Progress(recipe.log, recipe.num_steps, recipe.sample_length, self.interval)
        self.observers = sorted([progress, self.saving, *observers], key=lambda observer: observer.turn)
        for observer in self.observers:
            observer.prepare(trainer)
        self.report = Report()  # until there is a run folder

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of any plan."""
        run, trainer = checkpoint.folder.parents[1], self.trainer
        check_tokenizer(run, trainer.dataset.tokenizer)
        restore(checkpoint, trainer, self.recipe.batch_sizes)
        if checkpoint.state["data_digest"] not in (trainer.dataset.digest, trainer.dataset.former_digest):
            say(f"the text, or the order of its samples, is not the one that {run} began with", warning=True)
        for counts in seams.listed("sample_counts"):
            counts.tell_other_end(checkpoint.state["recipe"], asdict(self.recipe), trainer)

    def run_to_end(self, run: Path, left: list[str]) -> int:
        """Train, report into the folder `run`, which rank 0 has as its `lock`, and return the exit code of the run.
        `left`: titles of observers whose work after the newest step is still to be done."""
        trainer = self.trainer
        with ExitStack() as stack:
            self._open(run, stack)
            early = bool(left) and self.unfinished.make_up(self, left)
            if not early and trainer.step < trainer.steps:
                early = self.take_steps()
            # Nobody shall read of a success whose folder is gone, with all that the run has written.
            self.saving.check_folder()
            self.report.finish(not early)
        # Here the last checkpoint is complete, and files are closed.
        hint = f"; to go on, add {resume_option(run)}" if trainer.step else ""
        return self.stopped(f"at step {trainer.step}/{trainer.steps}", hint) if early else 0

    def _open(self, run: Path, stack: ExitStack) -> None:
        """Open what the run writes; `stack` closes it. From here on errors say how the run goes on."""
        recipe, trainer, options, checkpoints = self.recipe, self.trainer, self.recipe.checkpoint, run / "checkpoints"

        def open_report() -> None:
            kind = next(iter(seams.listed("reports")), RunReport)
            report = kind(
                recipe=recipe,
                settings=trainer.settings,
                mesh=self.mesh,
                data=trainer.dataset,
                run=run,
                step=trainer.step,
                samples_before=trainer.samples_before,
                more_sinks=[observer.sink for observer in self.observers],
            )
            self.report = stack.enter_context(report)

        def remedy() -> str:
            return f"go on with {resume_option(run)}" if list_checkpoints(checkpoints) else "start the run again"

        self.mesh.on_rank_0(open_report)
        self.watch.step, self.watch.remedy = trainer.step, remedy
        stack.enter_context(peers(self.mesh.world).losses_as_user_errors(recipe.timeout, remedy))
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
        self.saving.saver = stack.enter_context(saver)
        trainer.before_update = saver.before_update

    def take_steps(self) -> bool:
        """Train to the end of the recipe; return whether the run was asked to end before."""
        trainer, stopping = self.trainer, self.interrupted()
        while trainer.step < trainer.steps and not stopping:
            # Forward and backward for each micro-batch, then the update. All of it is queued on the device, and so is
            # the sum of the losses: the host goes on to queue the next step while the device is still at this one.
            result = self._train_step()
            self.interval.add(result.loss, trainer.empty)
            self.watch.step = trainer.step

            # Was any rank asked to end, or is it time for a checkpoint? All ranks read this once, together, and so do
            # the same from here on. A signal that comes later is met by the next step; the last one always saves.
            stopping, asked = self.mesh.vote(self._must_end(), self.mesh.rank == 0 and self.saving.clock.asks())
            stopping = self.stop.ends_after(trainer.step, trainer.steps) or stopping
            self.saving.asked = stopping or asked

            # After most steps nothing is due, and the next one follows. Else the device finishes the step first. Then
            # observers act, one after the other: report, validate, save, measure. A second signal may come meanwhile.
            due = [observer for observer in self.observers if observer.due(trainer.step)]
            if due:
                after = self._wait_for(result, stopping)
                with self.report.paused():
                    for observer in due:
                        observer.act(after)
                    stopping = stopping or self.unfinished.was_cut_short(self, due)
        return stopping or self.interrupted()

    def _train_step(self) -> StepResult:
        """Take a step. Where its batch cannot be made, save what was done before, print the traceback of the recipe's
        error, and raise UserError from it."""
        try:
            return self.trainer.train_step()
        except StepFailed as failure:
            self.saving.save_unless_saved(self.report)
            run = self.saving.saver.checkpoints.parent
            again = f"step {self.trainer.step + 1}: {failure}; go on with {resume_option(run)}"
            if failure.__cause__ is not None:  # told here, since a MemoryError or OSError means other things elsewhere
                say_error("".join(traceback.format_exception(failure.__cause__)).rstrip())
            raise UserError(again) from failure.__cause__

    def _wait_for(self, result: StepResult, stopping: bool) -> AfterStep:
        """Wait for the device, and return what observers see of the step. Raises UserError, on all ranks, where the run
        has diverged or lost its folder."""
        step, optimizer = self.trainer.step, self.trainer.optimizer
        # One message has all that ranks tell each other here.
        loss, mean, lost = self.interval.read(result.loss, self.lock.lost(at_once=True), self.trainer.empty)
        if lost:
            raise folder_lost(self.saving.saver.checkpoints.parent, step)
        norm = result.norm.item()
        if optimizer.scaler is None:
            check_finite(step, "loss and gradient norm", loss or 0.0, norm)
        else:  # an overflow is a skipped step
            check_finite(step, "loss", loss or 0.0)
        optimizer.check(norm)
        check_finite(step, f"mean loss of {self.interval.steps} steps", mean or 0.0)
        return self.after_step(stopping=stopping, loss=loss, interval_loss=mean, grad_norm=norm)

    def after_step(self, **figures: Any) -> AfterStep:
        """Return what observers see of the newest step."""
        return AfterStep(
            trainer=self.trainer,
            run=self.saving.saver.checkpoints.parent,
            report=self.report,
            interrupted=self.interrupted,
            must_end=self._must_end,
            **figures,
        )

    def _must_end(self) -> bool:
        """Return whether this process has a reason to end after the step."""
        return bool(self.stop) or self.lock.lost()

    def interrupted(self) -> bool:
        """Return whether any process has a reason to end, the same on all."""
        return self.mesh.any(self._must_end())

    def stopped(self, where: str, hint: str = "") -> int:
        """Say where and why the run ends early. Return its exit code: 0 where it ends in order, else 128 + the signal,
        agreed across ranks."""
        number = int(self.mesh.max(self.stop.requested or 0))
        reason = "" if number else self.stop.reason
        say(f"stopped {where}{reason}{hint}")
        return 0 if reason else 128 + (number or signal.SIGTERM)


# Of a run that goes on.


def _is_over(run: Path, checkpoint: Checkpoint, steps: int, resume: str | None) -> bool:
    """Return whether the run has done more than `steps`, and say so. Raises UserError where the user named the run."""
    done = checkpoint.state["step"]
    if done > steps and resume != AUTO:
        raise UserError(f"{run} has already done {counted(done, 'step')}; raise --steps to go on")
    if done > steps:
        say(OVER.format(run, counted(done, "step")))
    return done > steps
