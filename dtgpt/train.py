"""Training, from recipe to sample. Read it from top to bottom.

recipe -> plan -> mesh -> data -> model in this rank's shards -> optimizer -> loop -> run folder
"""

import math
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from dtgpt import evaluate
from dtgpt.checkpoint import check_same_model, list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint
from dtgpt.console import say
from dtgpt.data.ahead import Ahead
from dtgpt.data.dataset import Dataset, default_cache, load_dataset, training_batch
from dtgpt.device import (
    check_memory,
    choose_device,
    choose_dtype,
    memory_errors_as_sentences,
    peak_memory,
    use_compiler,
    use_graphs,
)  # fmt: skip
from dtgpt.errors import UserError
from dtgpt.metrics import check_wandb
from dtgpt.ops.dropout import dropout_keys
from dtgpt.ops.random import fold, root_key
from dtgpt.optim import Update
from dtgpt.parallel.build import build_stages, gradient_share, make_passes, scale_gradients, try_table
from dtgpt.parallel.cost import state_bytes
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.launch import lost_peers_as_sentences, open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.process import Process
from dtgpt.parallel.shards import Shard
from dtgpt.recipe import Recipe
from dtgpt.report import Report, Silence
from dtgpt.run import changes_since, create_run, load_tokenizer, lock_run, open_run
from dtgpt.signals import StopRequest


def train(recipe: Recipe) -> int:
    """Train as the recipe says and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Every process of the plan calls it. Whatever is wrong with the recipe, the plan, the data or the machine raises
    UserError before a run folder is made or changed.
    """
    with ExitStack() as stack:
        recipe, mesh, process = start(recipe, stack)
        run, checkpoint = Path(recipe.resume) if recipe.resume else None, None
        if run:
            checkpoint = mesh.on_rank_0(lambda: newest_checkpoint(open_run(run)))
            mesh.on_rank_0(lambda: _claim(stack, run))
            check_same_model(checkpoint, recipe.model)
        dataset = read_on_every_node(recipe, mesh, process)
        stop = stack.enter_context(StopRequest())
        training = Training(recipe, mesh, dataset, checkpoint, stop)
        if training.interrupted():
            return training.exit_code()
        if run:
            say("; ".join(["resuming", *changes_since(run, recipe)]))
        else:
            run = mesh.on_rank_0(lambda: create_run(Path(recipe.runs), recipe.name))
            mesh.on_rank_0(lambda: _claim(stack, run))
        return training.run_to_end(run)


def start(recipe: Recipe, stack: ExitStack) -> tuple[Recipe, Mesh, Process]:
    """Check the recipe against the plan and the machine, then bring the processes of the plan together; `stack` parts
    them again."""
    process = Process.from_environment()
    recipe.validate()
    recipe = recipe.resolved()
    plan = recipe.plan_for(process.world)
    check_wandb(recipe.log.wandb)
    device = choose_device(recipe, process.local_rank)
    width = choose_dtype(recipe, device).itemsize
    check_memory(state_bytes(recipe, plan, process.rank, width), process.local_world, device)
    stack.enter_context(memory_errors_as_sentences("lower micro_batch_size (the curve stays the same)"))
    return recipe, stack.enter_context(open_mesh(recipe, plan, device, process)), process


def _claim(stack: ExitStack, run: Path) -> None:
    stack.enter_context(lock_run(run))


def read_dataset(recipe: Recipe) -> Dataset:
    """The recipe's text as tokens, checked against the recipe's model."""
    data = recipe.data
    settings = (data.path, data.json_key, data.tokenizer, data.bpe_vocab_size, data.held_out)
    dataset = load_dataset(*settings, cache=default_cache())
    dataset.check(recipe.model.seq_length, recipe.model.vocab_size)
    return dataset


def read_on_every_node(recipe: Recipe, mesh: Mesh, process: Process) -> Dataset:
    """One process of each node reads first and fills the node's cache, from which the others read."""
    dataset = None

    def read() -> None:
        nonlocal dataset
        dataset = read_dataset(recipe)

    mesh.turns(read, lambda rank: process.local_rank == 0)
    mesh.turns(read, lambda rank: process.local_rank != 0)
    mesh.agree({"the text": dataset.digest}, "give every node the same data")
    return dataset


class Curve(NamedTuple):
    """Of one optimizer step, on the device: this rank's share of the loss, and the norm of the gradient."""

    loss: Tensor
    norm: Tensor


