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
from dtgpt.checkpoint import (
    check_same_model,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from dtgpt.console import say
from dtgpt.data.dataset import Dataset, default_cache, load_dataset, training_batch
from dtgpt.device import (
    check_memory,
    choose_device,
    choose_dtype,
    memory_errors_as_sentences,
    peak_memory,
    to_device,
    use_compiler,
)
from dtgpt.errors import UserError
from dtgpt.metrics import check_wandb
from dtgpt.model import dropout_keys
from dtgpt.ops.random import fold, root_key
from dtgpt.optim import clip_gradients, learning_rate, make_optimizer
from dtgpt.parallel.build import build_stages, make_passes, try_table
from dtgpt.parallel.cost import state_bytes
from dtgpt.parallel.launch import lost_peers_as_sentences, open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.process import Process
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
    check_memory(state_bytes(recipe, plan, process.rank), process.local_world, device)
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
        self.compiled = use_compiler(recipe, self.device, self.plan)

        # Every random number of the run follows from these four keys.
        root = root_key(recipe.seed)
        weights_key, self.data_key = fold(root, "weights"), fold(root, "data")
        self.dropout_key, self.sample_key = fold(root, "dropout"), fold(root, "sample")

        key = None if checkpoint else weights_key
        stages, self.shards = build_stages(recipe.model, mesh, self.dtype, key, self.compiled)
        self.passes = make_passes(stages, recipe, mesh, self.dtype, self.compiled)
        if self.plan.table:
            try_table(self.passes, recipe.model, self.device)
        self.optimizer = make_optimizer([shard.local for shard in self.shards], recipe.optimizer)
        self.step, self.consumed_samples = 0, 0
        if checkpoint:
            self._resume(checkpoint)
        self.dropout_keys = torch.compile(dropout_keys, dynamic=False) if self.compiled else dropout_keys

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
            lr = learning_rate(self.step, recipe)
            on_device = self.train_step(lr)

            # Read once, so that a signal from here on is met by the next step: the last step always saves.
            stopping, last = self.mesh.vote(bool(self.stop)), self.step == recipe.steps
            report_due = last or due(self.step, log.interval) or self.step == first + 1
            eval_due = last or due(self.step, log.eval_interval)
            save_due = last or due(self.step, recipe.checkpoint.interval) or stopping
            sample_due = last or due(self.step, log.sample_interval)
            if not (report_due or eval_due or save_due or sample_due):
                continue
            loss, norm = self.mean_loss(on_device), on_device.norm.item()  # here the program waits for the device
            self._check_finite("loss and gradient norm", loss, norm)
            if report_due:
                tokens = self.consumed_samples * recipe.model.seq_length
                memory = self.mesh.max(peak_memory(self.device)[0])
                report.step(self.step, tokens, loss, norm, lr, memory)
            with report.paused():
                if eval_due and (losses := self.held_out_loss()):
                    self._check_finite("held-out loss and bits/byte", *losses)
                    report.held_out(self.step, *losses)
                if save_due:
                    self._save(checkpoints, must=last or stopping)
                if sample_due and (text := self.sample()) is not None:
                    report.sample(self.step, text)
        return stopping or self.interrupted()

    def train_step(self, lr: float) -> Curve:
        """One optimizer step at learning rate `lr`. Nothing here waits for the device."""
        return self.update(self.gradients(), lr)

    def gradients(self) -> Tensor:
        """Leave the gradient of the next global batch in the shards. Returns the mean loss over this rank's samples, 0
        where the head is elsewhere."""
        recipe, config, plan = self.recipe, self.recipe.model, self.plan
        share = recipe.global_batch_size // plan.dp
        sample_ids = self.consumed_samples + self.mesh.place.dp * share + torch.arange(share)
        windows = training_batch(self.dataset.train, self.data_key, sample_ids, config.seq_length)
        step_key = fold(self.dropout_key, self.step)

        windows, sample_ids, step_key = (to_device(t, self.device) for t in (windows, sample_ids, step_key))
        keys = self.dropout_keys(step_key, sample_ids, config.num_sites) if config.dropout > 0 else None
        loss = self.passes.gradients(recipe.micro_batches(plan.dp), windows, keys)
        self.shards.take_gradients()
        return loss

    def update(self, loss: Tensor, lr: float) -> Curve:
        """Clip the gradients that `gradients` left in the shards, and step."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self.shards.norm()
        clip_gradients([shard.local for shard in self.shards], norm, recipe.optimizer.clip)
        self.optimizer.step()
        self.shards.drop_gradients()
        self.step += 1
        self.consumed_samples += recipe.global_batch_size
        return Curve(loss, norm)

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
        state = {"consumed_samples": self.consumed_samples, "data_digest": self.dataset.digest}
        try:
            save_checkpoint(checkpoints, self.step, self.recipe.model, self.shards, self.optimizer, state, keep_last)
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
        state = load_checkpoint(checkpoint, self.shards, self.optimizer)
        self.step, self.consumed_samples = state["step"], state["consumed_samples"]
        if state["data_digest"] != self.dataset.digest:
            say(f"the text is not the one that {run} began with", warning=True)
        if self.step >= self.recipe.steps:
            raise UserError(f"{run} has already done {self.step} steps; raise --steps to go on")


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
