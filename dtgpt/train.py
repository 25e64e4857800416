"""Training, from recipe to sample. Read it from top to bottom.

recipe -> plan -> mesh -> data -> model in this rank's shards -> optimizer -> loop -> run folder
"""

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt import evaluate
from dtgpt.batch_size import BatchSizes
from dtgpt.begin import begin_from, check_tokenizer, find_run, leave_newer, new_run, read_on_every_node, start
from dtgpt.checkpoint.folder import Checkpoint, list_checkpoints
from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.save import Saver
from dtgpt.checkpoint.state import describe
from dtgpt.console import say
from dtgpt.data.ahead import Prefetcher
from dtgpt.data.dataset import Dataset, Part
from dtgpt.data.end_of_document import EndOfDocument, Marks
from dtgpt.device import choose_dtype, peak_memory, use_compiler, use_graphs
from dtgpt.ending import LEFT, folder_lost, is_over, left_to_do, stopped
from dtgpt.errors import UserError
from dtgpt.losses import IntervalLoss, check_finite
from dtgpt.ops.dropout import dropout_keys
from dtgpt.ops.random import fold, root_key
from dtgpt.optim import Update, learning_rates
from dtgpt.parallel.build import build_stages, gradient_share, make_passes, scale_gradients, try_table
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.launch import lost_peers_as_sentences
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard
from dtgpt.recipe import Recipe
from dtgpt.report import Report, Silence
from dtgpt.run import Claim, changes_since
from dtgpt.signals import StopRequest


def train(recipe: Recipe) -> int:
    """Train as the recipe says and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Every process of the plan calls it. Whatever is wrong with the recipe, the plan, the data or the machine raises
    UserError before a run folder is made or changed.
    """
    stop = StopRequest(recipe.exit_after)  # whose time is the program's, reading of data included
    with ExitStack() as stack:
        recipe, mesh, process = start(recipe, stack)
        claim = stack.enter_context(Claim())
        run, checkpoint = find_run(recipe, mesh, claim)
        if checkpoint and is_over(run, checkpoint, recipe):
            return 0
        dataset = read_on_every_node(recipe, mesh, process)
        left = mesh.on_rank_0(lambda: left_to_do(run, checkpoint, recipe, dataset))
        if left == []:
            return 0
        stack.enter_context(stop)
        training = Training(recipe, mesh, dataset, checkpoint, stop)
        if training.interrupted():
            return stopped("before the first step", stop, False, recipe, mesh)
        if run:
            say("; ".join(["resuming", *mesh.on_rank_0(lambda: changes_since(run, recipe))]))
            mesh.on_rank_0(lambda: leave_newer(run, training.step))
        else:
            run = new_run(recipe, mesh, claim)
        return training.run_to_end(run, claim, left)


class Curve(NamedTuple):
    """Of one optimizer step, on the device: this rank's share of the loss, and the norm of the gradient."""

    loss: Tensor
    norm: Tensor