class Training:
    """What a run needs, in the order in which it is made, then its steps."""

    def __init__(self, recipe: Recipe, mesh: Mesh, dataset: Dataset, checkpoint: Path | None, stop: StopRequest):
        self.recipe, self.mesh, self.dataset, self.stop = recipe, mesh, dataset, stop
        self.device, self.plan = mesh.device, mesh.plan
        self.dtype = choose_dtype(recipe, self.device)
        self.graphs = Graphs(use_graphs(recipe, self.device))
        mesh.before_end.append(self.graphs.release)

        # Every random number of the run follows from these four keys.
        root = root_key(recipe.seed)
        weights_key, self.data_key = fold(root, "weights"), fold(root, "data")
        self.dropout_key, self.sample_key = fold(root, "dropout"), fold(root, "sample")

        key, compiled = None if checkpoint else weights_key, use_compiler(recipe, self.device, self.plan)
        stages, self.shards = build_stages(recipe, mesh, self.dtype, key, compiled)
        self.passes = make_passes(stages, self.shards, recipe, self.graphs, self.dtype)
        if self.plan.table:
            try_table(self.passes, recipe.model, self.device)
        self.optimizer = Update(self.shards, recipe, self.dtype, gradient_share(recipe, self.plan))
        scale_gradients(stages, self.optimizer.gradient_scale)
        self.batches = Ahead(self._batch, self.device)
        self.step = self.first_step = self.samples_at_start = 0
        if checkpoint:
            self._resume(checkpoint)

    def run_to_end(self, run: Path) -> int:
        """Train, report into the folder `run`, and return the exit code of `train`."""
        made = (self.recipe, self.mesh, self.dtype, self.dataset, run, self.step)
        with ExitStack() as stack:
            report: Report | Silence = Silence()

            def open_report() -> None:
                nonlocal report
                report = stack.enter_context(Report(*made))

            self.mesh.on_rank_0(open_report)
            stack.enter_context(lost_peers_as_sentences(f"go on with --resume {run}"))
            stopped = self._loop(report, run / "checkpoints")
            report.finish()
        if not stopped:
            return 0
        hint = f"; to go on, add --resume {run}" if 0 < self.step < self.recipe.steps else ""
        say(f"stopped at step {self.step}/{self.recipe.steps}{hint}")
        return self.exit_code()

    def exit_code(self) -> int:
        """Of a run that ends by a signal, which perhaps not every process got."""
        return 128 + int(self.mesh.max(self.stop.requested or 0) or signal.SIGTERM)

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
                report.step(self.step, tokens, loss, norm, self.optimizer.lr.item(), memory, self.optimizer.scaling())
            with report.paused():
                if eval_due and (losses := self.held_out_loss()):
                    self._check_finite("held-out loss and bits/byte", *losses)
                    report.held_out(self.step, *losses)
                if save_due:
                    self._save(checkpoints, must=last or stopping)
                if sample_due and (text := self.sample()) is not None:
                    report.sample(self.step, text)
        return stopping or self.interrupted()

    def train_step(self) -> Curve:
        """One optimizer step. Nothing here waits for the device."""
        return self.update(self.gradients())

    def gradients(self) -> Tensor:
        """Leave the gradient of the next global batch in the shards. Returns the mean loss over this rank's samples, 0
        where the head is elsewhere."""
        recipe, config = self.recipe, self.recipe.model
        self.graphs.next_step()
        if not self.graphs.captured:
            self.shards.drop_gradients()
        windows, sample_ids, step_key = self.batches.take(self.step)
        keys = dropout_keys(step_key, sample_ids, config.num_sites) if config.dropout > 0 else None
        return self.passes.gradients(recipe.micro_batches(self.plan.dp), windows, keys)

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank in `step`: windows int64 `[B, T + 1]`, sample ids `[B]` and the step's dropout key `[2]`."""
        share = self.recipe.global_batch_size // self.plan.dp
        first = self.samples_before(step) + self.mesh.place.dp * share
        sample_ids = first + torch.arange(share)
        windows = training_batch(self.dataset.train, self.data_key, sample_ids, self.recipe.model.seq_length)
        return windows, sample_ids, fold(self.dropout_key, step)

    def samples_before(self, step: int) -> int:
        """Samples that the run had seen when `step` began."""
        return self.samples_at_start + (step - self.first_step) * self.recipe.global_batch_size

    def gradient(self, shard: Shard) -> Tensor:
        """What `gradients` left of this shard, without the loss scale."""
        return self.shards.gradient(shard).float() * self.optimizer.inverse_scale()

    def update(self, loss: Tensor) -> Curve:
        """Clip the gradients that `gradients` left in the shards, and step."""
        norm = self.graphs.run("update", self.optimizer.apply)
        self.step += 1
        return Curve(loss.clone(), norm.clone())  # a graph writes the next ones over them

    def mean_loss(self, on_device: Curve) -> float:
        """Over the global batch, the same on every rank."""
        return self.mesh.sum(on_device.loss).item() / (self.plan.dp * self.plan.tp)

    def interrupted(self) -> bool:
        """Whether any process got a signal; all come to the same answer."""
        return self.mesh.any(bool(self.stop))

    def held_out_loss(self) -> tuple[float, float] | None:
        return evaluate.held_out_loss(self.passes, self.mesh, self.recipe, self.dataset, self.interrupted)

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
        """Save a checkpoint. Where that fails (disk full) the run goes on with a warning, unless it `must` save."""
        keep_last = self.recipe.checkpoint.keep_last
        state = {"consumed_samples": self.samples_before(self.step), "data_digest": self.dataset.digest}
        state |= self.optimizer.state()
        try:
            made = self.step, self.recipe.model, self.shards, self.optimizer.adamw, state
            save_checkpoint(checkpoints, *made, keep_last)
        except (OSError, SafetensorError, UserError) as error:
            sentence = f"no checkpoint of step {self.step} could be written to {checkpoints} ({error})"
            if must:
                again = f"--resume {checkpoints.parent}" if list_checkpoints(checkpoints) else "start again"
                raise UserError(f"{sentence}; free space and {again}") from None
            say(f"{sentence}; training goes on", warning=True)

    def _resume(self, checkpoint: Path) -> None:
        run = checkpoint.parents[1]
        if load_tokenizer(run).ranks != self.dataset.tokenizer.ranks:
            raise UserError(f"{run} was trained with another tokenizer; give the --data values that it began with")
        state = load_checkpoint(checkpoint, self.shards, self.optimizer.adamw)
        self.optimizer.restore(state)
        self.step = self.first_step = state["step"]
        self.samples_at_start = state["consumed_samples"]
        if state["data_digest"] != self.dataset.digest:
            say(f"the text is not the one that {run} began with", warning=True)
        if self.step >= self.recipe.steps:
            raise UserError(f"{run} has already done {self.step} steps; raise --steps to go on")


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
