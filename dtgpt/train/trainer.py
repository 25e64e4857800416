"""One optimizer step: `gradients()` and `update()` of a `Trainer`, which has the model, the optimizer and the batches.

A step never asks the device for a value. The host queues a step while the device still computes the one before, and a
GPU is not idle in between; a step in which the host waits could not be captured as CUDA graphs either. So losses and
norms stay on the device (`StepResult`) until somebody reads them, and what depends on them, clipping or a skipped step,
is arithmetic on the device.

The same lines run under every plan. What a plan changes is in the parts that `__init__` makes: which modules and which
elements of each parameter this rank has (`parallel/build.py`), how micro-batches pass through them (the engine), and
which samples of the global batch are this rank's (the objective).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.config.schedule import BatchSizes
from dtgpt.data.dataset import HeldOutPart
from dtgpt.models.batch import Batch
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.optim.step_state import StepState, restore_states
from dtgpt.optim.update import Update, make_states
from dtgpt.parallel.build import (
    build_stages,
    make_engine,
    micro_batch_weight,
    scale_gradients,
)
from dtgpt.parallel.engine import Timers, open_graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard
from dtgpt.train.objective import HeldOut, Objective, Parts, never
from dtgpt.util import seams


class StepResult(NamedTuple):
    """The outcome of one optimizer step, on the device."""

    loss: Tensor  # this rank's part of the mean loss
    norm: Tensor  # of the gradient, before clipping


class Trainer:
    """The parts with which this rank trains: batches, model, gradients, optimizer. Every rank must call the same
    methods in the same order. It writes no files: that is the loop's."""

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings,
        mesh: Mesh,
        objective: Objective,
        draw_weights: bool = True,
        ends: tuple[int, ...] | None = None,
    ):
        """draw_weights: False leaves the weights' memory as it is, for a checkpoint or another model to fill. ends: ids
        at which generated texts end; None: the tokenizer's end of text."""
        end = objective.dataset.tokenizer.end_of_text
        self.ends = ends if ends is not None else () if end is None else (end,)
        self.settings, self.mesh, self.log = settings, mesh, recipe.log
        self.objective, self.dataset, self.overfits = objective, objective.dataset, recipe.data.overfit
        self.schedule, self.steps = recipe.schedule, recipe.num_steps
        self.graphs = open_graphs(settings.graphs)  # early: all that is queued from here on may be captured
        mesh.before_end.append(self.graphs.release)

        # The model, in this rank's shards. Every random number of the run follows from the seed, and each element of a
        # weight from its place in the whole tensor, so that a rank draws its own without those of the others.
        self.seed = recipe.seed
        weights_key = fold(root_key(recipe.seed), "weights")

        self.stages, self.shards = build_stages(settings, mesh, weights_key if draw_weights else None)
        if settings.freezes_weights:
            for fill in seams.listed("initial_values"):
                fill(self.shards, settings, weights_key, draw_weights)

        # What runs micro-batches forward and backward through it, and what steps keep for the next one. States may
        # give modules what they compute with, which has to be there before anything runs.
        timers = seams.listed("timers", recipe.log)
        self.timers: Timers = timers[0](mesh.device) if timers else Timers()
        self.engine = make_engine(self.stages, self.shards, settings, self.graphs, self.timers)
        states = make_states(recipe, settings, mesh)
        for state in states:
            state.attach(self.stages)
        for test in seams.listed("table_tests") if settings.plan.table else []:
            test(self.engine, settings)

        # The optimizer. It reads the gradients that the engine leaves in the shards, and scales the loss of a
        # micro-batch by its part of the mean.
        self.step, self.sizes = 0, recipe.batch_sizes()
        self.micro_batches = settings.micro_batches
        self.optimizer = Update(
            self.shards,
            recipe.optimizer,
            self.schedule.rates(self.steps, self.sizes),
            micro_batch_weight(self.micro_batches, settings.plan),
            states,
        )
        self.states: list[StepState] = []  # more that checkpoints keep; these change between steps
        scale_gradients(self.stages, self.optimizer.gradient_scale)

        # Last, what the run learns: it may compute with all of these, and give the head another loss.
        parts = Parts(
            settings=settings,
            mesh=mesh,
            stages=self.stages,
            engine=self.engine,
            timers=self.timers,
            ends=self.ends,
            samples_of=self.samples_of,
        )
        objective.bind(parts)
        # Whether no token of the last step's batch counts: bool scalar, the same on all ranks; None: some do.
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
        # Whatever a step adds to begins at zero. Under graphs gradients stay where they are, since the graphs write to
        # these addresses.
        if not self.graphs.captured:
            self.shards.drop_gradients()

        # This rank's samples, which a thread has read during the last step, then forward and backward.
        batch, self.empty = self.objective.take(self.step)
        with self.timers.measure("forward_backward"):
            for state in self.optimizer.states:
                state.before(self.engine, batch, self.micro_batches)
            return self.engine.gradients(self.micro_batches, batch)

    def update(self, loss: Tensor) -> StepResult:
        """Clip the gradients that `gradients` left in the shards, and step."""
        self.before_update()  # a checkpoint may still be copying the weights
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

    def held_out(self, part: HeldOutPart = "valid", interrupted: Callable[[], bool] = never) -> HeldOut | None:
        """Return what the objective says of the fixed samples of a part of the dataset."""
        return self.objective.held_out(part, self.log.eval_samples, interrupted)

    def held_out_loss(
        self, part: HeldOutPart = "valid", interrupted: Callable[[], bool] = never
    ) -> tuple[float, float | None] | None:
        """Return (mean loss, bits per byte where bytes are known) over the fixed samples of a part of the dataset, the
        same on every rank; None where there is none, or when `interrupted` became true in between."""
        found = self.held_out(part, interrupted)
        return None if found is None else (found.figures["loss"], found.figures.get("bits_per_byte"))

    def samples_before(self, step: int) -> int:
        """Return the samples that the run had seen when `step` began."""
        return self.sizes.before(step)

    def restore(self, state: dict[str, Any], sizes: BatchSizes) -> None:
        """Take the `state` of a checkpoint, whose weights and moments are loaded; `sizes`: those from its step on."""
        self.optimizer.restore(state)
        restore_states(self.states, state)
        self.step, self.sizes = state["step"], sizes
        self.objective.restore(state)
        self.optimizer.follow(self.schedule.rates(self.steps, sizes))

    def samples_of(self, step: int) -> range:
        """Return the numbers of the samples of a step, over all replicas."""
        first = 0 if self.overfits else self.samples_before(step)
        return range(first, first + self.sizes.at(step))

    def batch(self, step: int) -> Batch:
        """Return this rank's samples of any step, on the device."""
        return self.objective.batch(step)

    def expect_batch(self) -> None:
        """Prepare for the number of micro-batches of the next step, which changes where the batch size ramps up. Graphs
        are of one number: they are captured again."""
        micro_batches = self.sizes.at(self.step) // (self.settings.micro_batch_size * self.settings.plan.dp)
        if micro_batches != self.micro_batches:
            self.micro_batches = micro_batches
            self.graphs.restart()
            self.engine.expect(micro_batches)
            self.optimizer.weigh_micro_batches(micro_batch_weight(micro_batches, self.settings.plan))
