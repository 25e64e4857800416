"""A run of another library that goes on as a run of dtgpt: its recipe, weights, moments and counters."""

import shlex
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dtgpt.checkpoint.load import check_optimizer, check_same_model, fill_shards, states_to_fill
from dtgpt.config.overrides import leaves, replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.config.schedule import BatchSizes
from dtgpt.data.open import format_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.positions import learns_positions
from dtgpt.models.source import Ranges, Source
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shard, Shards
from dtgpt.train.init_from.begin import dimensions
from dtgpt.train.start import checked, with_steps
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.shared.option_words import value_text
from dtgpt.util.shared.words import hanging

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer


class TrainingSource(Source):
    """A run of another library to go on with. `read` returns fp32 master weights.

    `state` has `step`, `consumed_samples`, `updates` and perhaps `loss_scale`, as that of a checkpoint.
    `order_samples`: number of samples for which the order of prepared data was made, None where unknown. `values`: what
    the run was asked for, by the names of recipe fields.
    """

    path: Path
    optimizer: str  # its kind
    state: Mapping[str, Any]
    order_samples: int | None
    values: Mapping[str, Any]

    @abstractmethod
    def read_moment(self, name: str, moment: str, part: Ranges) -> Tensor:
        """Return the elements `part` of the optimizer's state `moment` of the parameter `name`: fp32 on the CPU."""

    def settle(self, asked: Recipe, given: Collection[str]) -> Recipe:
        """Return the recipe with which the run goes on, `asked` with the options `given`: with the dimensions of its
        model and the order of its samples. Say what else it was asked for."""
        recipe = replace_values(asked, dimensions(self.path, self.config, asked.model, given, exact=True))
        checked(recipe)
        known = {name: value for name, _, _, value in leaves(recipe)}  # some are of capabilities that may not be here
        self._tell_values({name: known[name] for name in self.values.keys() & known.keys() - set(given)})
        step, seen = self.state["step"], self.state["consumed_samples"]
        if recipe.train_samples is not None and seen > recipe.train_samples:
            raise UserError(f"{self.path} has already seen {counted(seen, 'sample')}; raise --train_samples")
        recipe = with_steps(recipe, step, seen)
        ordered = None if "data.train_samples" in given else self.order_samples
        if ordered is None or format_of(recipe.data.path) is None:
            return recipe
        if recipe.batch_sizes(step, seen).before(recipe.num_steps) <= ordered:
            return replace(recipe, data=replace(recipe.data, train_samples=ordered))
        say(
            f"the run is longer than the {ordered} samples for which {self.path} ordered its data, and may "
            "see them in another order",
            warning=True,
        )
        return recipe

    def _tell_values(self, asked: Mapping[str, Any]) -> None:
        """Say in which of these values of a recipe the run was asked for something else."""
        other = {name: value for name, value in self.values.items() if name in asked and asked[name] != value}
        if not other:
            return
        changes = [f"  {name}: {value_text(asked[name])} -> {value_text(value)}" for name, value in other.items()]
        options = " ".join(f"--{name} {shlex.quote(value_text(value))}" for name, value in other.items())
        lines = [f"{self.path} was trained with other values than the recipe has (recipe -> run):", *changes]
        say("\n".join([*lines, hanging(f"to keep them, give {options}", 2)]))

    def check(self, model: ModelConfig, steps: int) -> None:
        """Raise UserError where the run is of another model, or has done all `steps`."""
        held = self.config if learns_positions(self.config) else replace(self.config, seq_length=model.seq_length)
        check_same_model(self.path, held, model)
        if (done := self.state["step"]) >= steps:
            raise UserError(f"{self.path} has already done {counted(done, 'step')}; raise --steps to go on")

    def hand_over(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        """Give a trainer the weights, the optimizer's state and the counters. sizes: returns those of the batches of a
        run that goes on at a step, after a number of samples."""
        for note in self.notes:
            say(note, warning=True)
        self._load(trainer.shards, trainer.optimizer.rule)
        step, samples = self.state["step"], self.state["consumed_samples"]
        trainer.restore(dict(self.state), sizes(step, samples))
        say(f"going on with {self.path} after step {step} and {counted(samples, 'sample')}")

    def _load(self, shards: Shards, optimizer: Optimizer) -> None:
        """Give this rank's shards the weights, and `optimizer` the state. Raise UserError where that was an optimizer
        from which this one takes no state."""
        check_optimizer(self.path, self.optimizer, optimizer.kind, optimizer.takes)

        def load(shard: Shard) -> None:
            shard.local.copy_(self.read(shard.name, shard.region))
            for moment, tensor in states_to_fill(optimizer, shard, self.optimizer):
                tensor.copy_(self.read_moment(shard.name, moment, shard.region))

        fill_shards(shards, load, threads=1)
