"""Training on one device, from recipe to sample. Read it from top to bottom.

recipe -> device -> data -> model -> optimizer -> loop -> run folder
"""

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from dtgpt.checkpoint import (
    check_same_model,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from dtgpt.console import say
from dtgpt.data.dataset import Dataset, bits_per_byte, default_cache, held_out_batches, load_dataset, training_batch
from dtgpt.device import check_memory, choose_device, choose_dtype, memory_errors_as_sentences, use_compiler
from dtgpt.errors import UserError
from dtgpt.generate import sample_text
from dtgpt.metrics import check_wandb
from dtgpt.model import build_model, dropout_keys
from dtgpt.ops.cross_entropy import cross_entropy
from dtgpt.ops.random import fold, root_key
from dtgpt.optim import clip_gradients, learning_rate, make_optimizer
from dtgpt.recipe import Recipe
from dtgpt.report import Report
from dtgpt.run import changes_since, create_run, load_tokenizer, lock_run, open_run
from dtgpt.signals import StopRequest


def train(recipe: Recipe) -> int:
    """Train as the recipe says and return the exit code: 0, or 128 + the number of the signal that ended the run.

    Whatever is wrong with the recipe, the data or the machine raises UserError before a run folder is made or changed.
    """
    recipe.validate()
    recipe = recipe.resolved()
    check_wandb(recipe.log.wandb)
    device = choose_device(recipe)
    check_memory(recipe.model, device)
    with ExitStack() as stack:
        stack.enter_context(memory_errors_as_sentences("lower micro_batch_size (the curve stays the same)"))
        run, checkpoint = Path(recipe.resume) if recipe.resume else None, None
        if run:
            checkpoint = newest_checkpoint(open_run(run))
            stack.enter_context(lock_run(run))
            check_same_model(checkpoint, recipe.model)
        dataset = read_dataset(recipe)
        stop = stack.enter_context(StopRequest())
        training = Training(recipe, device, dataset, checkpoint, stop)
        if stop:
            return 128 + stop.requested
        if run:
            say("; ".join(["resuming", *changes_since(run, recipe)]))
        else:
            run = create_run(Path(recipe.runs), recipe.name)
            stack.enter_context(lock_run(run))
        return training.run_to_end(run)


def read_dataset(recipe: Recipe) -> Dataset:
    """The recipe's text as tokens, checked against the recipe's model."""
    data = recipe.data
    settings = (data.path, data.json_key, data.tokenizer, data.bpe_vocab_size, data.held_out)
    dataset = load_dataset(*settings, cache=default_cache())
    dataset.check(recipe.model.seq_length, recipe.model.vocab_size)
    return dataset


class Training:
    """What a run needs, in the order in which it is made, then its steps."""

    def __init__(
        self, recipe: Recipe, device: torch.device, dataset: Dataset, checkpoint: Path | None, stop: StopRequest
    ):
        self.recipe, self.device, self.dataset, self.stop = recipe, device, dataset, stop
        self.dtype = choose_dtype(recipe, device)

        # Every random number of the run follows from these four keys.
        root = root_key(recipe.seed)
        weights_key, self.data_key = fold(root, "weights"), fold(root, "data")
        self.dropout_key, self.sample_key = fold(root, "dropout"), fold(root, "sample")

        self.model = build_model(recipe.model, device, self.dtype, None if checkpoint else weights_key)
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        self.step, self.consumed_samples = 0, 0
        if checkpoint:
            self._resume(checkpoint)
        self.loss_fn, self.dropout_keys = cross_entropy, dropout_keys
        if use_compiler(recipe, device):
            self._compile()

    def run_to_end(self, run: Path) -> int:
        """Train, report into the folder `run`, and return the exit code of `train`."""
        with Report(self.recipe, self.device, self.dtype, self.dataset, run, self.step) as report:
            self._loop(report, run / "checkpoints")
            report.finish()
        if not self.stop:
            return 0
        hint = f"; to go on, add --resume {run}" if 0 < self.step < self.recipe.steps else ""
        say(f"stopped at step {self.step}/{self.recipe.steps}{hint}")
        return 128 + self.stop.requested

    def _loop(self, report: Report, checkpoints: Path) -> None:
        recipe, log = self.recipe, self.recipe.log
        first, stopping = self.step, bool(self.stop)
        while self.step < recipe.steps and not stopping:
            lr = learning_rate(self.step, recipe)
            loss_on_device, norm_on_device = self.train_step(lr)

            # Read once, so that a signal from here on is met by the next step: the last step always saves.
            stopping, last = bool(self.stop), self.step == recipe.steps
            report_due = last or due(self.step, log.interval) or self.step == first + 1
            eval_due = last or due(self.step, log.eval_interval)
            save_due = last or due(self.step, recipe.checkpoint.interval) or stopping
            sample_due = last or due(self.step, log.sample_interval)
            if not (report_due or eval_due or save_due or sample_due):
                continue
            loss, norm = loss_on_device.item(), norm_on_device.item()  # here the program waits for the device
            self._check_finite("loss and gradient norm", loss, norm)
            if report_due:
                tokens = self.consumed_samples * recipe.model.seq_length
                report.step(self.step, tokens, loss, norm, lr)
            with report.paused():
                if eval_due and (losses := self.held_out_loss()):
                    self._check_finite("held-out loss and bits/byte", *losses)
                    report.held_out(self.step, *losses)
                if save_due:
                    self._save(checkpoints, must=last or stopping)
                if sample_due and (text := self.sample()) is not None:
                    report.sample(self.step, text)

    def train_step(self, lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step at learning rate `lr`. Returns loss and gradient norm as device scalars: nothing here
        waits for the device."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sample_ids = self.consumed_samples + torch.arange(recipe.global_batch_size)
        windows = training_batch(self.dataset.train, self.data_key, sample_ids, recipe.model.seq_length)
        step_key = fold(self.dropout_key, self.step)

        windows, sample_ids, step_key = (to_device(t, self.device) for t in (windows, sample_ids, step_key))
        size = recipe.micro_batch_size
        losses = [
            self.backward(micro_windows, micro_ids, step_key)
            for micro_windows, micro_ids in zip(windows.split(size), sample_ids.split(size), strict=True)
        ]

        norm = clip_gradients(list(self.model.parameters()), recipe.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.consumed_samples += recipe.global_batch_size
        return torch.stack(losses).mean(), norm

    def backward(self, windows: Tensor, sample_ids: Tensor, step_key: Tensor) -> Tensor:
        """Add one micro-batch's share of the gradient; returns its mean loss, detached.

        windows: int64 `[B, T + 1]`; sample_ids: int64 `[B]`; step_key: int64 `[2]`.
        """
        keys = None
        if self.recipe.model.dropout > 0:
            keys = self.dropout_keys(step_key, sample_ids, self.recipe.model.num_sites)
        logits = self.model(windows[:, :-1], keys)
        loss = self.loss_fn(logits, windows[:, 1:], self.recipe.model.vocab_size)
        (loss / self.recipe.micro_batches).backward()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> tuple[float, float] | None:
        """(mean loss in nats per token, bits per byte) over the fixed held-out windows; None where there are none, or
        when a signal came in between."""
        recipe, nats, tokens, text_bytes = self.recipe, 0.0, 0, 0
        token_bytes = torch.from_numpy(self.dataset.tokenizer.token_bytes())
        seq_length, samples = recipe.model.seq_length, recipe.log.eval_samples
        for windows in held_out_batches(self.dataset.valid, seq_length, recipe.micro_batch_size, samples):
            if self.stop:
                return None
            on_device = to_device(windows, self.device)
            loss = self.loss_fn(self.model(on_device[:, :-1]), on_device[:, 1:], recipe.model.vocab_size)
            count = windows[:, 1:].numel()
            nats, tokens = nats + loss.item() * count, tokens + count
            text_bytes += int(token_bytes[windows[:, 1:]].sum())
        return (nats / tokens, bits_per_byte(nats, text_bytes)) if tokens else None

    def sample(self) -> str | None:
        """A text from the model as it is now; None where none is wanted, or when a signal cut it short."""
        log = self.recipe.log
        if not log.sample_tokens or self.stop:
            return None
        key = fold(self.sample_key, self.step).to(self.device)
        text = sample_text(
            self.model, self.dataset.tokenizer, log.prompt, log.sample_tokens, key, log.temperature, log.top_k,
            interrupted=lambda: bool(self.stop),
        )  # fmt: skip
        return None if self.stop else text

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
            save_checkpoint(checkpoints, self.step, self.model, self.optimizer, state, keep_last)
        except (OSError, SafetensorError) as error:
            sentence = f"no checkpoint of step {self.step} could be written to {checkpoints} ({error})"
            if must:
                again = f"--resume {checkpoints.parent}" if list_checkpoints(checkpoints) else "start again"
                raise UserError(f"{sentence}; free space and {again}") from None
            say(f"{sentence}; training goes on", warning=True)

    def _resume(self, checkpoint: Path) -> None:
        run = checkpoint.parents[1]
        if load_tokenizer(run).ranks != self.dataset.tokenizer.ranks:
            raise UserError(f"{run} was trained with another tokenizer; give the --data values that it began with")
        state = load_checkpoint(checkpoint, self.model, self.optimizer)
        self.step, self.consumed_samples = state["step"], state["consumed_samples"]
        if state["data_digest"] != self.dataset.digest:
            say(f"the text is not the one that {run} began with", warning=True)
        if self.step >= self.recipe.steps:
            raise UserError(f"{run} has already done {self.step} steps; raise --steps to go on")

    def _compile(self) -> None:
        """Blocks share their code, so all are compiled once; shapes are static."""
        options = {"fullgraph": True, "dynamic": False}
        for module in (self.model.embedding, *self.model.blocks.values(), self.model.head):
            module.compile(**options)
        self.loss_fn = torch.compile(cross_entropy, **options)
        self.dropout_keys = torch.compile(dropout_keys, **options)


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: through pinned memory where the device is CUDA."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
