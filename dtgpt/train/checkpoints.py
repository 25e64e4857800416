"""What a checkpoint takes from a trainer, and gives to a trainer under any plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.state import describe
from dtgpt.config.batch_size import BatchSizes
from dtgpt.optim.step_state import entries_of
from dtgpt.posttrain.lora.checkpoint import ADAPTER, check_same_adapter
from dtgpt.run.starts import describe_run
from dtgpt.train.trainer import Trainer


def state_of(trainer: Trainer, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what `state.json` says of the steps that are done. `recipe`: its fields."""
    samples = trainer.samples_before(trainer.step)
    state = describe(recipe, trainer.settings, trainer.schedule, trainer.step, samples)
    if trainer.adapter is not None:
        state[ADAPTER] = trainer.adapter
    state |= trainer.objective.state(trainer.step)
    return state | {"data_digest": trainer.dataset.digest, **trainer.optimizer.state(), **entries_of(trainer.states)}


def begin_run(run: Path, trainer: Trainer, recipe: dict[str, Any]) -> None:
    """Make `run` a run folder, which commands take as they take those of `dtgpt train`: with what was asked for, where
    it runs, and the tokenizer. `recipe`: its fields. Every rank calls it."""

    def write() -> None:
        run.mkdir(parents=True, exist_ok=True)
        describe_run(run, recipe, trainer.settings, trainer.mesh, trainer.dataset, trainer.step)

    trainer.mesh.on_rank_0(write)


def restore(checkpoint: Checkpoint, trainer: Trainer, sizes: Callable[[int, int], BatchSizes]) -> None:
    """Load the weights, the moments and the step of a checkpoint of any plan. `sizes` returns those of the batches of a
    run that goes on at a step, after a number of samples."""
    state = checkpoint.state
    check_same_adapter(checkpoint, trainer.adapter)
    load_training(checkpoint, trainer.shards, trainer.optimizer.rule)
    trainer.restore(state, sizes(state["step"], state["consumed_samples"]))
