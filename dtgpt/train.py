"""Training, from recipe to sample. Read it from top to bottom.

recipe -> plan -> mesh -> data -> model in this rank's shards -> optimizer -> loop -> run folder
"""

import math
import signal
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
from dtgpt.data.ahead import Ahead
from dtgpt.data.dataset import Dataset, Part
from dtgpt.data.end_of_document import EndOfDocument, Marks
from dtgpt.device import choose_dtype, peak_memory, use_compiler, use_graphs
from dtgpt.errors import UserError
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
from dtgpt.run import AUTO, changes_since
from dtgpt.signals import StopRequest


def train(recipe: Recipe) -> int:
    """Train as the recipe says and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Every process of the plan calls it. Whatever is wrong with the recipe, the plan, the data or the machine raises
    UserError before a run folder is made or changed.
    """
    stop = StopRequest(recipe.exit_after)  # whose time is the program's, reading of data included
    with ExitStack() as stack:
        recipe, mesh, process = start(recipe, stack)
        run, checkpoint = find_run(recipe, mesh, stack)
        if run and recipe.resume == AUTO and checkpoint.state["step"] >= recipe.steps:
            say(f"{run} has done its {checkpoint.state['step']} steps; nothing is left to do")
            return 0
        dataset = read_on_every_node(recipe, mesh, process)
        stack.enter_context(stop)
        training = Training(recipe, mesh, dataset, checkpoint, stop)
        if training.interrupted():
            return training.exit_code()
        if run:
            say("; ".join(["resuming", *changes_since(run, recipe)]))
            mesh.on_rank_0(lambda: leave_newer(run, training.step))
        else:
            run = new_run(recipe, mesh, stack)
        return training.run_to_end(run)


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
        self.batches = Ahead(self._batch, self.device)
        data = recipe.data
        options = data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
        self.ends = EndOfDocument(dataset.tokenizer.end_of_text, *(option == "on" for option in options))
        self.saver: Saver | None = None
        self.step, self.sizes = 0, BatchSizes(recipe)
        if checkpoint:
            self._resume(checkpoint)
        elif recipe.init_from is not None:
            begin_from(Path(recipe.init_from), recipe.model, dataset.tokenizer, self.shards, mesh)

    def run_to_end(self, run: Path) -> int:
        """Train, report into the folder `run`, and return the exit code of `train`."""
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
            stopped = self._loop(report, checkpoints)
            report.finish()
        if not stopped:
            return 0
        hint = f"; to go on, add --resume {run}" if 0 < self.step < self.recipe.steps else ""
        say(f"stopped at step {self.step}/{self.recipe.steps}{hint}")
        return self.exit_code()

    def exit_code(self) -> int:
        """Of a run that ends early: 0 after `exit_after`, else by a signal, which perhaps not every process got."""
        number = int(self.mesh.max(self.stop.requested or 0))
        if number == 0 and self.recipe.exit_after is not None:
            return 0
        return 128 + (number or signal.SIGTERM)

    def _loop(self, report: Report | Silence, checkpoints: Path) -> bool:
        """Steps to the end of the recipe; whether a signal came before it."""
        recipe, log = self.recipe, self.recipe.log
        first, stopping = self.step, self.interrupted()
        while self.step < recipe.steps and not stopping:
            on_device = self.train_step()

            # Read once, so that a signal from here on is met by the next step: the last step always saves.
            stopping, last = self.mesh.vote(bool(self.stop)), self.step == recipe.steps
            report_due = last or due(self.step, log.interval) or self.step == first + 1
            eval_due = last or due(self.step, log.eval_interval)
            save_due = last or due(self.step, recipe.checkpoint.interval) or stopping
            sample_due = last or due(self.step, log.sample_interval)
            if not (report_due or eval_due or save_due or sample_due):
                continue
            loss, norm = self.mean_loss(on_device), on_device.norm.item()  # here the program waits for the device
            if self.optimizer.scaler is None:
                self._check_finite("loss and gradient norm", loss, norm)
            else:  # whose overflows are skipped steps
                self._check_finite("loss", loss)
                self.optimizer.check_overflow(norm)
            if report_due:
                tokens = self.samples_before(self.step) * recipe.model.seq_length
                memory = self.mesh.max(peak_memory(self.device)[0])
                more = self.optimizer.scaling() | self.sizes.told(self.step - 1)
                report.step(self.step, tokens, loss, norm, self.optimizer.lr.item(), memory, more)
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
        """Whether any process got a signal; all come to the same answer."""
        return self.mesh.any(bool(self.stop))

    def held_out_loss(self, part: Part = "valid") -> tuple[float, float] | None:
        own = (self.passes, self.mesh, self.recipe, self.dataset, self.ends, self.interrupted)
        return evaluate.held_out_loss(*own, part)

    def _report_held_out(self, report: Report | Silence, part: Part) -> None:
        if losses := self.held_out_loss(part):
            self._check_finite(f"{'held-out' if part == 'valid' else part} loss and bits/byte", *losses)
            report.held_out(self.step, part, *losses)

    def sample(self) -> str | None:
        key = fold(self.sample_key, self.step)
        return evaluate.sample(self.passes, self.mesh, self.recipe, self.dataset.tokenizer, key, self.interrupted)

    def _check_finite(self, names: str, *values: float) -> None:
        """Raise UserError where the run has diverged. What a step does to the weights shows in the next step's loss."""
        if not all(math.isfinite(v) for v in values):
            shown = " and ".join(f"{v:.4g}" for v in values)
            raise UserError(
                f"the run has diverged: {names} at step {self.step} are {shown}; start again, or from an "
                "earlier checkpoint, with a lower optimizer.lr or a longer optimizer.warmup"
            )

    def _save(self, checkpoints: Path, must: bool) -> None:
        """Begin to save a checkpoint. Where that fails (disk full) the run goes on with a warning, unless it `must`
        save: then this waits until it is written."""
        state = describe(self.recipe, self.mesh, self.step, self.samples_before(self.step), self.dataset.digest)
        try:
            self.saver.save(self.step, state | self.optimizer.state(), must)
        except (OSError, UserError) as error:
            if must:
                again = f"to go on, add --resume {checkpoints.parent}"
                raise UserError(f"{error}; {again if list_checkpoints(checkpoints) else 'then start again'}") from None
            say(f"{error}; training goes on", warning=True)

    def _resume(self, checkpoint: Checkpoint) -> None:
        run, state = checkpoint.folder.parents[1], checkpoint.state
        check_tokenizer(run, self.dataset.tokenizer)
        load_training(checkpoint, self.shards, self.optimizer.adamw)
        self.optimizer.restore(state)
        self.step = state["step"]
        self.sizes = BatchSizes(self.recipe, self.step, state["consumed_samples"])
        self.optimizer.schedule.copy_(learning_rates(self.recipe, self.sizes))
        if state["data_digest"] != self.dataset.digest:
            say(f"the text, or the order of its samples, is not the one that {run} began with", warning=True)
        if self.step >= self.recipe.steps:
            raise UserError(f"{run} has already done {self.step} steps; raise --steps to go on")


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
