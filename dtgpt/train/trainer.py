"""The model, optimizer and batches of a run: `gradients()` and `update()` are one optimizer step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from dtgpt.config.batch_size import BatchSizes
from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.data.dataset import Dataset, Part
from dtgpt.data.document_masks import DocumentMasks
from dtgpt.data.prefetch import Prefetcher
from dtgpt.models.batch import Batch
from dtgpt.ops.loss.preference import PreferenceLoss
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.optim.states import make_states
from dtgpt.optim.step_state import StepState, restore_states
from dtgpt.optim.update import Update
from dtgpt.parallel.build import (
    build_stages,
    make_engine,
    micro_batch_weight,
    scale_gradients,
    set_objective,
    smoke_test_table,
)
from dtgpt.parallel.context import slice_of
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard
from dtgpt.posttrain.dpo.pairs import PairDataset, with_answers
from dtgpt.posttrain.grpo.rollouts import Rollouts
from dtgpt.posttrain.lora.adapters import initialize_adapters
from dtgpt.run.sinks import TIMED
from dtgpt.train import evaluate
from dtgpt.util.timers import Timers


class StepResult(NamedTuple):
    """The outcome of one optimizer step, on the device."""

    loss: Tensor  # this rank's part of the mean loss
    norm: Tensor  # of the gradient, before clipping


def never() -> bool:
    """Return False: nobody has asked to stop."""
    return False


class Trainer:
    """What a run computes with, in the order in which it is made. Files, reports and signals are the loop's."""

    def __init__(
        self, recipe: Recipe, settings: Settings, mesh: Mesh, dataset: Dataset, draw_weights: bool = True,
        ends: tuple[int, ...] | None = None,
    ):  # fmt: skip
        """draw_weights: False leaves the weights' memory as it is, for a checkpoint or another model to fill. ends: ids
        at which generated texts end; None: the tokenizer's end of text."""
        end = dataset.tokenizer.end_of_text
        self.ends = ends if ends is not None else () if end is None else (end,)
        self.settings, self.mesh, self.dataset, self.log = settings, mesh, dataset, recipe.log
        self.schedule, self.steps = recipe.schedule, recipe.num_steps
        self.graphs = Graphs(settings.graphs)
        mesh.before_end.append(self.graphs.release)

        # Every random number of the run follows from the seed.
        self.seed = recipe.seed
        root = root_key(recipe.seed)
        weights_key, self.data_key = fold(root, "weights"), fold(root, "data")
        self.dropout_key = fold(root, "dropout")
        self.num_sites = settings.model.num_sites if settings.model.dropout > 0 else 0  # of dropout, where any drops

        self.stages, self.shards = build_stages(settings, mesh, weights_key if draw_weights else None)
        if settings.lora.rank:
            initialize_adapters(self.shards, settings.lora, weights_key)
        self.timers = Timers(recipe.log.timers, mesh.device)
        self.engine = make_engine(self.stages, self.shards, settings, self.graphs, self.timers)
        states = make_states(recipe, settings, mesh)
        for state in states:
            state.attach(self.stages)
        if settings.plan.table:
            smoke_test_table(self.engine, settings)
        self.adapter: dict[str, Any] | None = None  # what checkpoints say of it, where the run trains one
        self.step, self.sizes = 0, recipe.batch_sizes()
        self.micro_batches = settings.micro_batches
        self.optimizer = Update(
            self.shards,
            recipe.optimizer,
            self.schedule.rates(self.steps, self.sizes),
            micro_batch_weight(self.micro_batches, settings.plan),
            states,
        )
        self.states: list[StepState] = []  # of checkpoints too, which change between steps
        scale_gradients(self.stages, self.optimizer.gradient_scale)
        self.objective: PreferenceLoss | None = None
        if (dpo := recipe.dpo).beta:
            self.objective = PreferenceLoss(dpo.loss, dpo.beta, dpo.label_smoothing, mesh.device, mesh.cp_group)
            set_objective(self.stages, self.objective)
        self.batches = Prefetcher(self._read_batch, mesh.device)
        data = recipe.data
        options = data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
        self.overfits = data.overfit
        self.masks = DocumentMasks(dataset.tokenizer.end_of_text, *options)
        self.rollouts: Rollouts | None = None
        if recipe.grpo.group:
            self.rollouts = Rollouts(
                grpo=recipe.grpo, stages=self.stages, mesh=mesh, settings=settings, tokenizer=dataset.tokenizer,
                ends=self.ends, seed=recipe.seed, timeout=recipe.timeout,
            )  # fmt: skip
        # Whether no token of the last step's batch counts: bool scalar, the same on all ranks; None: all do.
        self.empty: Tensor | None = None
        self.before_update: Callable[[], None] = lambda: None  # whoever still reads the weights waits here

    def train_step(self) -> StepResult:
        """Take one optimizer step. Nothing here waits for the device."""
        return self.update(self.gradients())

    def gradients(self) -> Tensor:
        """Leave the gradient of the next global batch in the shards. Returns the mean loss over this rank's samples, 0
        where the head is on another rank."""
        self.expect_batch()
        self.graphs.next_step()
        if self.objective is not None:
            self.objective.totals.zero_()
        if not self.graphs.captured:
            self.shards.drop_gradients()
        if self.rollouts is not None:
            batch = self.rollouts.batch(self.step)
            self.empty = self._counted(batch) == 0
        else:
            with self.timers.measure("data", host=True):
                read = self.batches.take(self.step)
            batch, self.empty = self._make_batch(*read)
        with self.timers.measure("forward_backward"):
            return self.engine.gradients(self.micro_batches, batch)

    def update(self, loss: Tensor) -> StepResult:
        """Clip the gradients that `gradients` left in the shards, and step."""
        self.before_update()
        with self.timers.measure("optimizer"):
            norm = self.graphs.run("update", self.optimizer.apply, loss, self.empty)
        self.step += 1
        self.timers.next_step()
        return StepResult(loss.clone(), norm.clone())  # a graph overwrites its outputs in the next step

    def gradient(self, shard: Shard) -> Tensor:
        """Return what `gradients` left of this shard, without the loss scale."""
        return self.shards.gradient(shard).float() * self.optimizer.inverse_scale()

    def mean_loss(self, result: StepResult) -> float:
        """Return the loss over the global batch, the same on every rank."""
        return self.mesh.sum(result.loss).item() / self.mesh.copies_of_loss

    def held_out_loss(
        self, part: Part = "valid", interrupted: Callable[[], bool] = never
    ) -> tuple[float, float | None] | None:
        """Return as `evaluate.held_out_loss` does, for the fixed samples of a part of the dataset."""
        length, size = self.settings.seq_length, self.settings.micro_batch_size
        batches = list(self.dataset.held_out(part, length, size, self.log.eval_samples))
        token_bytes = torch.from_numpy(self.dataset.tokenizer.token_bytes())
        return evaluate.held_out_loss(self.engine, self.mesh, batches, self.masks, token_bytes, interrupted, part)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Compute, while the context lasts, as a model does that is loaded from a checkpoint."""
        with ExitStack() as stack:
            for state in self.optimizer.states:
                stack.enter_context(state.as_loaded())
            yield

    def times(self) -> dict[str, float]:
        """Return the mean seconds of the parts of a step since the last call, those of the slowest rank for each part;
        nothing without timers. Waits for the device."""
        if not self.timers.enabled:
            return {}
        own = self.timers.take()
        seconds = torch.tensor([own.get(name, -1.0) for name in TIMED], dtype=torch.float64, device=self.mesh.device)
        slowest = self.mesh.all_reduce(seconds, ReduceOp.MAX).tolist()
        return {f"{name}_seconds": value for name, value in zip(TIMED, slowest, strict=True) if value >= 0}

    def samples_before(self, step: int) -> int:
        """Return the samples that the run had seen when `step` began."""
        return self.sizes.before(step)

    def restore(self, state: dict[str, Any], sizes: BatchSizes) -> None:
        """Take the `state` of a checkpoint, whose weights and moments are loaded; `sizes`: those from its step on."""
        self.optimizer.restore(state)
        restore_states(self.states, state)
        self.step, self.sizes = state["step"], sizes
        if self.rollouts is not None:
            self.rollouts.restore(state)
        self.optimizer.follow(self.schedule.rates(self.steps, sizes))

    def batch(self, step: int) -> Batch:
        """Return this rank's samples of a step, on the device, as `gradients` takes them."""
        if self.rollouts is not None:
            return self.rollouts.batch(step)
        return self._make_batch(*(value.to(self.mesh.device) for value in self._read_batch(step)))[0]

    def _make_batch(
        self, windows: Tensor, sample_ids: Tensor, step_key: Tensor, reference: Tensor | None = None
    ) -> tuple[Batch, Tensor | None]:
        """Return this rank's part of the batch of windows, and whether no token of the global batch counts, as of
        `empty`."""
        keys = dropout_keys(step_key, sample_ids, self.num_sites) if self.num_sites else None
        batch = self.masks.batch(windows, keys)
        if reference is not None:
            batch = with_answers(batch, windows, reference.shape[1], reference)
        batch = slice_of(batch, self.mesh.place)
        if batch.loss_weights is None:
            return batch, None
        # The mean loss is that over the weights, of tokens or of pairs, of the whole global batch.
        counted = self._counted(batch)
        scale = batch.loss_weights.numel() * self.settings.plan.data_ranks / counted.clamp(min=1)
        return batch._replace(loss_weights=batch.loss_weights * scale.float()), counted == 0

    def _counted(self, batch: Batch) -> Tensor:
        """Return how many tokens, or pairs, of the global batch count, fp64 on the device."""
        assert batch.loss_weights is not None
        plan = self.settings.plan
        return self.mesh.sum(batch.loss_weights.count_nonzero())[0] / (plan.tp * plan.pp)

    def expect_batch(self) -> None:
        """Prepare for the number of micro-batches of the next step, which changes where the batch size ramps up."""
        micro_batches = self.sizes.at(self.step) // (self.settings.micro_batch_size * self.settings.plan.dp)
        if micro_batches != self.micro_batches:
            self.micro_batches = micro_batches
            self.graphs.restart()
            self.engine.expect(micro_batches)
            self.optimizer.weigh_micro_batches(micro_batch_weight(micro_batches, self.settings.plan))

    def _read_batch(self, step: int) -> tuple[Tensor, ...]:
        """Return this rank's windows, as `Dataset.windows` makes them, and sample ids `[B]`, the dropout key `[2]` of
        `step`, and of pairs their reference."""
        samples = self.sizes.at(step) // self.settings.plan.dp
        first = (0 if self.overfits else self.samples_before(step)) + self.mesh.place.dp * samples
        sample_ids = first + torch.arange(samples)
        windows = self.dataset.windows(sample_ids, self.settings.seq_length, self.data_key)
        more = (self.dataset.references(sample_ids),) if isinstance(self.dataset, PairDataset) else ()
        return windows, sample_ids, fold(self.dropout_key, step), *more