class Training:
    """What a run needs, in the order in which it is made, then its steps."""

    def __init__(self, recipe: Recipe, mesh: Mesh, dataset: Dataset, checkpoint: Checkpoint | None, stop: StopRequest):
        self.recipe, self.mesh, self.dataset, self.stop = recipe, mesh, dataset, stop
        self.device, self.plan = mesh.device, mesh.plan
        self.dtype = choose_dtype(recipe, self.device)
        self.graphs = Graphs(use_graphs(recipe, self.device))
        mesh.before_end.append(self.graphs.release)

        # Every random number of the run follows from these four keys.
        root = root_key(recipe.seed)
        weights_key, self.data_key = fold(root, "weights"), fold(root, "data")
        self.dropout_key, self.sample_key = fold(root, "dropout"), fold(root, "sample")

        begun = checkpoint is not None or recipe.init_from is not None
        key, compiled = None if begun else weights_key, use_compiler(recipe, self.device, self.plan)
        stages, self.shards = build_stages(recipe, mesh, self.dtype, key, compiled)
        self.passes = make_passes(stages, self.shards, recipe, self.graphs, self.dtype)
        if self.plan.table:
            try_table(self.passes, recipe.model, self.device)
        self.micro_batches = recipe.micro_batches(self.plan.dp)
        share = gradient_share(self.micro_batches, self.plan)
        self.optimizer = Update(self.shards, recipe, self.dtype, share)
        scale_gradients(stages, self.optimizer.gradient_scale)
        self.batches = Prefetcher(self._batch, self.device)
        data = recipe.data
        options = data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
        self.ends = EndOfDocument(dataset.tokenizer.end_of_text, *(option == "on" for option in options))
        self.saver: Saver | None = None
        self.claim, self.leaving = Claim(), False  # leaving: because of `exit_interval`
        self.step, self.sizes, self.interval = 0, BatchSizes(recipe), IntervalLoss(mesh)
        if checkpoint:
            self._resume(checkpoint)
        elif recipe.init_from is not None:
            begin_from(Path(recipe.init_from), recipe.model, dataset.tokenizer, self.shards, mesh)

    def run_to_end(self, run: Path, claim: Claim, left: list[str] | None) -> int:
        """Train, report into the folder `run`, which rank 0 has as its `claim`, and return the exit code of `train`.
        `left`: what of the last step is to be reported, where all steps are done."""
        self.claim = claim
        made = (self.recipe, self.mesh, self.dtype, self.dataset, run, self.step)
        with ExitStack() as stack:
            report: Report | Silence = Silence()

            def open_report() -> None:
                nonlocal report
                report = stack.enter_context(Report(*made))

            self.mesh.on_rank_0(open_report)
            checkpoints = run / "checkpoints"

            def remedy() -> str:
                return f"go on with --resume {run}" if list_checkpoints(checkpoints) else "start the run again"

            stack.enter_context(lost_peers_as_sentences(self.recipe.timeout, remedy))
            keep, made = self.recipe.checkpoint, (checkpoints, self.shards, self.optimizer.adamw)
            background, timeout = keep.background == "on", self.recipe.timeout
            self.saver = stack.enter_context(Saver(*made, keep.keep_last, keep.keep_every, background, timeout))
            early = self._report_left(report, left) if left else self._loop(report, checkpoints)
            self._check_folder()
            report.finish()
        if not early:
            return 0
        hint = f"; to go on, add --resume {run}" if self.step else ""
        where = f"at step {self.step}/{self.recipe.steps}"
        return stopped(where, self.stop, self.leaving, self.recipe, self.mesh, hint)

    def _loop(self, report: Report | Silence, checkpoints: Path) -> bool:
        """Steps to the end of the recipe; whether a signal came before it."""
        recipe, log = self.recipe, self.recipe.log
        first, stopping = self.step, self.interrupted()
        while self.step < recipe.steps and not stopping:
            on_device = self.train_step()
            self.interval.add(on_device.loss)

            # Read once, so that a signal from here on is met by the next step: the last step always saves.
            stopping, last = self.mesh.vote(self._must_end()), self.step == recipe.steps
            self.leaving = not last and due(self.step, recipe.exit_interval or 0)
            stopping = stopping or self.leaving
            recorded = last or due(self.step, log.interval) or self.step == 1  # as without a resume
            report_due = recorded or self.step == first + 1
            eval_due = last or due(self.step, log.eval_interval)
            save_due = last or due(self.step, recipe.checkpoint.interval) or stopping
            sample_due = last or due(self.step, log.sample_interval)
            if not (report_due or eval_due or save_due or sample_due):
                continue
            loss, mean, norm = self._read(on_device)
            if report_due:
                tokens = self.samples_before(self.step) * recipe.model.seq_length
                memory = self.mesh.max(peak_memory(self.device)[0])
                more = self.optimizer.scaling() | self.sizes.told(self.step - 1)
                report.step(self.step, tokens, mean, loss, norm, self.optimizer.lr.item(), memory, more, recorded)
            if due(self.step, log.interval):
                self.interval.restart()
            with report.paused():
                if eval_due:
                    self._report_held_out(report, "valid")
                if save_due:
                    self._save(checkpoints, must=last or stopping)
                if last:
                    self._report_held_out(report, "test")
                if sample_due and (text := self.sample()) is not None:
                    report.sample(self.step, text)
        return stopping or self.interrupted()

    def _read(self, on_device: Curve) -> tuple[float, float, float]:
        """Wait for the device, and return the loss of the step, the mean one of the interval and the norm of the
        gradient. Raises UserError, on all ranks, where the run has diverged or lost its folder."""
        loss, mean, lost = self.interval.read(on_device.loss, self.claim.lost(at_once=True))
        if lost:
            raise folder_lost(self.saver.checkpoints.parent, self.step)
        norm = on_device.norm.item()
        if self.optimizer.scaler is None:
            check_finite(self.step, "loss and gradient norm", loss, norm)
        else:  # whose overflows are skipped steps
            check_finite(self.step, "loss", loss)
            self.optimizer.check_overflow(norm)
        check_finite(self.step, f"mean loss of {self.interval.steps} steps", mean)
        return loss, mean, norm

    def _report_left(self, report: Report | Silence, left: list[str]) -> bool:
        """Report what is `left` of the last step; return whether a signal came before all of it was done."""
        say(f"{self.recipe.steps} steps are done; left to do: {', '.join(LEFT[name] for name in left)}")
        for part in ("valid", "test"):
            if part in left:
                self._report_held_out(report, part)
        if "sample" in left and (text := self.sample()) is not None:
            report.sample(self.step, text)
        if not (early := self.interrupted()):
            say("all is done")
        return early

    def _must_end(self) -> bool:
        """Return whether this process has a reason to end after the step."""
        return bool(self.stop) or self.claim.lost()

    def _check_folder(self) -> None:
        """Raise UserError, on all ranks, where the run folder is gone."""
        if self.mesh.any(self.claim.lost(at_once=True)):
            raise folder_lost(self.saver.checkpoints.parent, self.step)

    def train_step(self) -> Curve:
        """One optimizer step. Nothing here waits for the device."""
        return self.update(self.gradients())

    def gradients(self) -> Tensor:
        """Leave the gradient of the next global batch in the shards. Returns the mean loss over this rank's samples, 0
        where the head is elsewhere."""
        config = self.recipe.model
        self._expect(self.sizes.at(self.step) // (self.recipe.micro_batch_size * self.plan.dp))
        self.graphs.next_step()
        if not self.graphs.captured:
            self.shards.drop_gradients()
        windows, sample_ids, step_key = self.batches.take(self.step)
        keys = dropout_keys(step_key, sample_ids, config.num_sites) if config.dropout > 0 else None
        return self.passes.gradients(self.micro_batches, windows, keys, self._marks(windows[:, :-1]))

    def _marks(self, tokens: Tensor) -> Marks:
        """Of this rank's samples. Losses are weighted so that their mean is that over what counts of the global batch,
        however it is cut."""
        marks = self.ends.marks(tokens)
        if marks.weights is None:
            return marks
        counted = self.mesh.sum(marks.weights.sum())[0] / (self.plan.tp * self.plan.pp)
        share = tokens.numel() * self.plan.dp / counted.clamp(min=1)
        return marks._replace(weights=marks.weights * share.float())

    def _expect(self, micro_batches: int) -> None:
        """Where the batch ramps up, steps change now and then."""
        if micro_batches != self.micro_batches:
            self.micro_batches = micro_batches
            self.graphs.restart()
            self.passes.expect(micro_batches)
            self.optimizer.share_among(gradient_share(micro_batches, self.plan))

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank in `step`: windows int64 `[B, T + 1]`, sample ids `[B]` and the step's dropout key `[2]`."""
        share = self.sizes.at(step) // self.plan.dp
        first = self.samples_before(step) + self.mesh.place.dp * share
        sample_ids = first + torch.arange(share)
        windows = self.dataset.windows(sample_ids, self.recipe.model.seq_length, self.data_key)
        return windows, sample_ids, fold(self.dropout_key, step)

    def samples_before(self, step: int) -> int:
        """Samples that the run had seen when `step` began."""
        return self.sizes.before(step)

    def gradient(self, shard: Shard) -> Tensor:
        """What `gradients` left of this shard, without the loss scale."""
        return self.shards.gradient(shard).float() * self.optimizer.inverse_scale()

    def update(self, loss: Tensor) -> Curve:
        """Clip the gradients that `gradients` left in the shards, and step."""
        if self.saver is not None:
            self.saver.before_update()
        norm = self.graphs.run("update", self.optimizer.apply)
        self.step += 1
        return Curve(loss.clone(), norm.clone())  # a graph writes the next ones over them

    def mean_loss(self, on_device: Curve) -> float:
        """Over the global batch, the same on every rank."""
        return self.mesh.sum(on_device.loss).item() / (self.plan.dp * self.plan.tp)

    def interrupted(self) -> bool:
        """Whether any process has a reason to end; all come to the same answer."""
        return self.mesh.any(self._must_end())

    def held_out_loss(self, part: Part = "valid") -> tuple[float, float] | None:
        own = (self.passes, self.mesh, self.recipe, self.dataset, self.ends, self.interrupted)
        return evaluate.held_out_loss(*own, part)

    def _report_held_out(self, report: Report | Silence, part: Part) -> None:
        if losses := self.held_out_loss(part):
            known = [value for value in losses if value is not None]
            names = f"{'held-out' if part == 'valid' else part} loss{' and bits/byte' * (len(known) - 1)}"
            check_finite(self.step, names, *known)
            report.held_out(self.step, part, *losses)

    def sample(self) -> str | None:
        key = fold(self.sample_key, self.step)
        return evaluate.sample(self.passes, self.mesh, self.recipe, self.dataset.tokenizer, key, self.interrupted)

    def _save(self, checkpoints: Path, must: bool) -> None:
        """Begin to save a checkpoint. Where that fails (disk full) the run goes on with a warning, unless it `must`
        save: then this waits until it is written."""
        self._check_folder()
        state = describe(self.recipe, self.mesh, self.step, self.samples_before(self.step), self.dataset.digest)
        try:
            self.saver.save(self.step, state | self.optimizer.state() | self.interval.state(), must)
        except (OSError, UserError) as error:
            self._check_folder()  # which would explain it
            if must:
                again = f"to go on, add --resume {checkpoints.parent}"
                raise UserError(f"{error}; {again if list_checkpoints(checkpoints) else 'then start again'}") from None
            say(f"{error}; training goes on", warning=True)

    def _resume(self, checkpoint: Checkpoint) -> None:
        run, state = checkpoint.folder.parents[1], checkpoint.state
        check_tokenizer(run, self.dataset.tokenizer)
        load_training(checkpoint, self.shards, self.optimizer.adamw)
        self.optimizer.restore(state)
        self.interval.restore(state)
        self.step = state["step"]
        self.sizes = BatchSizes(self.recipe, self.step, state["consumed_samples"])
        self.optimizer.schedule.copy_(learning_rates(self.recipe, self.sizes))
        if state["data_digest"] not in (self.dataset.digest, self.dataset.former_digest):
            say(f"the text, or the order of its samples, is not the one that {run} began with", warning=True)


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
