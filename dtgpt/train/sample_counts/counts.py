"""What a run that goes on makes of `train_samples`, whatever sizes its steps had."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import list_checkpoints, read_state, step_of
from dtgpt.config.recipe import Recipe
from dtgpt.train.start import checked, with_steps
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError


class SampleCounts:
    """Numbers of samples in place of numbers of steps."""

    def count_on(self, recipe: Recipe, run: Path, chosen: Path | None) -> Recipe:
        """Return the recipe of a resumed run with `steps` in place of `train_samples`: those of its checkpoint, and as
        many as the samples after it fill, whatever sizes its steps had."""
        checked(recipe)
        found = chosen or max(list_checkpoints(run / "checkpoints"), key=step_of, default=None)
        try:
            state = read_state(found, own=type(recipe.model)) if found else {}
        except UserError:  # which is told where the run is resumed
            state = {}
        step, seen = state.get("step", 0), state.get("consumed_samples", 0)
        if seen > recipe.train_samples:
            raise UserError(f"{run} has already seen {counted(seen, 'sample')}; raise --train_samples to go on")
        return with_steps(recipe, step, seen)

    def drop_steps(self, kept: dict[str, Any], asked: Recipe, given: Collection[str]) -> Recipe:
        """Return `asked`, of a run that is given a number of samples now, and drop from the values that are `kept` of
        it the number of steps with which it may have begun, which does not count any more."""
        for name in {"steps", "optimizer.decay_samples"} - set(given):
            kept.pop(name, None)
        return asked if "steps" in given else replace(asked, steps=None)

    def tell_other_end(self, former: dict[str, Any], recipe: dict[str, Any], trainer: Trainer) -> None:
        """Warn where another batch size than that of the `former` recipe lets the steps of a run end elsewhere than its
        schedule in samples, beyond which the learning rate may be 0."""
        end, steps, sizes = trainer.schedule.end, trainer.steps, ("global_batch_size", "rampup_batch_size")
        seen, next_step = trainer.samples_before(steps), trainer.samples_before(steps + 1)
        same_sizes = all(former.get(name) == recipe[name] for name in sizes)
        if trainer.schedule.counts_samples and not same_sizes and not seen <= end < next_step:
            say(
                f"with another batch size, {counted(steps, 'step')} end after {counted(seen, 'sample')}, the schedule "
                f"after {end}; to end there, give --train_samples {end}",
                warning=True,
            )


SAMPLE_COUNTS = SampleCounts()
